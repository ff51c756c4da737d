"""The storage tier of one cache: attached, detached, polled, counted (S1 to S11)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from kvgraft.errors import ConfigError, LeaseError, SnapshotError
from kvgraft.packages.dispatch import Mounted
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.request import Request, expect_key
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.ledger import SlotOwner
from kvgraft.tree.pinning import Receipt
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier
from kvgraft_storage import (
    Fingerprint,
    Storage,
    StorageBackend,
    StorageTicket,
    StoreStats,
    SupervisionLimits,
    open_storage,
)
from kvgraft_storage.settings import StorageSettings
from kvgraft_storage.stats import StorageStats
from kvgraft_storage.tier.context import TierContext
from kvgraft_storage.tier.deliveries import Delivery
from kvgraft_storage.tier.naming import Naming, labels
from kvgraft_storage.tier.prefetching import Prefetch, Prefetching
from kvgraft_storage.tier.restoring import Restoring
from kvgraft_storage.tier.slabs import Slabs
from kvgraft_storage.tier.slicing import Pace
from kvgraft_storage.tier.snapshot import read_snapshot, write_snapshot
from kvgraft_storage.tier.storing import Storing
from kvgraft_storage.tier.touching import Touching
from kvgraft_storage.tier.versions import Versions

__all__ = ["StorageTier", "fingerprint_of"]

NOBODY: Mapping[int, Request] = MappingProxyType({})

logger = logging.getLogger("kvgraft")

NOT_KEPT = (
    "the store does not keep versions: stored data of cleared namespaces is a miss for this "
    "process, and another may find it; give clear(version=...) in each, or call storage.clear()"
)

STEP_S = 0.002
"""Pause between two polls while draining."""


def fingerprint_of(
    settings: StorageSettings, tree: Tree, mounted: Sequence[Mounted]
) -> Fingerprint:
    """The fingerprint of this cache's data: its model and memory layout (S8).

    Raises:
        ConfigError: a component without a HOST mirror, named; a value without canonical bytes.
    """
    geometry: dict[str, object] = {}
    dtypes = set()
    for component, each in zip(tree.components, mounted):
        mirror = each.component.host
        if mirror is None or not mirror.capacity:
            raise ConfigError(
                f"storage: component {each.name!r} has no HOST mirror to store from; "
                "set host_tokens (--host-tokens), or leave the storage out"
            )
        planes = tuple(
            (spec.layer, spec.name, tuple(spec.shape), str(spec.dtype), start)
            for spec, start in zip(mirror.specs, mirror.offsets)
        )
        dtypes |= {str(spec.dtype) for spec in mirror.specs}
        for label in labels(component):
            if label in geometry:
                raise ConfigError(
                    f"storage: {label!r} names data of two components, {each.name!r} among them; "
                    "rename the instance"
                )
            reach = component.reach.fingerprint
            geometry[label] = (reach, component.slots_per_page, mirror.slab_nbytes, planes)
    return Fingerprint(
        model=settings.model,
        weights=settings.weights,
        dtype="+".join(sorted(dtypes)),
        page_size=tree.page_size,
        geometry=geometry,
        sharding=settings.sharding,
        salt=settings.salt,
    )


class StorageTier:
    """The cache's storage tier, as `Cache.storage`.

    Args:
        tree: the cache's.
        mounted: its components.
        evictor: makes room on HOST.
        settings: policies and bounds.
        clock: monotonic, in seconds.
        pace: how long one call may take of the scheduler's thread.
        requests: those that have begun and not ended.

    Attributes:
        client: the supervised store, with its counters.
        storing: nodes on their way to the store.
        prefetching: prefixes on their way back.
        touching: notifies the store of pages that DEVICE or HOST serves.
        versions: of its namespaces, which keep cleared data from being found.
        busy: whether the last `poll` left work because its time was up: poll again without a pause.
        on_prefetch: called with every prefetch of a queued request that starts; None for no call.

    Raises:
        ConfigError: a store that cannot be opened, or components that cannot be stored.
    """

    new_client: type[Storage] = Storage
    new_storing: type[Storing] = Storing
    new_prefetching: type[Prefetching] = Prefetching
    """The classes of its parts; a subclass names others."""

    def __init__(
        self,
        tree: Tree,
        mounted: Sequence[Mounted],
        evictor: Evictor,
        settings: StorageSettings,
        clock: Callable[[], float] = time.monotonic,
        pace: Pace | None = None,
        requests: Mapping[int, Request] = NOBODY,
    ) -> None:
        self.tree = tree
        self.busy = False
        self.pace = pace or Pace()
        self.settings = settings
        self.fingerprint = fingerprint_of(settings, tree, mounted)
        limits = SupervisionLimits(
            deadline_s=settings.deadline_s, queue_timeout_s=settings.queue_timeout_s
        )
        self.client = self.new_client(self.fingerprint, limits=limits, clock=clock)
        self.versions = Versions(self.fingerprint, self.client)
        naming = Naming(tree, self.versions)
        self.touching = Touching(tree, self.client, naming, settings.deadline_s, clock)
        self.context = TierContext(
            tree, evictor, self.client, naming, Slabs(mounted), self.touching, settings.deadline_s
        )
        self.storing = self.new_storing(self.context, settings, clock)
        self.prefetching = self.new_prefetching(self.context, settings, clock)
        self.prefetching.frees_host = self._frees_host
        self.requests = requests
        self.restoring: Restoring | None = None
        self._turns = deque([self.prefetching.step, self.storing.step, self.touching.step])
        self._clearing: StorageTicket | None = None
        self._closed = False
        self.on_prefetch: Callable[[Prefetch], object] | None = None
        tree.add_observer(self.storing)
        if settings.url is not None:
            self.attach(open_storage(settings.url))

    # -- the store

    def attach(self, backend: StorageBackend) -> None:
        """Use an open store from now on; it is closed with the cache or when it is detached (S11).

        Open it on another thread while the cache serves: reading its index takes time.

        Raises:
            ConfigError: there is one already, or one is still being detached.
            LeaseError: the cache is closed.
        """
        self._expect_open()
        self.client.attach(backend)
        self.versions.attached(backend)
        self.context.naming.rename()

    def detach(self, deadline_s: float | None = None) -> StorageTicket:
        """Detach the store while serving: drain, stop, release (S11).

        Prefetches end; data waiting to be stored is dropped and counted, and so is data still on
        its way to HOST: `Cache.drain` first keeps it. Keep polling until the ticket is done.
        """
        ticket = self.client.detach(deadline_s)
        self._stop_fetching("the store was detached")
        self.storing.stop()
        self.touching.stop()
        self.client.poll()
        return ticket

    def clear(self) -> StorageTicket:
        """Remove everything from the store; the tree's notes of stored data are cleared.

        Data stored before the ticket is done may survive; it counts as removed.
        """
        self._expect_open()
        self.client.forget_store()
        self._clearing = self.client.clear()
        return self._clearing

    def ask_store(self, timeout_s: float) -> StoreStats | None:
        """The store's content now; waits for its answer, and returns None if none came in time."""
        ticket = self.client.ask("stats", lambda store: store.stats())
        ticket.wait(timeout_s)
        found = ticket.value
        return found if isinstance(found, StoreStats) else None

    # -- requests

    def prefetch(self, key: TokenKey) -> Prefetch:
        """Fetch a queued request's data from STORAGE to HOST; returns at once (S6).

        Raises:
            ConfigError: no `TokenKey`, or a namespace that has no name in storage, such as an
                object.
        """
        expect_key(key)
        self._expect_open()
        prefetch = self.prefetching.start(key)
        if self.on_prefetch is not None:
            self.on_prefetch(prefetch)
        self.prefetching.resume(prefetch, self.pace.slice())
        return prefetch

    def cancel(self, prefetch: Prefetch) -> None:
        """Give up a prefetch whose request will not begin."""
        self.prefetching.cancel(prefetch, self.pace.slice())

    # -- warm restart

    def save(self, path: str | Path) -> int:
        """Write the tree's index of stored nodes to a file; returns the nodes written.

        Data still on its way to HOST or to the store is not in it: `Cache.drain` first.

        Raises:
            SnapshotError: the file cannot be written; the cache was closed.
        """
        if self._closed:
            raise SnapshotError(f"snapshot {path}: the cache was closed; drain, save, then close")
        store = self.client.store_number
        return write_snapshot(_path(path), self.tree, self.fingerprint.digest, store)

    def load(self, path: str | Path) -> Restoring:
        """Fill HOST with the data that was used last before a restart, while requests are served.

        Raises:
            SnapshotError: a file that is missing, damaged, or of another model or layout.
        """
        self._expect_open()
        found = read_snapshot(_path(path), self.tree.page_size, self.fingerprint.digest)
        if self.restoring is not None:
            self.restoring.stop()
        self.restoring = Restoring(self.prefetching, found)
        return self.restoring

    # -- for the cache

    def cleared(self, namespaces: Collection[object] | None, version: object = None) -> bool:
        """The cache drops some namespaces, or all: no prefetch finds stored data of them any more.

        The store's data stays until it is evicted there, under names that nobody asks for. Other
        processes learn of it when they attach the store.

        Args:
            namespaces: which; None for all.
            version: of the data that is computed from now on, see `Cache.clear`.

        Returns:
            Whether the store keeps the version; it has it once `drain` returned True.

        Raises:
            ConfigError: `version` has no canonical bytes; nothing has changed.
        """
        reason = "the cache was cleared"
        kept = self.versions.change(namespaces, version)
        if not kept and version is None and self.client.attached:
            logger.warning(NOT_KEPT)
        if namespaces is None:
            self._stop_fetching(reason)
        else:
            self.prefetching.stop(reason, namespaces)
        self.prefetching.deliveries.let_go_of(namespaces)
        return kept

    def give_way(self) -> Delivery | None:
        """Unpin the data kept for the request that came last, for one that needs the room (A8).

        Returns:
            The data that gave way, for `take_back` if it was not enough; None if there is no more.
        """
        return self.prefetching.deliveries.give_way()

    def take_back(self, given: Sequence[Delivery]) -> None:
        """Pin again the data that `give_way` unpinned, if it was not enough (A9)."""
        self.prefetching.deliveries.take_back(given)

    def _expect_open(self) -> None:
        """Raise `LeaseError` once the cache is closed."""
        if self._closed:
            raise LeaseError("the cache is closed; open another")

    def _frees_host(self) -> bool:
        """Whether writes, copies or requests that load back hold HOST, and will let go."""
        return (
            bool(self.storing.receipts())
            or bool(self.context.evictor.journal.n_in_flight)
            or any(each.receipt.host_from is not None for each in self.requests.values())
        )

    def before_begin(self, key: TokenKey, prefetch: Prefetch | None) -> None:
        """A request will begin: publish the pages that arrived for it.

        Raises:
            ConfigError: its namespace has no name in storage.
            LeaseError: its prefetch was cancelled, or is of another sequence or cache.
        """
        root = self.tree.hold_root(key.namespace)
        try:
            self.context.naming.namespace(key.namespace)
            if prefetch is not None:
                self.prefetching.take(prefetch, key, self.pace.slice())
        finally:
            self.tree.release_root(root)

    def poll(self) -> None:
        """Continue all work under way, for a slice of time; never waits.

        Prefetches, writes and touches take turns, and so do prefetches among themselves.
        """
        time, self.busy = self.pace.slice(), False
        self.client.poll()
        if self._clearing is not None and self._clearing.done:
            self._clearing = None
            self.client.forget_store()
        self.versions.poll()
        self.prefetching.poll()
        self.storing.poll()
        if self.restoring is not None:
            self.restoring.poll()
        n_idle = 0
        while n_idle < len(self._turns):
            step = self._turns[0]
            self._turns.rotate(-1)
            if not step():
                n_idle += 1
            elif time.spent:
                self.busy = True
                return
            else:
                n_idle = 0

    @property
    def n_in_flight(self) -> int:
        """Prefetches and writes under way; not those that wait for room on HOST."""
        restoring = 0
        if self.restoring is not None and self.client.attached:
            restoring = self.restoring.n_in_flight
        writing = self.storing.n_in_flight + self.versions.n_writing
        return self.prefetching.n_in_flight + writing + restoring

    def drain(self, timeout_s: float) -> bool:
        """Wait for all work under way, at most `timeout_s` seconds; whether all ended.

        It does not wait for prefetches that wait for room on HOST: room comes as requests run.
        Last, it notifies the store of pending uses.
        """
        deadline = time.monotonic() + timeout_s
        self.storing.hurry()
        self.poll()
        while self._goes_on() and time.monotonic() < deadline:
            time.sleep(STEP_S)
            self.poll()
        self.touching.hurry()
        while self.touching.under_way and time.monotonic() < deadline:
            self.poll()
            time.sleep(STEP_S)
        ended = not self.n_in_flight and not self.prefetching.n_short
        return ended and not self.versions.n_unwritten

    def _goes_on(self) -> bool:
        """Whether something is under way, or begins in the room that came when it ended."""
        if not self.n_in_flight and self.prefetching.n_short:
            self.poll()
        return bool(self.n_in_flight)

    def expect(self, prefetch: object) -> None:
        """Raise `LeaseError` for other objects than this tier's prefetches."""
        self.prefetching.expect(prefetch)

    def check(self) -> None:
        """Raise `IntegrityError` unless the names of its data are those of the tree's nodes."""
        self.context.naming.check()

    def owners(self) -> list[SlotOwner]:
        """HOST slots in flight, for integrity checks."""
        by_name = self.context.tree.by_name
        return [
            SlotOwner(
                ledger.component,
                Tier.HOST,
                "a prefetch",
                slots,
                by_name[ledger.component].hosts.index(ledger),
            )
            for ledger, slots in self.prefetching.owners()
        ]

    def receipts(self) -> list[Receipt]:
        """Pins on HOST that prefetches and writes hold, for integrity checks."""
        return self.prefetching.receipts() + self.storing.receipts()

    def counts(self) -> dict[str, int]:
        """Counts since the cache was opened, by name."""
        found = {f"prefetch {name}": n for name, n in self.prefetching.counts.items()}
        found |= {f"store {name}": n for name, n in self.storing.counts.items()}
        found |= {f"touch {name}": n for name, n in self.touching.counts.items()}
        return found | self.client.counters.snapshot()

    def stats(self) -> StorageStats:
        """A copy of the counts; another thread may call it."""
        keys: dict[str, dict[str, int]] = {}
        for name, n in self.client.counters.snapshot().items():
            verb, _, status = name.partition(".")
            keys.setdefault(verb, {})[status] = n
        state = self.client.state
        return StorageStats(
            prefetches=dict(self.prefetching.counts),
            in_vain=dict(self.prefetching.in_vain),
            stores=dict(self.storing.counts),
            touches=dict(self.touching.counts),
            keys=keys,
            prefetches_in_flight=self.prefetching.n_in_flight,
            stores_in_flight=self.storing.n_in_flight,
            breaker="no store" if state is None else state.value,
            abandoned_threads=self.client.n_abandoned,
            last_error=self.client.last_error or "",
        )

    def close(self, timeout_s: float) -> bool:
        """Store waiting data and close the store; whether it closed within `timeout_s` seconds."""
        self._stop_fetching("the cache was closed")
        self.prefetching.deliveries.let_go_of(None)
        deadline = time.monotonic() + timeout_s
        self.drain(timeout_s)
        self.storing.stop()
        self._closed = True
        return self.client.close(max(0.1, deadline - time.monotonic()))

    def _stop_fetching(self, reason: str) -> None:
        if self.restoring is not None:
            self.restoring.stop()
        self.prefetching.stop(reason)


def _path(path: object) -> Path:
    if not isinstance(path, (str, Path)) or "\0" in str(path):
        raise SnapshotError(f"snapshot {path!r:.60}: is no path; give a file's name")
    return Path(path)
