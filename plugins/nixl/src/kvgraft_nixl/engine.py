"""NIXL as a transport: the only module that knows of it."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvgraft import ConfigError, TransferError
from kvgraft_nixl.transport import Message, Pieces, ReadState, Region

__all__ = ["NixlTransport"]

BUILDS = ("nixl", "nixl_cu12", "nixl_cu13")
"""Modules of NIXL's distributions; the first is there beside one of the others."""

MEMORY = "DRAM"
"""NIXL's word for main memory."""


def nixl() -> Any:
    """NIXL's module.

    Raises:
        ConfigError: none of its builds is installed, or the one that is cannot be loaded.
    """
    failures = []
    for name in BUILDS:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if getattr(error, "name", None) != name:
                failures.append(f"{name}: {error}")
    said = "; ".join(failures) or "pip install --no-deps nixl-cu12"
    raise ConfigError(f"NIXL cannot be loaded: {said}")


class NixlTransport:
    """Reads other processes' memory through NIXL's UCX backend; see `Transport`.

    UCX chooses network and method by its environment: `UCX_NET_DEVICES=lo UCX_TLS=tcp` stays on
    this machine. It has no passwords: a peer that is told the address can read all registered
    memory.

    Args:
        name: unique among all peers; by default a random one.
        backend: NIXL's plugin that moves bytes.

    Raises:
        ConfigError: NIXL is not installed, or has no such plugin.
    """

    def __init__(self, name: str | None = None, *, backend: str = "UCX") -> None:
        module = nixl()
        self.name = name or f"kvgraft-{uuid.uuid4().hex[:16]}"
        self._agent: Any = module.nixl_agent(
            self.name, module.nixl_agent_config(backends=[backend])
        )
        if backend not in self._agent.backends:
            known = ", ".join(self._agent.get_plugin_list())
            raise ConfigError(f"NIXL has no plugin {backend!r}; it has {known}")
        self._peers: dict[bytes, str] = {}
        self._reads: list[_NixlRead] = []

    @property
    def address(self) -> bytes:
        """NIXL's metadata of this process: connections and registered memory."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def register(self, regions: Sequence[Region]) -> None:
        """Let others read these; see `Transport.register`."""
        rows = [(region.address, region.nbytes, 0, "") for region in regions if region.nbytes]
        _call("register", self._agent.register_memory, rows, MEMORY)

    def connect(self, address: bytes) -> str:
        """The name of the process with that address; an address is loaded once."""
        if address not in self._peers:
            name = _call("connect", self._agent.add_remote_agent, address)
            self._peers[address] = name if isinstance(name, str) else name.decode()
        return self._peers[address]

    def read(self, peer: str, source: Pieces, target: Pieces) -> _NixlRead:
        """Start to copy pieces of a peer's memory here; see `Transport.read`."""
        agent = self._agent
        ours, theirs = (agent.get_xfer_descs(_rows(each), MEMORY) for each in (target, source))
        handle = _call("read", agent.initialize_xfer, "READ", ours, theirs, peer)
        read = _NixlRead(agent, handle)
        read.begin()
        self._reads = [each for each in self._reads if each.state() is ReadState.MOVING]
        self._reads.append(read)
        return read

    def send(self, peer: str, payload: bytes) -> None:
        """Send a message as one of NIXL's notifications."""
        _call("send", self._agent.send_notif, peer, payload)

    def received(self) -> list[Message]:
        """The notifications that arrived."""
        found = _call("receive", self._agent.get_new_notifs)
        return [Message(peer, payload) for peer, all_of in found.items() for payload in all_of]

    def close(self) -> None:
        """End the agent, and with it all reads."""
        reads, self._reads, self._agent = self._reads, [], None
        for read in reads:
            read.drop()


def _rows(pieces: Pieces) -> Any:
    """Pieces as NIXL takes them, `[n, 3]`: on device 0."""
    return np.hstack([pieces, np.zeros((len(pieces), 1), np.uint64)])


def _call(what: str, call: Any, *arguments: Any) -> Any:
    """Call NIXL; its errors have no class in common."""
    try:
        return call(*arguments)
    except Exception as error:
        raise TransferError(f"NIXL: {what} failed: {type(error).__name__}: {error}") from error


class _NixlRead:
    """One of NIXL's transfers; a handle is released only when it has ended.

    Released before, NIXL forgets it while its bytes go on to arrive (seen with 1.5.1 over TCP).
    """

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._state = ReadState.MOVING

    def begin(self) -> None:
        """Start it."""
        self._ask(self._agent.transfer)

    def state(self) -> ReadState:
        """How far it is; see `Read.state`."""
        if self._state is ReadState.MOVING:
            self._ask(self._agent.check_xfer_state)
        return self._state

    def drop(self) -> None:
        """Forget the handle of an agent that ends."""
        self._agent = self._handle = None
        if self._state is ReadState.MOVING:
            self._state = ReadState.FAILED

    def _ask(self, call: Any) -> None:
        try:
            word = call(self._handle)
        except Exception:  # noqa: BLE001 - its errors have no class in common
            word = "ERR"
        if word == "PROC":
            return
        self._state = ReadState.DONE if word == "DONE" else ReadState.FAILED
        self._agent = self._handle = None
