"""All calls of a component's hooks, on its own."""

from __future__ import annotations

import binascii
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from kvgraft_testing.production.engine.timing import Note, Timed

__all__ = ["PAGES", "Asking", "digest"]

PAGES = 16
SIZES = ((1, 2, 4), (8,), (16,), (32,), (64,), (128,))
"""Page sizes; those of the first group that are accepted."""
POOLS = ("device_tokens", "host_tokens")
"""Options of all components: sizes of pools, which differ anyway."""


class Cache(NamedTuple):
    """Settings for which a component is built.

    Attributes:
        where: the same in words, for notes.
        options: its options.
        page_size: tokens per page.
        pages, host_pages: about this many pages on DEVICE and on HOST.
    """

    where: str
    options: dict[str, Any]
    page_size: int
    pages: int
    host_pages: int


class Asking:
    """Calls hooks and notes their answers."""

    def __init__(self, plugin: Any, options: dict[str, Any], note: Note, timed: Timed) -> None:
        self.plugin, self.options, self.note, self.timed = plugin, options, note, timed

    def _page_sizes(self, *, largest_first: bool) -> list[int]:
        """The page sizes that it accepts; it is built for them in this order."""
        for sizes in SIZES:
            tried = sorted(sizes, reverse=largest_first)
            caches = [_cache(self.options, size, PAGES) for size in tried]
            accepted = [each.page_size for each in caches if self._mount(each) is not None]
            if accepted:
                return sorted(accepted)
        return []

    def caches(self, *, largest_first: bool = False) -> list[Cache]:
        """Caches that differ: of each page size, without HOST, larger ones, and other options."""
        sizes = self._page_sizes(largest_first=largest_first)
        found = [_cache(self.options, size, pages) for size in sizes for pages in (PAGES, 0)]
        if sizes:
            found.append(_cache(self.options, sizes[-1], PAGES, 2 * PAGES))
        for other in self._others(sizes[-1]) if sizes else ():
            changed = {**self.options, **other}
            found += [_cache(changed, size, PAGES, of=f", {other}") for size in sizes[:2]]
        return found

    def _others(self, page_size: int) -> list[dict[str, Any]]:
        """Other options: all numbers are larger and all switches turned, or else one of them.

        None if it has none of them.
        """
        from kvgraft.packages.dispatch import parse_options

        larger, tripled = {}, {}
        for name, value in parse_options(self.plugin, self.options):
            if name not in POOLS and type(value) in (int, bool):
                larger[name] = not value if type(value) is bool else value + 1
                tripled[name] = not value if type(value) is bool else 3 * value
        single = [{name: each[name]} for name in larger for each in (tripled, larger)]
        for other in (larger, tripled, *single):
            changed = {**self.options, **other}
            if other and self._mount(_cache(changed, page_size, PAGES)) is not None:
                return [other]
        return []

    def _mount(self, cache: Cache) -> Any:
        """The component, built; None if it refuses."""
        from kvgraft.errors import KvgraftError
        from kvgraft.packages.dispatch import mount
        from kvgraft.pools import BuildContext

        size = cache.page_size
        context = BuildContext(size, "cpu", cache.pages * size, cache.host_pages * size, False)
        try:
            return mount(self.plugin, cache.options, context)
        except KvgraftError as error:
            self.note("seen", f"build with {cache.where}", str(error))
            return None

    def ask(self, cache: Cache) -> None:
        """Build it and call all its hooks."""
        mounted = self._mount(cache)
        if mounted is not None:
            self._ask(mounted, cache.where, cache.page_size)

    def ask_together(self) -> None:
        """All of them are built first, and asked last to first: one of other options before."""
        tried = [size for sizes in SIZES for size in reversed(sizes)]
        any(self._others(size) for size in tried)
        caches = self.caches(largest_first=True)
        built = {each.where: self._mount(each) for each in reversed(caches)}
        for each in reversed(caches):
            if built[each.where] is not None:
                self._ask(built[each.where], each.where, each.page_size)

    def _ask(self, mounted: Any, where: str, page_size: int) -> None:
        self.note("cache", where, "")
        component = mounted.component
        self.note("seen", f"reach, {where}", f"{component.reach}, {component.slots_per_page}")
        for name, pool in _pools(component):
            self.note("seen", f"{name} pool, {where}", f"{pool.capacity} slots of {pool.specs}")
            self.note("seen", f"{name} slots, {where}", _allocated(pool.allocator))
            _fill(pool)
        for each in component.private:
            self.note("seen", f"pool {each.name}, {where}", _allocated(each.allocator))
        views, boundaries, demands = _questions(page_size)
        for view in views if mounted.finalize_match_result is not None else ():
            self._answer("finalize_match_result", mounted.finalize_match_result, view)
        locks = mounted.lock_hooks
        for boundary in boundaries if locks is not None else ():
            segment = self._answer("acquire_component_lock", locks.acquire, boundary)
            if segment is not None:
                self._answer("release_component_lock", locks.release, segment)
        for demand in demands if mounted.budget_contribution is not None else ():
            self._answer("budget_contribution", mounted.budget_contribution, demand)
        if component.host is not None:
            self._copy(mounted)
        if component.reach.is_state:
            component.device.copy_slots(_slots([0]), _slots([1]))
        self.note("seen", f"bytes, {where}", digest(component))

    def _answer(self, hook: str, function: Callable[[Any], Any], query: Any) -> Any:
        """Ask a hook; return its answer, None also if it raises.

        Where it is slow it is asked again, for its time alone: a busy machine is slow as well, and
        the notes are the same each time.
        """
        if self.timed.blocked:
            return None
        answer = self._asked(hook, function, query)
        while self.timed.is_slow(hook):
            with suppress(Exception):
                function(query)
        return answer

    def _asked(self, hook: str, function: Callable[[Any], Any], query: Any) -> Any:
        from kvgraft.errors import PluginError, PluginHookError
        from kvgraft.packages.dispatch import are_spans, shown

        try:
            answer = function(query)
        except PluginHookError as error:
            self.note("raised", hook, error.reason)
            return None
        except PluginError as error:
            self.note("form", hook, error.reason)
            return None
        if hook == "acquire_component_lock" and answer is not None and not are_spans(answer):
            said = f"{hook} returned {shown(answer)}, not a list of Span in whole pages"
            self.note("form", hook, said)
            return None
        self.note("seen", f"{hook}({_told(query)})", _told(answer))
        return answer

    def _copy(self, mounted: Any) -> None:
        """Back some slots up, load them into others; one transfer is given up."""
        from kvgraft.pools.component import run_copy
        from kvgraft.transfers import pair_planes
        from kvgraft.types import Direction, TransferQuery

        component = mounted.component
        n_slots = min(5, component.device.capacity, component.host.capacity)
        for direction in (Direction.BACKUP, Direction.LOAD_BACK, Direction.BACKUP):
            draw = random.Random(str(direction))
            device = draw.sample(range(component.device.capacity), n_slots)
            host = draw.sample(range(component.host.capacity), n_slots)
            query = TransferQuery(direction, _slots(device), _slots(host))
            copies, hooks = None, mounted.transfer_hooks
            if hooks is not None:
                copies = self._answer("build_hicache_transfers", hooks.build, query)
            try:
                for copy in pair_planes(component, query) if copies is None else copies:
                    run_copy(copy)
            except Exception as error:  # noqa: BLE001 - other clauses judge it
                self.note("seen", f"copies, {direction.value}", f"{type(error).__name__}: {error}")
            if hooks is None:
                continue
            if direction is Direction.LOAD_BACK:
                self._answer("abort_hicache_transfers", hooks.abort, query)
            else:
                self._answer("commit_hicache_transfers", hooks.commit, query)


def _cache(
    options: dict[str, Any], page_size: int, host_pages: int, pages: int = PAGES, of: str = ""
) -> Cache:
    where = f"pages of {page_size}, {host_pages} on HOST"
    if pages != PAGES:
        where += f", {pages} on DEVICE"
    return Cache(where + of, options, page_size, pages, host_pages)


def _pools(component: Any) -> list[tuple[str, Any]]:
    pools = [("DEVICE", component.device), ("HOST", component.host)]
    return [(name, pool) for name, pool in pools if pool is not None]


def _slots(numbers: list[int]) -> bytes:
    return b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)


def _allocated(allocator: Any) -> str:
    """The order of slots, before and after some are given back."""
    first, second = allocator.allocate(3), allocator.allocate(2)
    for slots in (first, second):
        if slots is not None:
            allocator.free(slots)
    again = allocator.allocate(4)
    if again is not None:
        allocator.free(again)
    parts = (f"{slots.hex()}" if slots is not None else "none" for slots in (first, second, again))
    return f"{allocator.capacity}, {allocator.n_free} free; {' '.join(parts)}"


def _fill(pool: Any) -> None:
    """Bytes of their own for every slot."""
    for plane, lanes in enumerate(pool.lanes):
        for slot in range(lanes.shape[0]):
            lanes[slot] = 37 * slot + 11 * plane + 5


def digest(component: Any) -> str:
    """A checksum of every pool."""
    sums = []
    for name, pool in _pools(component):
        total = 0
        for lanes in pool.lanes:
            total = binascii.crc32(lanes.contiguous().numpy().tobytes(), total)
        sums.append(f"{name} {total:08x}")
    return ", ".join(sums)


def _questions(page_size: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Queries about matches, pins and budgets."""
    from kvgraft.types import DemandQuery, LockQuery, MatchView

    views = [
        MatchView(anchor, device, base, limit, anchor - device)
        for limit in (0, 1, 4, 13)
        for base in (0, 1, 3, 8)
        for anchor in (0, 1, 2, 7)
        for device in sorted({0, anchor // 2, anchor})
        if anchor <= base <= limit
    ]
    demands = [
        DemandQuery(page_size, computed, chunk, prompt, prompt + reserve, hits, points)
        for prompt in (1, 5, 12, 40)
        for computed in sorted({0, prompt // 2 // page_size * page_size})
        for chunk in sorted({1, prompt - computed})
        for reserve, hits, points in ((0, 0, 0), (3, 0, 1), (17, 0, 2), (3, 4, 0))
    ]
    return views, [LockQuery(boundary, page_size) for boundary in range(16)], demands


def _told(value: Any) -> str:
    """A question or an answer as text that is the same in every process."""
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "target_rows"):
        rows = ((each.layer, each.source_rows, each.target_rows) for each in value)
        return "; ".join(f"layer {at}: {a.tolist()} to {b.tolist()}" for at, a, b in rows)
    if hasattr(value, "device_slots"):
        device, host = (
            list(memoryview(slots).cast("i")) for slots in (value.device_slots, value.host_slots)
        )
        return f"{value.direction.value} of device slots {device}, host slots {host}"
    return str(value)
