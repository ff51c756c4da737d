"""Hook wrappers: they check a component's answers, and that each hook's inverse runs once.

One wrapper object per component is registered beside the component's hooks; pluggy runs it around
them, like any other wrapper.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from numbers import Integral
from typing import Any

from kvgraft.errors import ContractViolation
from kvgraft.hookspecs import hookimpl
from kvgraft.packages.registry import Plugin
from kvgraft.pools import Component
from kvgraft.reach import PageReach
from kvgraft.types import (
    ComponentMatch,
    Demand,
    DemandQuery,
    LockQuery,
    MatchView,
    Span,
    TransferQuery,
)
from kvgraft_guard.copying import check_copies

__all__ = ["HookGuard"]

Spans = tuple[tuple[int, ...], ...]


class HookGuard:
    """Wrappers around one component's hooks in one cache.

    Args:
        plugin: the component.
        ask_twice: whether budgets may be called again to compare; the core itself calls them any
            number of times, so a budget cannot have effects. No other hook is called again.

    Attributes:
        name: the component's.
        asked: the spans of its last answer about pins.
        locks: segments acquired and not released, by identity: segment, its spans then, how often.
        moves: transfers built and not ended, by identity of their query.
        fresh: identities of those built since `moves_begin`.
        n_failed: transfers that could not be submitted so far, because of any hook.
        lowered: whether it shortened a match since `matches_begin`.
        limit: the shortest match that it accepted since then, in pages; None if it named none.
        captures: boundaries, in pages, at which it wanted states captured since then.
    """

    def __init__(self, plugin: Plugin, *, ask_twice: bool) -> None:
        self.name = plugin.name
        self.locks: dict[int, tuple[Sequence[Span], Spans | None, int]] = {}
        self.asked: Spans = ()
        self.moves: dict[int, TransferQuery] = {}
        self.fresh: list[int] = []
        self.n_failed = 0
        self.lowered = False
        self.limit: int | None = None
        self.captures: set[int] = set()
        self._builds = hasattr(plugin.implementation, "build_hicache_transfers")
        self._budget: Any = (
            getattr(plugin.implementation, "budget_contribution", None) if ask_twice else None
        )

    # -- match

    def matches_begin(self) -> None:
        """A match begins: answers from here on are about it."""
        self.lowered = False
        self.limit = None
        self.captures = set()

    @hookimpl(wrapper=True)
    def finalize_match_result(
        self, component: Component, view: MatchView
    ) -> Generator[None, ComponentMatch | None, ComponentMatch | None]:
        """A match gets no longer (M5) and takes no slot (M6)."""
        free = _free(component)
        answer = yield
        _expect_free("M6", self.name, "finalize_match_result", component, free)
        if isinstance(answer, ComponentMatch):
            limit, pages = answer.limit_pages, answer.checkpoint_pages
            if not _is_page(limit):
                raise ContractViolation(
                    "M5",
                    self.name,
                    f"finalize_match_result limits a match of {view.anchor} pages to {limit!r}; "
                    f"answer 0 to {view.anchor}",
                )
            if limit > view.anchor:
                raise ContractViolation(
                    "M5",
                    self.name,
                    f"finalize_match_result lengthened the match from {view.anchor} to {limit} "
                    "pages",
                )
            if pages and not all(_is_page(page) and limit < page <= view.limit for page in pages):
                raise ContractViolation(
                    "M5",
                    self.name,
                    f"finalize_match_result captures states at {pages!r}; a request that resumes "
                    f"at {limit} passes whole pages from {limit + 1} to {view.limit}",
                )
            self.lowered = self.lowered or limit < view.anchor
            self.limit = limit if self.limit is None else min(limit, self.limit)
            self.captures.update(pages)
        return answer

    # -- pins

    @hookimpl(wrapper=True)
    def acquire_component_lock(
        self, component: Component, query: LockQuery
    ) -> Generator[None, Sequence[Span] | None, Sequence[Span] | None]:
        """A bounded reach pins no more than it and a page (L7); L3 and T6 the core checks."""
        answer = yield
        if answer is None:
            return None
        spans = _spans(answer)
        reach = PageReach(component.reach, query.page_size)
        if spans is not None and not reach.is_state and not reach.is_prefix_closed:
            held = _covered(spans, query.boundary)
            most = reach.width(query.boundary)
            if held > most + 1:
                raise ContractViolation(
                    "L7",
                    self.name,
                    f"acquire_component_lock pins {held} pages at boundary {query.boundary}; its "
                    f"reach is {most} pages, and one more may be pinned",
                )
        self.asked = tuple([each for each in spans or () if len(each) == 2])
        _, _, times = self.locks.get(id(answer), (answer, spans, 0))
        self.locks[id(answer)] = (answer, spans, times + 1)
        return answer

    @hookimpl(wrapper=True)
    def release_component_lock(
        self, component: Component, segment: Sequence[Span]
    ) -> Generator[None, None, None]:
        """A released segment was acquired, is unchanged (L1), and is released only once (L2)."""
        acquired, spans, times = self.locks.get(id(segment), (None, None, 0))
        if acquired is not segment:
            raise ContractViolation(
                "L2",
                self.name,
                f"release_component_lock is called with {segment!r}, which is not acquired or was "
                f"released before; {len(self.locks)} segments are acquired",
            )
        if times > 1:
            self.locks[id(segment)] = (segment, spans, times - 1)
        else:
            del self.locks[id(segment)]
        if spans != _spans(segment):
            raise ContractViolation(
                "L1",
                self.name,
                f"release_component_lock is called with {segment!r}; acquired was {spans!r}",
            )
        yield

    # -- transfers

    @hookimpl(wrapper=True)
    def build_hicache_transfers(
        self, component: Component, query: TransferQuery
    ) -> Generator[None, Any, Any]:
        """Copies move each of the query's slots, whole, to where it belongs (B3, B2, R5, R7)."""
        answer = yield
        if answer is not None:
            answer = list(answer)
            check_copies(self.name, component, query, answer)
        self.moves[id(query)] = query
        self.fresh.append(id(query))
        return answer

    @hookimpl(wrapper=True)
    def commit_hicache_transfers(
        self, component: Component, query: TransferQuery
    ) -> Generator[None, None, None]:
        """A transfer ends once (R2)."""
        self._end("commit_hicache_transfers", query)
        yield

    @hookimpl(wrapper=True)
    def abort_hicache_transfers(
        self, component: Component, query: TransferQuery
    ) -> Generator[None, None, None]:
        """A transfer ends once (R2)."""
        self._end("abort_hicache_transfers", query)
        yield

    def _end(self, hook: str, query: TransferQuery) -> None:
        if self._builds and self.moves.pop(id(query), None) is None:
            raise ContractViolation(
                "R2",
                self.name,
                f"{hook} is called for a {query.direction.value} that was not built or has ended; "
                f"{len(self.moves)} transfers have not ended",
            )

    def moves_begin(self) -> None:
        """A transfer is being submitted: copies built from here on belong to it."""
        self.fresh.clear()

    def moves_failed(self) -> None:
        """The transfer was not submitted; no hook follows for it."""
        self.n_failed += 1
        for ident in self.fresh:
            self.moves.pop(ident, None)

    # -- admission

    @hookimpl(wrapper=True)
    def budget_contribution(
        self, component: Component, query: DemandQuery
    ) -> Generator[None, Demand | None, Demand | None]:
        """A budget takes nothing (A9) and holds the host hits once (A3)."""
        free = _free(component)
        answer = yield
        if self._budget is not None and query.host_slots and isinstance(answer, Demand):
            alone: object = self._budget(component, query._replace(host_slots=0))
            if isinstance(alone, Demand):
                more = answer.now + answer.later - alone.now - alone.later
                if more != query.host_slots:
                    raise ContractViolation(
                        "A3",
                        self.name,
                        f"budget_contribution asks for {more} slots more on account of "
                        f"{query.host_slots} host hits: {answer} instead of {alone}",
                    )
        _expect_free("A9", self.name, "budget_contribution", component, free)
        return answer


def _is_page(value: object) -> bool:
    """Whether a hook's answer is a whole number of pages, whichever type says it."""
    if type(value) is int:  # nearly always; the other question takes five times as long
        return value >= 0
    return isinstance(value, Integral) and int(value) >= 0


def _free(component: Component) -> list[int]:
    """Free slots of a component's own pools."""
    pools = [component.device.allocator.n_free]
    if component.host is not None:
        pools.append(component.host.allocator.n_free)
    if component.private:
        pools += [pool.allocator.n_free for pool in component.private]
    return pools


def _expect_free(rule: str, name: str, hook: str, component: Component, free: list[int]) -> None:
    now = _free(component)
    if now != free:
        raise ContractViolation(
            rule, name, f"{hook} changed the free slots of its pools from {free} to {now}"
        )


def _spans(segment: Sequence[Span]) -> Spans | None:
    """A segment's spans as plain values; None if it is none, which the core refuses (L3)."""
    try:
        return tuple(tuple(span) for span in segment)
    except TypeError:
        return None


def _covered(spans: Spans, boundary: int) -> int:
    """Pages before the boundary that spans cover together; a span behind it breaks L3."""
    covered = reached = 0
    for start, end in sorted(span[:2] for span in spans if len(span) == 2):
        start, end = max(start, reached), min(end, boundary)  # noqa: PLW2901
        if end > start:
            covered += end - start
            reached = end
    return covered
