"""The object a component package builds: its pools and its reach."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgraft.errors import ConfigError
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.pools.device import DevicePool
from kvgraft.pools.host import HostMirror
from kvgraft.reach import Reach

__all__ = ["BuildContext", "Component", "PrivatePool"]


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

    A package may subclass it to keep data for its hooks.

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
