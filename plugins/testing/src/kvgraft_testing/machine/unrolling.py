"""Scenes as the plain calls they made, which the shrinker can leave out one by one.

A scene is one rule of the machine and many calls of the engine. Where the same calls break the
same rule of the contract without the scene, most of them usually play no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from kvgraft.errors import ContractViolation
from kvgraft_testing.machine.examples import Began, Example, Rule
from kvgraft_testing.machine.live import Live
from kvgraft_testing.machine.scenes import Scenes

__all__ = ["SCENES", "unrolled"]

SCENES = frozenset(name for name in vars(Scenes) if not name.startswith("_"))
"""Rules that are scenes."""


def _of_a_request(**drawn: Any) -> Callable[..., dict[str, Any]]:
    return lambda: {"index": 0, **drawn}


PLAIN: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "admit": ("admit", _of_a_request()),
    "load_back": ("load_back", _of_a_request()),
    "restart": ("restart", _of_a_request()),
    "prefill": ("prefill", lambda limit: {"index": 0, "limit": limit, "whole": False}),
    "prefill_all": ("prefill", _of_a_request(limit=None, whole=True)),
    "decode": ("decode", lambda token: {"index": 0, "tokens": [token]}),
    "checkpoint": ("checkpoint", _of_a_request()),
    "finish": ("finish", _of_a_request()),
    "abort": ("abort", _of_a_request()),
}
"""Calls about a request: the rule that makes the same call, and the values drawn for it."""

ROOMS: dict[str, Callable[..., dict[str, Any]]] = {
    "step": lambda index, *, fails: {"index": index, "fails": fails, "poll": False},
    "step_all": dict,
    "poll": dict,
    "squeeze": dict,
}
"""Calls about room and transfers, by the rule of the same name."""


def unrolled(machine: Example, rules: Sequence[Rule], at: int) -> list[Rule]:
    """The rules of a failing example with rule `at`, a scene, replaced by the calls it made.

    Calls that no rule of the machine makes alone are left out.

    Args:
        machine: a fresh example; it runs the rules, and may end early.
        rules: an example that fails.
        at: number of the scene in it.
    """
    recorder = _Recorder(machine, 1 + max(rule.label for rule in rules))
    for rule in rules[: at + 1]:
        machine.planned = rule
        if rule is rules[at]:
            recorder.record()
        try:
            getattr(machine, rule.name)(**rule.drawn)
        except ContractViolation:
            break  # the example fails here
    left = [live.name for live in machine.harness.live if live.name in recorder.new]
    renamed = {
        Began(rules[at].label, place): recorder.began[name] for place, name in enumerate(left)
    }
    after = [rule._replace(picks=tuple(map(_one(renamed), rule.picks))) for rule in rules[at + 1 :]]
    return [*rules[:at], *recorder.rules, *after]


def _one(renamed: dict[Began, Began]) -> Callable[[object], object]:
    return lambda pick: renamed.get(pick, pick) if isinstance(pick, Began) else pick


class _Recorder:
    """Notes the outermost calls of an example's harness as rules.

    Attributes:
        rules: the calls so far.
        began: which rule begins a request, by the request's name.
        new: requests that were begun meanwhile, by name.
    """

    def __init__(self, machine: Example, label: int) -> None:
        self.machine = machine
        self.label = label
        self.rules: list[Rule] = []
        self.began: dict[str, Began] = {}
        self.new: set[str] = set()
        self.depth = 0

    def record(self) -> None:
        """Note calls from now on."""
        self.began.update(self.machine.began)
        harness = self.machine.harness
        self._watch(harness, "begin", self._begin)
        for name in PLAIN:
            self._watch(harness, name, self._about_a_request)
        for name in ROOMS:
            self._watch(harness.rooms, name, self._about_room)

    def _watch(self, subject: object, name: str, note: Callable[..., None]) -> None:
        call = getattr(subject, name)

        @wraps(call)
        def noted(*given: Any, **named: Any) -> Any:
            if not self.depth:
                note(name, *given, **named)
            self.depth += 1
            try:
                result = call(*given, **named)
            finally:
                self.depth -= 1
            if isinstance(result, Live):
                self.began[result.name] = Began(self.label - 1, 0)
                self.new.add(result.name)
            return result

        setattr(subject, name, noted)

    def _add(self, name: str, drawn: dict[str, Any], picks: tuple[object, ...] = ()) -> None:
        self.rules.append(Rule(name, drawn, self.label, picks))
        self.label += 1

    def _begin(
        self,
        name: str,
        namespace: object,
        tokens: tuple[int, ...],
        reserve: int,
        chunk: int | None,
        mark: int,
        max_deferrals: int,
    ) -> None:
        assert not mark, "scenes begin requests without a mark"
        drawn = {"stem": (), "length": 0, "tail": tokens, "namespace": namespace, "along": 0}
        self._add(
            name, {**drawn, "reserve": reserve, "chunk": chunk, "max_deferrals": max_deferrals}
        )

    def _about_a_request(self, name: str, live: Live, *given: Any) -> None:
        rule, drawn = PLAIN[name]
        self._add(rule, drawn(*given), (self.began[live.name],))

    def _about_room(self, name: str, *given: Any, **named: Any) -> None:
        self._add(name, ROOMS[name](*given, **named))
