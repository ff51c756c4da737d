"""Calls of Mooncake's client library, only while it can take them.

The library ends the process if a store is used before its set-up or after its close, and it waits
minutes for a missing master. So it is called only while the store is open, and only if the master
accepts connections.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvgraft import ConfigError
from kvgraft_mooncake.codes import MooncakeError, meaning
from kvgraft_mooncake.location import Location
from kvgraft_mooncake.options import MooncakeOptions
from kvgraft_mooncake.regions import Regions, address_of
from kvgraft_storage import Value

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Client"]

T = TypeVar("T")

INFINIBAND = Path("/sys/class/infiniband")


class Client:
    """One process's part in a store.

    Args:
        location: the master.
        options: options of this process's part.

    Attributes:
        regions: memory that calls use.

    Raises:
        ConfigError: no library, no device, no master, or a set-up that failed.
    """

    def __init__(self, location: Location, options: MooncakeOptions) -> None:
        library = _library()
        self._location = location
        self._options = options
        _expect_devices(options)
        try:
            address = options.address or self.reach_master()
        except OSError as error:
            raise ConfigError(
                f"storage 'mooncake': master {location.master}: {error}; "
                "start mooncake_master there or name another one"
            ) from error
        self._replicas = library.ReplicateConfig()
        self._replicas.replica_num = options.replicas
        self._store: Any = library.MooncakeDistributedStore()
        code = self._store.setup(
            address,
            options.metadata,
            int(options.segment),
            int(options.buffer),
            options.protocol,
            options.devices,
            location.master,
        )
        if code != 0:
            raise ConfigError(
                f"storage 'mooncake': set-up as {address} over {options.protocol} failed: "
                f"{meaning(code)}; Mooncake's own lines on stderr say why"
            )
        self.regions = Regions(self._register)
        self._changed = threading.Condition()
        self._n_calls = 0
        self._closed = False

    def close(self) -> None:
        """Wait for calls to end, then leave the store; this process's segment is lost."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: not self._n_calls)
        for address in self.regions.addresses:
            self._store.unregister_buffer(address)
        self._store.close()

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._closed

    def expect_open(self) -> None:
        """Raise `ConfigError` if it was closed."""
        if self._closed:
            raise ConfigError(f"storage 'mooncake': {self._location} was closed; open it again")

    def reach_master(self) -> str:
        """Connect to the master; returns this machine's address on that connection.

        Raises:
            OSError: it cannot be reached in time.
        """
        server = (self._location.host, self._location.port)
        with socket.create_connection(server, self._options.timeout_s) as connection:
            address: str = connection.getsockname()[0]
            return address

    # -- calls; each blocks as long as the library's call

    def exist(self, names: Sequence[str]) -> list[int]:
        """Per name 1, 0 or an error code."""
        return self._call(lambda store: store.batch_is_exist(list(names)))

    def size(self, name: str) -> int:
        """Bytes of a value, or an error code."""
        return self._call(lambda store: int(store.get_size(name)))

    def get(self, names: Sequence[str], values: Sequence[Value]) -> list[int]:
        """Read into registered memory; per name the bytes read, or an error code."""
        return self._call(
            lambda store: store.batch_get_into_multi_buffers(list(names), *_places(values))
        )

    def put(self, names: Sequence[str], values: Sequence[Value]) -> list[int]:
        """Store from registered memory; per name 0 or an error code; existing values are kept."""
        return self._call(
            lambda store: store.batch_put_from_multi_buffers(
                list(names), *_places(values), self._replicas
            )
        )

    def remove(self, names: Sequence[str], *, leased: bool = False) -> list[int]:
        """Remove values, leased ones only on request; per name 0 or an error code.

        A value that is removed under a lease may be in a read or a store, and its memory may be
        given to another value.
        """
        return self._call(lambda store: store.batch_remove(list(names), leased))

    # -- inside

    def _call(self, ask: Callable[[Any], T]) -> T:
        with self._asking():
            return ask(self._store)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with self._changed:
            self.expect_open()
            self._n_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_calls -= 1
                self._changed.notify_all()

    def unregister(self, memory: memoryview) -> None:
        """Undo `regions.add`."""
        address = self.regions.remove(memory)
        if address is None:
            return
        code = self._call(lambda store: store.unregister_buffer(address))
        if code != 0:
            raise MooncakeError(f"{len(memory)} bytes cannot be unregistered: {meaning(code)}")

    def _register(self, address: int, nbytes: int) -> None:
        code = self._call(lambda store: store.register_buffer(address, nbytes))
        if code != 0:
            raise MooncakeError(f"{nbytes} bytes cannot be registered: {meaning(code)}")


def _library() -> ModuleType:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # the library reads it when it is loaded
    try:
        return import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(
            f"storage 'mooncake': Mooncake's client cannot be loaded: {error}; install "
            "libibverbs1, libcurl4 and libnuma1, and the build of mooncake-transfer-engine for "
            "this machine, such as 'kvgraft-mooncake[cpu]'"
        ) from error


def _expect_devices(options: MooncakeOptions) -> None:
    """Refuse RDMA without a device: the library would silently use TCP."""
    if options.protocol != "rdma":
        return
    there = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    wanted = options.devices.split(",") if options.devices else []
    if not there or set(wanted) - set(there):
        raise ConfigError(
            f"storage 'mooncake': protocol rdma with devices {options.devices or 'of any name'}; "
            f"this machine has {', '.join(there) or 'none'}; use protocol=tcp"
        )


def _places(values: Sequence[Value]) -> tuple[list[list[int]], list[list[int]]]:
    views = [(value.header, *value.parts) for value in values]
    addresses = [[address_of(view) for view in each] for each in views]
    return addresses, [[len(view) for view in each] for each in views]
