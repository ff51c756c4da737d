"""A store's location: a master, and the prefix of its values' names.

    NAMESPACE/abcd…         a key in hex

Values of other names belong to others.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from kvgraft import ConfigError

__all__ = ["Location"]

PORT = 50051
NAMESPACE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
HOST = re.compile(r"[A-Za-z0-9.-]+")


class Location(NamedTuple):
    """A master's host and port, and a namespace."""

    host: str
    port: int
    namespace: str

    @classmethod
    def parse(cls, text: str) -> Location:
        """A location from a URL: `HOST:PORT/NAMESPACE`; port 50051 and `kvgraft` by default.

        Raises:
            ConfigError: no host, or one of them is impossible.
        """
        server, _, namespace = text.partition("/")
        host, colon, port = server.partition(":")
        namespace = unquote(namespace).removesuffix("/") or "kvgraft"
        if not HOST.fullmatch(host):
            raise ConfigError(
                f"storage 'mooncake': {text!r} names no master; write mooncake:HOST:PORT/NAMESPACE"
            )
        if colon and not (port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ConfigError(f"storage 'mooncake': {port!r} is no port; the default is {PORT}")
        if not NAMESPACE.fullmatch(namespace):
            raise ConfigError(
                f"storage 'mooncake': namespace {namespace!r} is impossible; write names of "
                "letters, digits, dots, dashes and underscores with a slash between them"
            )
        return cls(host, int(port or PORT), namespace)

    @property
    def master(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    @property
    def pattern(self) -> str:
        """A regular expression for the names of the store's values, for Python and the master."""
        return f"^{self.namespace.replace('.', '[.]')}/[0-9a-f]{{64}}$"

    def name_of(self, key: bytes) -> str:
        """The name of a key's value."""
        return f"{self.namespace}/{key.hex()}"

    def key_of(self, name: str) -> bytes | None:
        """The key of a value by its name; None if it is not the store's."""
        if re.fullmatch(self.pattern, name) is None:
            return None
        return bytes.fromhex(name.rpartition("/")[2])

    def __str__(self) -> str:
        return f"mooncake:{self.master}/{self.namespace}"
