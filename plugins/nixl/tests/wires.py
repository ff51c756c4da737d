"""A transport between caches of one process, with faults: what a network may do, step by step."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Sequence

from kvgraft import TransferError
from kvgraft_nixl import Message, Pieces, ReadState, Region


class Wires:
    """Connects ends. Attributes say what goes wrong from now on; `step` moves bytes.

    Attributes:
        dead: ends that are gone.
        lost: chance that a message is lost.
        damage: chance that a read brings a wrong byte.
        slow: whether reads stand still.
        written: bytes that reads wrote.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.ends: dict[str, WireEnd] = {}
        self.dead: set[str] = set()
        self.lost = self.damage = 0.0
        self.slow = False
        self.written = 0

    def end(self, name: str) -> WireEnd:
        self.ends[name] = found = WireEnd(self, name)
        return found

    def step(self, n_pieces: int = 1 << 30) -> None:
        """Move up to so many pieces of every read."""
        for end in [*self.ends.values()]:
            for read in [*end.reads]:
                read.move(n_pieces)


class WireEnd:
    """One cache's end; see `kvgraft_nixl.Transport`."""

    def __init__(self, wires: Wires, name: str) -> None:
        self.wires = wires
        self.name = name
        self.regions: list[Region] = []
        self.inbox: deque[Message] = deque()
        self.reads: list[WireRead] = []
        self.closed = False

    @property
    def address(self) -> bytes:
        return self.name.encode()

    def register(self, regions: Sequence[Region]) -> None:
        self.regions += regions

    def connect(self, address: bytes) -> str:
        name = address.decode(errors="replace")
        if name not in self.wires.ends:
            raise TransferError(f"no end {name!r}")
        return name

    def read(self, peer: str, source: Pieces, target: Pieces) -> WireRead:
        if peer in self.wires.dead:
            raise TransferError(f"{peer} is gone")
        theirs = self.wires.ends[peer].regions
        for pieces, regions in ((source, theirs), (target, self.regions)):
            for address, nbytes in pieces.tolist():
                assert any(
                    each.address <= address and address + nbytes <= each.address + each.nbytes
                    for each in regions
                ), "a piece is not registered"
        read = WireRead(self, peer, deque(zip(source.tolist(), target.tolist())))
        self.reads.append(read)
        return read

    def send(self, peer: str, payload: bytes) -> None:
        assert not self.closed, "a message on a transport that is closed"
        if peer in self.wires.dead or self.wires.ends[peer].closed:
            raise TransferError(f"{peer} is gone")
        if self.wires.random.random() >= self.wires.lost:
            self.wires.ends[peer].inbox.append(Message(self.name, payload))

    def received(self) -> list[Message]:
        found = [*self.inbox]
        self.inbox.clear()
        return found

    def close(self) -> None:
        self.closed = True
        for read in self.reads:
            read.left.clear()
            read.ended = read.ended or ReadState.FAILED
        self.reads.clear()


class WireRead:
    """One read: its pieces move when the wires step."""

    def __init__(self, end: WireEnd, peer: str, left: deque[tuple[list[int], list[int]]]) -> None:
        self.end = end
        self.peer = peer
        self.left = left
        self.ended: ReadState | None = None

    def state(self) -> ReadState:
        return self.ended or ReadState.MOVING

    def move(self, n_pieces: int) -> None:
        wires = self.end.wires
        if self.ended is None and self.peer in wires.dead:
            self.left.clear()
            self.ended = ReadState.FAILED
            self.end.reads.remove(self)
        if self.ended is not None or wires.slow:
            return
        for _ in range(min(n_pieces, len(self.left))):
            (source, nbytes), (target, _) = self.left.popleft()
            ctypes.memmove(target, source, nbytes)
            wires.written += nbytes
            if wires.random.random() < wires.damage:
                byte = ctypes.c_ubyte.from_address(target + wires.random.randrange(nbytes))
                byte.value ^= 1 << wires.random.randrange(8)
        if not self.left:
            self.ended = ReadState.DONE
            self.end.reads.remove(self)
