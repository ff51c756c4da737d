"""The memory of a cache's pools, as addresses, and the part of it that a boundary needs.

    boundary b, in pages       component      pages                        tiers
      from page `first` on       full           [first, b)                   DEVICE
                                 window w       [max(first, b - w), b)       DEVICE
                                 states         the state at b               DEVICE
                                 home on HOST   [first, b)                   HOST, and DEVICE

A payload is the data of one component in one layer on one tier: the rows of all its planes there,
plane by plane. It is what one digest covers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvgraft import Cache, ConfigError, Request, Tier, TransferError
from kvgraft.pools import PlaneSpec, plane_nbytes
from kvgraft_nixl.transport import Pieces, Region
from kvgraft_storage import Fingerprint

if TYPE_CHECKING:
    from kvgraft.tree.component import TreeComponent

__all__ = ["CacheMemory", "Payload", "Plane", "Slots", "addresses", "fingerprint", "pieces"]

Slots = npt.NDArray[np.int32]
"""Slot numbers, `[n_rows]`; -1 where a tier has none."""

GATHERED_NBYTES = 1 << 20
"""Bytes that are gathered at a time to be hashed."""

TIERS = (Tier.DEVICE, Tier.HOST)


class Payload(NamedTuple):
    """The name of one component's data in one layer on one tier of the receiver."""

    layer: int
    component: str
    tier: Tier

    def __str__(self) -> str:
        return f"component {self.component!r}, layer {self.layer} ({self.tier.name})"


class Plane(NamedTuple):
    """One plane's rows, wherever they are.

    Attributes:
        layer, name: which plane.
        address: of the row of slot 0.
        stride: bytes from one slot's row to the next.
        nbytes: bytes of a row.
    """

    layer: int
    name: str
    address: int
    stride: int
    nbytes: int


class Rows(NamedTuple):
    """Rows of one plane, wherever they are.

    Attributes:
        nbytes: bytes of each.
        starts: their addresses, `[n_rows]`.
    """

    nbytes: int
    starts: npt.NDArray[np.uint64]


class _Pool(NamedTuple):
    """A component's planes on one tier, with their rows, integers `[n_slots, n_lanes]` each."""

    planes: tuple[Plane, ...]
    rows: tuple[npt.NDArray[Any], ...]


class CacheMemory:
    """The memory of one cache that the hand-over reads and writes.

    Args:
        cache: its pools are on the CPU, and their slots stay where they are.

    Raises:
        ConfigError: a cache whose memory others cannot read by address.

    Attributes:
        targets: the payloads that a receiver of this shape fills, layer by layer.
    """

    def __init__(self, cache: Cache) -> None:
        _expect_readable(cache)
        self.cache = cache
        self.page_size: int = cache.config.page_size
        self._parts: dict[str, TreeComponent] = {each.name: each for each in cache.tree.components}
        self._pools: dict[str, dict[Tier, _Pool]] = {}
        self._regions: list[Region] = []
        self._thread = threading.local()
        for each in cache.mounted:
            device, host = each.component.device, each.component.host
            pools = self._pools[each.name] = {}
            pools[Tier.DEVICE] = _pool(device.specs, device.lanes)
            self._regions += [Region(lanes.data_ptr(), lanes.nbytes) for lanes in device.lanes]
            if host is not None and host.capacity:
                pools[Tier.HOST] = _pool(host.specs, host.lanes)
                self._regions.append(Region(host.slab.data_ptr(), host.slab.nbytes))
        self.targets = sorted(
            {
                Payload(plane.layer, name, tier)
                for name, pools in self._pools.items()
                for tier in self._tiers(name)
                for plane in pools[tier].planes
            },
            key=lambda each: (each.layer, each.component, each.tier.value),
        )

    @property
    def components(self) -> Sequence[str]:
        """The components' names, in the tree's order."""
        return tuple(self._parts)

    def regions(self) -> list[Region]:
        """All pools, to be registered."""
        return [region for region in self._regions if region.nbytes]

    def planes(self, component: str) -> Mapping[Tier, tuple[Plane, ...]]:
        """A component's planes, by tier."""
        return {tier: pool.planes for tier, pool in self._pools[component].items()}

    def n_rows(self, component: str, first: int, boundary: int) -> int:
        """Rows of each plane that a boundary needs from page `first` on; both in pages."""
        part = self._parts[component]
        if part.is_state:
            return 1
        n_pages = sum([end - start for start, end in self._spans(component, first, boundary)])
        return n_pages * part.slots_per_page

    def nbytes(self, first: int, boundary: int) -> int:
        """Bytes that a boundary needs from page `first` on."""
        return sum(
            self.n_rows(name, first, boundary) * plane.nbytes
            for name, pools in self._pools.items()
            for tier in self._tiers(name)
            for plane in pools[tier].planes
        )

    def slots(self, request: Request, first: int, boundary: int) -> dict[str, dict[Tier, Slots]]:
        """The slots of a request's data that a boundary needs from page `first` on.

        By component and tier, page by page. A request that was begun names those that it pinned;
        of states the one at its anchor, of an admitted one its live state.
        """
        found: dict[str, dict[Tier, Slots]] = {}
        for name, part in self._parts.items():
            if part.is_state:
                found[name] = self._state(request, part)
                continue
            pages = self._spans(name, first, boundary)
            tables = {Tier.DEVICE: self.cache.table(request, name)}
            if Tier.HOST in self._pools[name]:
                tables[Tier.HOST] = self.cache.host_table(request, name)
            found[name] = {
                tier: _rows_of(table, pages, part.slots_per_page) for tier, table in tables.items()
            }
        return found

    def digests(self, slots: Mapping[str, Mapping[Tier, Slots]]) -> dict[Payload, bytes]:
        """XXH3-128 of every payload, for any thread; reads all of the data.

        Raises:
            TransferError: data is missing.
        """
        return {each: self.digest_of(each, slots) for each in self.targets}

    def digest_of(self, payload: Payload, slots: Mapping[str, Mapping[Tier, Slots]]) -> bytes:
        """XXH3-128 of one payload: its planes, row by row."""
        pools, own = self._pools[payload.component], slots[payload.component]
        hashed = xxhash.xxh3_128()
        for spec in planes_of(payload, self.planes(payload.component)):
            for tier, numbers in _runs(payload, own):
                index = _index(payload, spec, pools[tier].planes if tier in pools else ())
                at_once = max(1, GATHERED_NBYTES // spec.nbytes)
                rows = pools[tier].rows[index]
                for start in range(0, len(numbers), at_once):
                    # not torch: its threads would wait for cores that the transport uses
                    some = numbers[start : start + at_once]
                    gathered = self._scratch(rows, len(some))
                    rows.take(some, 0, out=gathered, mode="clip")
                    hashed.update(gathered.data)
        return hashed.digest()

    # -- inside

    def _scratch(self, rows: npt.NDArray[Any], n_rows: int) -> npt.NDArray[Any]:
        """Memory of this thread for so many of the rows; memory that is new costs more than it."""
        nbytes = n_rows * rows.shape[1] * rows.itemsize
        found = getattr(self._thread, "memory", None)
        if found is None or found.nbytes < nbytes:
            found = self._thread.memory = np.empty(max(nbytes, GATHERED_NBYTES), np.uint8)
        gathered: npt.NDArray[Any] = found[:nbytes].view(rows.dtype).reshape(n_rows, -1)
        return gathered

    def _tiers(self, component: str) -> tuple[Tier, ...]:
        """The tiers that a receiver fills."""
        return TIERS if self._parts[component].home_is_host else TIERS[:1]

    def _spans(self, component: str, first: int, boundary: int) -> list[tuple[int, int]]:
        """The pages that a boundary needs from page `first` on."""
        spans = self._parts[component].reach_pages.spans(boundary)
        return [(max(start, first), end) for start, end in spans if end > first]

    def _state(self, request: Request, part: TreeComponent) -> dict[Tier, Slots]:
        own = request.state_component(part.index)
        if own is not None and own.live is not None:
            return {Tier.DEVICE: np.frombuffer(own.live, np.int32)}
        cell = request.receipt.anchor.cells[part.index]
        found = {Tier.DEVICE: cell.device, Tier.HOST: cell.host}
        return {
            tier: np.full(1, -1, np.int32) if slot is None else np.frombuffer(slot, np.int32)
            for tier, slot in found.items()
        }


def planes_of(payload: Payload, planes: Mapping[Tier, Sequence[Plane]]) -> list[Plane]:
    """The planes of a payload, where a receiver fills them."""
    return [plane for plane in planes[payload.tier] if plane.layer == payload.layer]


def addresses(
    payload: Payload, planes: Mapping[Tier, Sequence[Plane]], own: Mapping[Tier, Slots]
) -> list[Rows]:
    """The rows of every plane of a payload.

    Args:
        payload: which.
        planes: a component's, here or elsewhere.
        own: slots of its rows; one that the payload's tier lacks may be on the other.

    Raises:
        TransferError: a row or a plane is missing, or has another length there.
    """
    on_tier, numbers = _located(payload, own)
    found = []
    for spec in planes_of(payload, planes):
        rows = np.zeros(len(numbers), np.uint64)
        for tier, here in ((payload.tier, on_tier), (_other(payload.tier), ~on_tier)):
            if here.any():
                known = planes.get(tier, ())
                plane = known[_index(payload, spec, known)]
                if plane.nbytes != spec.nbytes:
                    said = f"rows of {plane.nbytes} and {spec.nbytes} bytes"
                    raise TransferError(f"{payload}: {said}")
                steps = numbers[here].astype(np.uint64) * np.uint64(plane.stride)
                rows[here] = np.uint64(plane.address) + steps
        found.append(Rows(spec.nbytes, rows))
    return found


def pieces(source: Sequence[Rows], target: Sequence[Rows]) -> tuple[Pieces, Pieces]:
    """The same rows elsewhere and here as pieces.

    Rows that follow one another in both places are one piece, upwards or downwards: pools give
    slots away in either order.

    Raises:
        TransferError: other rows there than here.
    """
    shapes = [[(each.nbytes, len(each.starts)) for each in side] for side in (source, target)]
    if shapes[0] != shapes[1]:
        raise TransferError(f"the sender has rows {shapes[0]}, the receiver needs {shapes[1]}")
    sources, targets = [np.zeros((0, 2), np.uint64)], [np.zeros((0, 2), np.uint64)]
    for theirs, ours in zip(source, target):
        if not len(ours.starts):
            continue
        there, here = (np.diff(each.starts.astype(np.int64)) for each in (theirs, ours))
        alike = (there == here) & (np.abs(here) == ours.nbytes)
        goes_on = alike.copy()
        goes_on[1:] &= ~alike[:-1] | (here[1:] == here[:-1])  # all up, or all down
        first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
        last = np.append(first[1:], len(ours.starts)) - 1
        lengths = (last - first + 1).astype(np.uint64) * np.uint64(ours.nbytes)
        for side, into in ((theirs, sources), (ours, targets)):
            lowest = np.minimum(side.starts[first], side.starts[last])
            into.append(np.stack([lowest, lengths], 1))
    return np.concatenate(sources), np.concatenate(targets)


def fingerprint(
    cache: Cache, *, model: str, weights: str, sharding: Any = None, salt: Any = None
) -> Fingerprint:
    """The fingerprint of a cache's data: its model, and the shape of what is handed over.

    Where data lies in a pool is not part of it: caches of other sizes exchange data.
    """
    geometry: dict[str, Any] = {}
    dtypes = set()
    for part, each in zip(cache.tree.components, cache.mounted):
        specs = list(each.component.device.specs)
        if part.home_is_host and each.component.host is not None:
            specs += each.component.host.specs
        dtypes |= {str(spec.dtype) for spec in specs}
        shapes = tuple(
            [(spec.layer, spec.name, tuple(spec.shape), str(spec.dtype)) for spec in specs]
        )
        geometry[each.name] = (part.reach.fingerprint, part.slots_per_page, shapes)
    return Fingerprint(
        model=model,
        weights=weights,
        dtype="+".join(sorted(dtypes)),
        page_size=cache.config.page_size,
        geometry=geometry,
        sharding=sharding,
        salt=("hand-over 1", salt),
    )


# -- inside


def _expect_readable(cache: Cache) -> None:
    """Refuse caches whose slots have no lasting address on this machine."""
    if cache.arenas is not None:
        raise ConfigError(
            "hand-over: slots move in pools that share a budget; open the cache with device_tokens"
        )
    if hasattr(cache, "ranks"):
        raise ConfigError("hand-over: the cache is one of several ranks, which must decide alike")
    for each in cache.mounted:
        kind = each.component.device.device.type
        if kind != "cpu":
            raise ConfigError(
                f"hand-over: the pool of {each.name!r} is on {kind!r}; it works on pools of 'cpu'"
            )


def _pool(specs: Sequence[PlaneSpec], lanes: Sequence[torch.Tensor]) -> _Pool:
    planes = [
        Plane(
            spec.layer,
            spec.name,
            rows.data_ptr(),
            rows.stride(0) * rows.element_size(),
            plane_nbytes(spec),
        )
        for spec, rows in zip(specs, lanes)
    ]
    return _Pool(tuple(planes), tuple([rows.numpy() for rows in lanes]))


def _rows_of(table: Slots, pages: Sequence[tuple[int, int]], per_page: int) -> Slots:
    """The entries of a page table for some pages; -1 behind its end."""
    wanted = [table[start * per_page : end * per_page] for start, end in pages]
    found = np.concatenate([*wanted, np.zeros(0, np.int32)])
    missing = sum([end - start for start, end in pages]) * per_page - len(found)
    return np.concatenate([found, np.full(missing, -1, np.int32)])


def _other(tier: Tier) -> Tier:
    return Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE


def _located(
    payload: Payload, own: Mapping[Tier, Slots]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Which rows the payload's own tier has, and the slot of every row on its tier."""
    numbers = own[payload.tier].astype(np.int64)
    on_tier = numbers >= 0
    second = own.get(_other(payload.tier))
    if second is not None:
        numbers = np.where(on_tier, numbers, second)
    if (numbers < 0).any():
        raise TransferError(f"{payload}: {int((numbers < 0).sum())} of its rows are in no pool")
    return on_tier, numbers


def _runs(
    payload: Payload, own: Mapping[Tier, Slots]
) -> Iterator[tuple[Tier, npt.NDArray[np.int64]]]:
    """The rows in order, as tier and slots of rows that are on one tier."""
    on_tier, numbers = _located(payload, own)
    changes = np.flatnonzero(on_tier[1:] != on_tier[:-1]) + 1
    for some in np.split(np.arange(len(numbers)), changes):
        if len(some):
            tier = payload.tier if on_tier[some[0]] else _other(payload.tier)
            yield tier, numbers[some]


def _index(payload: Payload, spec: Plane, planes: Sequence[Plane]) -> int:
    """The plane of that layer and name."""
    for index, plane in enumerate(planes):
        if (plane.layer, plane.name) == (spec.layer, spec.name):
            return index
    raise TransferError(f"{payload}: plane {spec.name!r} is not where its row is")
