"""A component whose hooks can be made to fail, or to break the contract, at any call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvgraft import (
    Component,
    ComponentMatch,
    Demand,
    DemandQuery,
    LockQuery,
    MatchView,
    Reach,
    Span,
    TransferQuery,
    hookimpl,
)
from kvgraft.packages.registry import Plugin, load_plugin
from kvgraft.transfers import PlaneCopy

from ..serving.components import PagedPackage

__all__ = ["Package"]


class Package(PagedPackage):
    """A paged component implementing every hook.

    Args:
        name: the component's name.
        reach: its reach.

    Attributes:
        calls: how often each hook ran.
        failing: per hook, how many of its next calls pass before it raises; a hook that is not
            in here works.
        answers: per hook, a function for its answer instead of the default.
        segments: pinned and not released yet, from the hooks' point of view.
    """

    def __init__(self, name: str, reach: Reach) -> None:
        super().__init__(name, reach)
        self.calls: Counter[str] = Counter()
        self.failing: dict[str, int] = {}
        self.answers: dict[str, Callable[[Any], Any]] = {}
        self.segments: list[Sequence[Span]] = []

    @property
    def plugin(self) -> Plugin:
        """The package, checked as an installed one is."""
        return load_plugin(self.name, self)

    def _enter(self, hook: str, query: Any) -> Any:
        self.calls[hook] += 1
        left = self.failing.get(hook)
        if left is not None:
            if not left:
                raise ZeroDivisionError("made to fail")
            self.failing[hook] = left - 1
        answer = self.answers.get(hook)
        return answer(query) if answer is not None else None

    @hookimpl
    def finalize_match_result(self, component: Component, view: MatchView) -> ComponentMatch | None:
        answer: ComponentMatch | None = self._enter("finalize_match_result", view)
        return answer

    @hookimpl
    def acquire_component_lock(self, component: Component, query: LockQuery) -> Sequence[Span]:
        answer: Sequence[Span] | None = self._enter("acquire_component_lock", query)
        if answer is None:
            answer = [Span(0, query.boundary)] if query.boundary else []
        spans = list(answer)
        self.segments.append(spans)
        return spans

    @hookimpl
    def release_component_lock(self, component: Component, segment: Sequence[Span]) -> None:
        self.segments.remove(list(segment))
        self._enter("release_component_lock", segment)

    @hookimpl
    def build_hicache_transfers(
        self, component: Component, query: TransferQuery
    ) -> Sequence[PlaneCopy] | None:
        answer: Sequence[PlaneCopy] | None = self._enter("build_hicache_transfers", query)
        return answer

    @hookimpl
    def commit_hicache_transfers(self, component: Component, query: TransferQuery) -> None:
        self._enter("commit_hicache_transfers", query)

    @hookimpl
    def abort_hicache_transfers(self, component: Component, query: TransferQuery) -> None:
        self._enter("abort_hicache_transfers", query)

    @hookimpl
    def budget_contribution(self, component: Component, query: DemandQuery) -> Demand | None:
        answer: Demand | None = self._enter("budget_contribution", query)
        return answer
