"""The memory that a cache's pools will take, added up before any is allocated.

A component builds its pools itself, in any place: in its fields, behind a private pool, in an
object of its own. So pools report the memory that they will take to the plan that is open when they
are built. They take it when the plan is settled, or at an earlier first use. The kernel overcommits
memory and kills a process that uses too much, without a message. So the core checks first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvgraft.devices import DeviceRuntime
from kvgraft.errors import ConfigError
from kvgraft.optional import load_part
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.sizes import format_nbytes
from kvgraft.types import Tier

AvailableMemory = Callable[[torch.device], "int | None"]
"""Bytes that can be taken on a device, or None where it is unknown; the CPU stands for the host."""


def available_nbytes(device: torch.device) -> int | None:
    """Bytes that can be taken on `device` now; None where the system does not report it.

    For CUDA the driver's free memory plus torch's reserve.
    """
    if device.type == "cpu":
        return host_available_nbytes()
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return None


def host_available_nbytes(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that can be taken without swapping; None where that is unknown.

    The minimum of the machine's available memory and of the limit less the use of each control
    group (v2 or v1) of this process and above it. Caches of files do not count as used, since the
    kernel frees them. On other systems than Linux it is the free physical memory, or all of it
    where the system reports no more.

    Args:
        root: where `proc` and `sys` are.
    """
    found = [_meminfo(root / "proc/meminfo"), *_control_groups(root)]
    known = [nbytes for nbytes in found if nbytes is not None]
    return max(0, min(known)) if known else _sysconf()


def _meminfo(path: Path) -> int | None:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_groups(root: Path) -> Iterator[int | None]:
    """Bytes that each control group with a limit leaves."""
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for group in _upwards(mount, path):
                yield _left(group, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            for group in _upwards(mount / "memory", path):
                yield _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it, as far as this mount shows them."""
    group = mount / path.lstrip("/")
    while group != mount and mount in group.parents:
        yield group
        group = group.parent
    yield mount


def _left(group: Path, limit: str, used: str, prefix: str) -> int | None:
    most, now = _number(group / limit), _number(group / used)
    if most is None or now is None:
        return None
    caches = (f"{prefix}inactive_file", f"{prefix}active_file")
    fields = (line.split() for line in _lines(group / "memory.stat"))
    given_up = sum(int(value) for name, value in fields if name in caches)
    return most - max(0, now - given_up)


def _number(path: Path) -> int | None:
    """A file's only number; None without the file, or where it says "max"."""
    for line in _lines(path):
        return int(line) if line.isdigit() else None
    return None


def _lines(path: Path) -> list[str]:
    """A file's lines; none where it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _sysconf() -> int | None:
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        try:
            n_pages = os.sysconf(name)
        except (ValueError, OSError, AttributeError):
            continue
        if n_pages >= 0:
            return n_pages * os.sysconf("SC_PAGE_SIZE")
    return None


CPU = torch.device("cpu")
NO_PAYLOAD = torch.device("meta")
"""Torch's device for tensors that have a shape and no memory."""


@dataclass(slots=True, eq=False)
class PlannedMemory:
    """The memory of one pool.

    Attributes:
        component: its component.
        tier: the pool's.
        device: where the memory is; torch's `meta` for a pool without payload.
        nbytes: its size.
        plan: its plan.
        limit_nbytes: the most that it may become, where its boundary can move; else None.
        limit_slots: the same in slots, once the pool has asked for those.
    """

    component: str
    tier: Tier
    device: torch.device
    nbytes: int
    plan: PoolPlan
    limit_nbytes: int | None = None
    limit_slots: int | None = None

    def allocator(self, n_slots: int, slot_nbytes: int) -> SlotAllocator:
        """The slots of the pool: `n_slots`, and room for more where its boundary can move."""
        if self.limit_nbytes is None:
            return SlotAllocator(n_slots)
        memory = load_part("memory")
        resizable = memory.allocator(n_slots, slot_nbytes, self.limit_nbytes)
        self.limit_slots = resizable.limit
        made: SlotAllocator = resizable
        return made

    @property
    def runtime(self) -> DeviceRuntime | None:
        """The device that takes the memory; None for torch, and without payload."""
        return None if self.device == NO_PAYLOAD else self.plan.runtime

    def take(self, allocate: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor of this memory; everything planned so far must fit.

        Raises:
            ConfigError: it does not fit, or torch does not get it.
        """
        self.plan.expect_room()
        try:
            return allocate()
        except (RuntimeError, MemoryError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{self.plan.needs(self.device)}, torch: {reason}") from error


@dataclass(slots=True)
class PoolPlan:
    """The pools of one cache.

    Args:
        available: says how much memory there is.
        payload: false for pools of shapes without memory, on torch's device `meta`.
        runtime: takes the memory of DEVICE, and page-locked memory of HOST; None for torch's.
        budgets: by tier, the bytes that its pools share behind boundaries that can move.
    """

    available: AvailableMemory = available_nbytes
    payload: bool = True
    runtime: DeviceRuntime | None = None
    budgets: Mapping[Tier, int] = field(default_factory=dict)
    pools: list[PlannedMemory] = field(default_factory=list)
    takers: list[Callable[[], object]] = field(default_factory=list)
    _component: str = ""
    _available: dict[torch.device, int | None] = field(default_factory=dict)

    @contextmanager
    def building(self, component: str) -> Iterator[None]:
        """Pools built inside are this component's and part of the plan."""
        self._component = component
        token = _open_plan.set(self)
        try:
            yield
        finally:
            _open_plan.reset(token)

    def add(
        self, tier: Tier, device: torch.device, nbytes: int, *, is_locked: bool = False
    ) -> PlannedMemory:
        """Add a pool; page-locked memory cannot move, nor memory without reserved address space."""
        where = device if self.payload else NO_PAYLOAD
        is_locked = is_locked or (tier is Tier.HOST and self.runtime is not None)
        limit = self.budgets.get(tier)
        if limit is not None and where != NO_PAYLOAD:
            limit = limit if not is_locked and load_part("memory").can_reserve(where) else None
        pool = PlannedMemory(self._component, tier, where, nbytes, self, limit)
        self.pools.append(pool)
        return pool

    def nbytes(self, tier: Tier) -> int:
        """Bytes of all pools of a tier, with payload or without."""
        return sum(pool.nbytes for pool in self.pools if pool.tier is tier)

    def settle(self) -> None:
        """Take the memory of all pools, if it is available.

        Raises:
            ConfigError: it is not there.
        """
        self.expect_room()
        takers, self.takers = self.takers, []
        for take in takers:
            take()

    def expect_room(self) -> None:
        """Refuse pools that are larger than the available memory, as first measured.

        Raises:
            ConfigError: with every component's need, per tier, and the memory available.
        """
        for device in dict.fromkeys(pool.device for pool in self.pools):
            if device == NO_PAYLOAD:
                continue
            if device not in self._available:
                self._available[device] = self.available(device)
            room = self._available[device]
            if room is not None and self._needed(device) > room:
                machine = "the machine" if device == CPU else f"{device}"
                raise ConfigError(
                    f"{self.needs(device)}, {machine} has {format_nbytes(room)} available; "
                    f"lower {self._causes(device)}"
                )

    def needs(self, device: torch.device) -> str:
        """The bytes that the pools on a device need, per component and tier, as text."""
        shares: dict[str, dict[Tier, int]] = {}
        for pool in self.pools:
            if pool.device == device:
                tiers = shares.setdefault(pool.component, {})
                tiers[pool.tier] = tiers.get(pool.tier, 0) + pool.nbytes
        listed = "; ".join(
            f"{name}: " * bool(name)
            + ", ".join(f"{tier.value} {format_nbytes(n)}" for tier, n in tiers.items())
            for name, tiers in shares.items()
        )
        return f"pools need {format_nbytes(self._needed(device))} ({listed})"

    def _needed(self, device: torch.device) -> int:
        return sum(pool.nbytes for pool in self.pools if pool.device == device)

    def _causes(self, device: torch.device) -> str:
        """The settings of the tiers on a device, that of the larger one first."""
        tiers: dict[Tier, int] = {}
        for pool in self.pools:
            if pool.device == device:
                tiers[pool.tier] = tiers.get(pool.tier, 0) + pool.nbytes
        ranked = sorted(tiers, key=lambda tier: -tiers[tier])
        return " or ".join(f"setting {tier.value}_tokens" for tier in ranked)


_open_plan: ContextVar[PoolPlan | None] = ContextVar("kvgraft pool plan", default=None)


def plan_memory(
    tier: Tier,
    device: torch.device,
    nbytes: int,
    take: Callable[[], object],
    *,
    is_locked: bool = False,
) -> PlannedMemory:
    """Report a pool to the plan that is open, which calls `take` to make it take its memory.

    A pool that is built by itself is a plan of its own and takes memory when it is used.
    """
    plan = _open_plan.get()
    if plan is None:
        return PoolPlan().add(tier, device, nbytes)
    plan.takers.append(take)
    return plan.add(tier, device, nbytes, is_locked=is_locked)
