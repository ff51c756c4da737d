"""Checks that a component's own copies move the transfer's data (B2, B3, R5, R7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.errors import ContractViolation
from kvgraft.pools import SLOT_BYTES, Component, DevicePool, HostMirror, PlaneSpec
from kvgraft.transfers import PlaneCopy
from kvgraft.types import Direction, TransferQuery

__all__ = ["check_copies"]

Rows = npt.NDArray[np.int64]


class _Plane(NamedTuple):
    """One plane of a component's pools."""

    tier: str
    spec: PlaneSpec


def check_copies(
    name: str, component: Component, query: TransferQuery, copies: Sequence[object]
) -> None:
    """Refuse copies that write elsewhere, pair other rows, or leave something out.

    Copies through memory that is not one of the component's planes, such as a staging buffer, are
    not checked; then missing copies are not reported either.

    O(slots x planes); planes copied with the same two index tensors are compared once.

    Raises:
        ContractViolation: B3 for a row that is not the transfer's, R7 for a layer named wrongly,
            R5 (load-back) or B2 (backup) for slots that are left out.
    """
    if component.host is None:
        return
    planes = {id(lanes): _Plane("device", spec) for spec, lanes in _pairs(component.device)}
    planes |= {id(lanes): _Plane("host", spec) for spec, lanes in _pairs(component.host)}
    paired = _keys(component.device) & _keys(component.host)
    groups: dict[tuple[int, str], list[PlaneCopy]] = {}
    foreign = False
    for copy in copies:
        if not isinstance(copy, PlaneCopy):
            foreign = True
            continue
        source, target = planes.get(id(copy.source)), planes.get(id(copy.target))
        if target is not None:
            _check_target(name, query, copy, source, target, paired)
        if source is None or target is None:
            foreign = True
            continue
        groups.setdefault((target.spec.layer, target.spec.name), []).append(copy)
    _check_rows(name, query, groups)
    missing = sorted(paired - groups.keys()) if query.device_slots and not foreign else ()
    for layer, plane in missing:
        slots = len(query.device_slots) // SLOT_BYTES
        where = f"{query.direction.value}: plane {plane!r} of layer {layer}"
        _left_out(name, query, f"{where}: none of {slots} slots are copied")


def _pairs(pool: DevicePool | HostMirror) -> list[tuple[PlaneSpec, object]]:
    return list(zip(pool.specs, pool.lanes))


def _keys(pool: DevicePool | HostMirror) -> set[tuple[int, str]]:
    return {(spec.layer, spec.name) for spec in pool.specs}


def _check_target(
    name: str,
    query: TransferQuery,
    copy: PlaneCopy,
    source: _Plane | None,
    target: _Plane,
    paired: set[tuple[int, str]],
) -> None:
    """The copy writes the right tier, from the plane of the same name, under its own layer."""
    into = "host" if query.direction is Direction.BACKUP else "device"
    if target.tier != into:
        raise ContractViolation(
            "B3",
            name,
            f"a {query.direction.value} writes {len(copy.target_rows)} rows of the {target.tier} "
            f"pool; it writes {into}",
        )
    same = source is None or source.spec[:2] == target.spec[:2]
    if source is not None and (source.tier == into or (target.spec[:2] in paired and not same)):
        raise ContractViolation(
            "B3",
            name,
            f"a {query.direction.value} copies plane {source.spec.name!r} of layer "
            f"{source.spec.layer} on {source.tier} to plane {target.spec.name!r} of layer "
            f"{target.spec.layer} on {into}",
        )
    if copy.layer != target.spec.layer:
        raise ContractViolation(
            "R7",
            name,
            f"a copy into layer {target.spec.layer} names layer {copy.layer}, whose data would be "
            "read before it is there",
        )


def _check_rows(
    name: str, query: TransferQuery, groups: dict[tuple[int, str], list[PlaneCopy]]
) -> None:
    """Every row of every plane goes where its slot goes, once."""
    backup = query.direction is Direction.BACKUP
    device = np.frombuffer(query.device_slots, np.int32).astype(np.int64)
    host = np.frombuffer(query.host_slots, np.int32).astype(np.int64)
    source, target = (device, host) if backup else (host, device)
    seen: set[tuple[int, int]] = set()
    for (layer, plane), copies in groups.items():
        indexes = (id(copies[0].source_rows), id(copies[0].target_rows))
        if len(copies) == 1:
            if indexes in seen:
                continue
            seen.add(indexes)
        where = f"{query.direction.value}: plane {plane!r} of layer {layer}"
        read = np.concatenate([_rows(copy.source_rows) for copy in copies])
        written = np.concatenate([_rows(copy.target_rows) for copy in copies])
        if np.array_equal(read, source) and np.array_equal(written, target):
            continue
        _check_pairs(name, query, where, list(zip(read.tolist(), written.tolist())))
        if len(read) != len(written):
            raise ContractViolation(
                "B3", name, f"{where}: {len(read)} rows are read and {len(written)} written"
            )


def _check_pairs(name: str, query: TransferQuery, where: str, moved: list[tuple[int, int]]) -> None:
    """Rows copied in some order of their own are still the query's, each once and all of them."""
    backup = query.direction is Direction.BACKUP
    device = np.frombuffer(query.device_slots, np.int32).tolist()
    host = np.frombuffer(query.host_slots, np.int32).tolist()
    wanted = set(zip(device, host) if backup else zip(host, device))
    strange = [pair for pair in moved if pair not in wanted]
    if strange:
        read, written = strange[0]
        raise ContractViolation(
            "B3",
            name,
            f"{where} copies row {read} to row {written}, which is none of the transfer's "
            f"{len(wanted)} pairs; {len(strange)} of {len(moved)} rows are not",
        )
    if len(set(moved)) < len(moved):
        raise ContractViolation(
            "B3", name, f"{where}: {len(moved)} rows are copied, {len(set(moved))} of them distinct"
        )
    if len(moved) < len(wanted):
        _left_out(name, query, f"{where}: {len(moved)} of {len(wanted)} slots are copied")


def _left_out(name: str, query: TransferQuery, evidence: str) -> None:
    """Data that stays behind: a load-back that delivers less, a backup that is not whole."""
    if query.direction is Direction.BACKUP:
        raise ContractViolation("B2", name, evidence)
    raise ContractViolation("R5", name, evidence)


def _rows(rows: Any) -> Rows:
    return np.asarray(rows, dtype=np.int64)
