"""Hook calls between the core and the components, watched.

A hook's answer is the component's own decision, so the model takes it from here: it checks the
hook's arguments, and that the core treats the answer as the contract says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvgraft.packages.dispatch import HOOK_RESULTS, are_spans, shown
from kvgraft.packages.registry import HOOKS, Plugin
from kvgraft.pools import Component, slot_index
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.types import ComponentMatch, Direction, LockQuery, MatchView, Span, TransferQuery
from kvgraft_testing.machine.memory import spoil

__all__ = ["HookCall", "Hooks", "locks", "matches"]

UNWATCHED = frozenset({"declare_component", "create_component"})


class HookCall(NamedTuple):
    """One call of a hook.

    Attributes:
        component: whose hook.
        hook: its name.
        query: its argument.
        answer: the value it returned; None also if it raised.
        error: the error it raised.
    """

    component: str
    hook: str
    query: Any
    answer: Any
    error: BaseException | None

    def __str__(self) -> str:
        came = self.answer if self.error is None else f"{type(self.error).__name__}: {self.error}"
        return f"{self.component}.{self.hook}({_plain(self.query)}) -> {_plain(came)}"


def _plain(value: object) -> str:
    if isinstance(value, TransferQuery):
        device, host = (
            memoryview(slots).cast("i").tolist() for slots in (value.device_slots, value.host_slots)
        )
        return f"{value.direction.value} device slots {device}, host slots {host}"
    if isinstance(value, (list, tuple)) and all(isinstance(each, Span) for each in value):
        return " ".join(f"[{start}, {end})" for start, end in value) or "nothing"
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return f"{len(value)} of {type(value[0]).__name__}" if value else "nothing"
    return str(value)


class Hooks:
    """The hook calls of one cache.

    Attributes:
        held: per component, segments that were acquired and not released yet.
        copying: per component, slots of transfers that were built and have not ended.
    """

    def __init__(self) -> None:
        self._calls: list[HookCall] = []
        self.held: dict[str, Counter[tuple[Span, ...]]] = {}
        self.copying: dict[str, int] = {}

    def watch(self, plugin: Plugin) -> Plugin:
        """The same package, with its hook calls noted here."""
        hooks = {
            hook: getattr(plugin.implementation, hook)
            for hook in HOOKS
            if hasattr(plugin.implementation, hook)
        }
        for hook, function in hooks.items():
            if hook not in UNWATCHED:
                hooks[hook] = self._watched(plugin.name, hook, function)
        return replace(plugin, implementation=SimpleNamespace(**hooks))

    def _watched(self, name: str, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(component: Component, query: Any) -> Any:
            try:
                answer = function(component, query)
            except (Exception, SystemExit) as error:
                self._calls.append(HookCall(name, hook, query, None, error))
                raise
            expected = HOOK_RESULTS.get(hook)
            if expected is not None and answer is not None and not expected.fits(answer):
                refused = TypeError(f"it returned {shown(answer)}; return {expected.wanted}")
                self._calls.append(HookCall(name, hook, query, None, refused))
                return answer
            self._calls.append(HookCall(name, hook, query, answer, None))
            if hook == "build_hicache_transfers":
                _spoil_destination(component, query)
            self._keep_count(name, hook, query, answer)
            return answer

        return call

    def _keep_count(self, name: str, hook: str, query: Any, answer: Any) -> None:
        if hook == "acquire_component_lock" and are_spans(answer):
            self.held.setdefault(name, Counter())[tuple(answer)] += 1
        elif hook == "release_component_lock" and are_spans(query):
            self.held.setdefault(name, Counter())[tuple(query)] -= 1
        elif hook.endswith("_hicache_transfers"):
            n_slots = len(query.device_slots) // SLOT_BYTES
            self.copying[name] = self.copying.get(name, 0) + (
                n_slots if hook.startswith("build") else -n_slots
            )

    def take(self) -> list[HookCall]:
        """The calls since the last `take`."""
        calls, self._calls = self._calls, []
        return calls


def _spoil_destination(component: Component, query: TransferQuery) -> None:
    """Overwrite data moved while the copies were built: only the engine may move it (B3, B4)."""
    if query.direction is Direction.LOAD_BACK:
        lanes, slots = component.device.lanes, query.device_slots
    elif component.host is not None:
        lanes, slots = component.host.lanes, query.host_slots
    else:
        return
    for rows in lanes:
        spoil(rows, slot_index(slots))


def matches(calls: list[HookCall]) -> list[tuple[str, MatchView, ComponentMatch | None]]:
    """Components' answers to matches, with the matches."""
    return [
        (call.component, call.query, call.answer)
        for call in calls
        if call.hook == "finalize_match_result"
    ]


def locks(calls: list[HookCall], boundary: int) -> dict[str, set[int]]:
    """Per component, the pages it asked to pin at a boundary, if it named any."""
    pages: dict[str, set[int]] = {}
    for call in calls:
        if call.hook == "acquire_component_lock" and call.answer is not None:
            query: LockQuery = call.query
            if query.boundary == boundary:
                pages[call.component] = {
                    page for start, end in call.answer for page in range(start, end)
                }
    return pages
