"""Options in the URL of a store: servers, credentials, names, times."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import ConfigDict, Field, FilePath, model_validator
from typing_extensions import Self

from kvgraft import ConfigError
from kvgraft_storage import StorageOptions

__all__ = ["Server", "ValkeyOptions", "parse_location"]

DEFAULT_PORT = 6379
FORM = "write valkey:HOST:PORT, for a cluster also valkey:HOST:PORT,HOST:PORT"


class ValkeyOptions(StorageOptions):
    """Options for reaching the servers, and for the names of stored values.

    A URL holds no password, because URLs are printed; `password_env` names the variable that has
    it.

    Attributes:
        cluster: whether the servers are a cluster; the location then needs to name only some of
            them.
        tls: whether to speak TLS.
        tls_ca: PEM file of the authorities to trust instead of the system's; needs `tls`.
        username: the user to log in as, with `password_env`; the server's default user if None.
        password_env: environment variable that holds the password; no log-in if None.
        database: number of the database; a cluster has only 0.
        prefix: prefix of all keys. Stores with different ones do not see each other.
        ttl_s: seconds after which the server drops a value; None for never.
        timeout_s: longest wait for one answer in calls without a deadline, and for a value that is
            read directly into its memory.
        connect_timeout_s: longest wait for a connection.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    cluster: bool = False
    tls: bool = False
    tls_ca: FilePath | None = None
    username: str | None = Field(default=None, min_length=1)
    password_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    database: int = Field(default=0, ge=0)
    prefix: str = Field(default="kvgraft:", pattern=r"^[A-Za-z0-9_.:/-]+$", max_length=200)
    ttl_s: float | None = Field(default=None, ge=0.001, le=1e10)
    timeout_s: float = Field(default=1.0, ge=0.001, le=3600)
    connect_timeout_s: float = Field(default=2.0, ge=0.001, le=3600)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.tls_ca is not None and not self.tls:
            raise ValueError("option tls_ca needs tls=true")
        if self.username is not None and self.password_env is None:
            raise ValueError("option username needs password_env, the variable with its password")
        if self.cluster and self.database:
            raise ValueError(f"option database={self.database}: a cluster has only database 0")
        return self


class Server(NamedTuple):
    """Host and port of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_location(location: str) -> list[Server]:
    """The servers of a URL.

    Raises:
        ConfigError: they are not written `HOST:PORT,HOST:PORT`; the message repeats none of it,
            since there may be a password in it.
    """
    if "@" in location:
        raise ConfigError(
            "storage 'valkey': the location has an '@'; give username= and password_env= instead"
        )
    return [_server(each) for each in location.removeprefix("//").split(",")]


def _server(text: str) -> Server:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host == f"[{bare}]"
    if not bare or "/" in bare or (":" in bare) is not bracketed:
        raise ConfigError(f"storage 'valkey': the location is no list of servers; {FORM}")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"storage 'valkey': the port of {bare} is not 1 to 65535; {FORM}")
    return Server(bare, int(port))
