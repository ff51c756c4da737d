"""The object that a component package builds, with pools and reach; copies between its pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from kvgraft.config import ComponentOptions
from kvgraft.devices import PlaneCopy
from kvgraft.errors import ConfigError, TransferError
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.pools.device import DevicePool, slot_index
from kvgraft.pools.host import HostMirror
from kvgraft.pools.planes import PlaneSpec
from kvgraft.reach import Reach
from kvgraft.types import Direction, TransferQuery

__all__ = [
    "BuildContext",
    "Component",
    "PlaneCopy",
    "PrivatePool",
    "paged_pools",
    "pair_planes",
    "run_copy",
]


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The cache's sizes and device, for a component that builds its pools.

    Attributes:
        page_size: tokens per page.
        device: torch device of the device pools.
        device_tokens: tokens of the cache's device pools; a component whose own options size its
            pool does not follow it.
        host_tokens: the same on HOST; 0 for none.
        pin_host: whether host memory should be page-locked.
    """

    page_size: int
    device: str
    device_tokens: int
    host_tokens: int
    pin_host: bool

    def pages(self, tokens: int) -> int:
        """Whole pages in `tokens`."""
        return tokens // self.page_size

    def slots_per_page(self, tokens_per_slot: int) -> int:
        """Slots a page takes if a slot holds `tokens_per_slot` tokens, as compressed history does.

        Raises:
            ConfigError: a slot would span pages, or a page would hold a part of one.
        """
        slots, rest = divmod(self.page_size, tokens_per_slot)
        if rest or not slots:
            near = -(-self.page_size // tokens_per_slot) * tokens_per_slot
            raise ConfigError(
                f"page_size {self.page_size} is not a multiple of {tokens_per_slot} tokens per "
                f"slot; use page_size {near} or {2 * near}"
            )
        return slots


@dataclass(frozen=True, slots=True)
class PrivatePool:
    """Slots that belong to one running request at a time and never enter the tree.

    Attributes:
        name: for messages and reports.
        allocator: which slots are free.
    """

    name: str
    allocator: SlotAllocator


@dataclass(slots=True)
class Component:
    """A component at work in one cache.

    A package may subclass it to hold data for its hooks.

    Attributes:
        reach: the tokens it needs before a boundary.
        device: its device pool.
        host: its host mirror, or None when it has none.
        slots_per_page: slots one page takes, on either tier (paged components).
        private: pools for slots that only a running request holds.
    """

    reach: Reach
    device: DevicePool
    host: HostMirror | None = None
    slots_per_page: int = 1
    private: tuple[PrivatePool, ...] = field(default=())


def paged_pools(
    options: ComponentOptions,
    context: BuildContext,
    planes: Sequence[PlaneSpec],
    host_planes: Sequence[PlaneSpec] | None = None,
) -> tuple[DevicePool, HostMirror | None]:
    """A device pool and its host mirror, one slot per page.

    Args:
        options: its `device_tokens` and `host_tokens` win over the context's.
        context: page size, device and default sizes.
        planes: the planes of one page on the device.
        host_planes: those of the mirror; `planes` by default.

    Returns:
        Both pools; no mirror where the host size is 0.

    Raises:
        ConfigError: a size below one page.
    """
    device = DevicePool(planes, _whole_pages("device_tokens", options, context), context.device)
    n_host = _whole_pages("host_tokens", options, context)
    if n_host == 0:
        return device, None
    mirrored = planes if host_planes is None else host_planes
    return device, HostMirror(mirrored, n_host, pin=context.pin_host)


def _whole_pages(name: str, options: ComponentOptions, context: BuildContext) -> int:
    own: int | None = getattr(options, name)
    tokens: int = getattr(context, name) if own is None else own
    n_pages = context.pages(tokens)
    if tokens and n_pages < 1:
        raise ConfigError(
            f"{'setting' if own is None else 'option'} {name}: {tokens} tokens make no page of "
            f"{context.page_size}; give {context.page_size} or more"
        )
    return n_pages


def pair_planes(component: Component, query: TransferQuery) -> list[PlaneCopy]:
    """Copies for every plane that is in both pool and mirror, by layer and name.

    A component at home on HOST keeps more there than on DEVICE; planes without a partner are not
    copied. Pools without payload have nothing to copy.
    """
    mirror = component.host
    if mirror is None:
        raise TransferError("a component without a host mirror has nothing to transfer")
    if component.device.device.type == "meta":
        return []
    device_rows = slot_index(query.device_slots)
    host_rows = slot_index(query.host_slots)
    host_lanes = {(spec.layer, spec.name): lanes for spec, lanes in zip(mirror.specs, mirror.lanes)}
    copies = []
    for spec, lanes in zip(component.device.specs, component.device.lanes):
        partner = host_lanes.get((spec.layer, spec.name))
        if partner is None:
            continue
        if query.direction is Direction.BACKUP:
            copies.append(PlaneCopy(spec.layer, lanes, partner, device_rows, host_rows))
        else:
            copies.append(PlaneCopy(spec.layer, partner, lanes, host_rows, device_rows))
    copies.sort(key=attrgetter("layer"))
    return copies


def run_copy(copy: PlaneCopy) -> None:
    """Move the rows between CPU tensors; torch releases the interpreter lock while it works."""
    copy.target[copy.target_rows] = copy.source[copy.source_rows]


def layers_of(copies: Sequence[PlaneCopy]) -> list[int]:
    """The layers touched, in order, each once."""
    return sorted({copy.layer for copy in copies})
