"""Calls and their outcomes, one plain line each."""

from __future__ import annotations

from collections.abc import Iterable

from kvgraft.requests.request import Request
from kvgraft_testing.machine.hooks import HookCall

__all__ = ["Trace", "demanded", "shown"]


def shown(tokens: Iterable[int]) -> str:
    """Tokens as one word."""
    numbers = list(tokens)
    return ("" if all(0 <= number < 10 for number in numbers) else ",").join(map(str, numbers))


class Trace:
    """The calls of one example."""

    def __init__(self) -> None:
        self._lines: list[str | HookCall] = []
        self._last = -1

    def call(self, text: str) -> None:
        """Something is called."""
        self._last = len(self._lines)
        self._lines.append(text)

    def outcome(self, text: str) -> None:
        """Note the outcome of the last call."""
        self._lines[self._last] = f"{self._lines[self._last]} -> {text}"

    def hook(self, call: HookCall) -> None:
        """The core called a hook; a call that left the answer to the reach gets no line."""
        if call.answer is not None or call.error is not None:
            self._lines.append(call)

    def lines(self) -> list[str]:
        """The calls so far; hooks are indented below the call they belong to."""
        return [line if isinstance(line, str) else f"  {line}" for line in self._lines]


def demanded(request: Request) -> str:
    """The demand that a request was admitted with."""
    return ", ".join(
        f"{part.demand.now} now + {part.demand.later} later of {part.component.name}"
        for part in request.components
    )
