"""Times hooks and notes the slow ones."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter, thread_time
from types import SimpleNamespace
from typing import Any, NamedTuple

__all__ = ["BLOCKS_S", "HANGS_S", "Note", "Seen", "Timed"]

BLOCKS_S = 0.1
"""Seconds after which a hook has blocked; a hook computes for some microseconds."""

TIMES = 5
"""Slow calls in a row after which a hook counts as blocking; a busy machine has fewer."""

HANGS_S = 20.0
"""Longest wait for a hook, in seconds."""

Note = Callable[[str, str, str], None]
"""Takes the kind of an observation, the call and its result.

Kinds are `"seen"`, `"raised"` and `"form"` (the call is then a hook), `"blocked"`, `"calling"` (a
hook whose calls begin), `"cache"` (the cache of the calls from now on) and `"end"`.
"""


class Seen(NamedTuple):
    """One thing that was seen; see `Note`."""

    kind: str
    done: str
    came: str


class Stopwatch:
    """Times a call in this thread, from when it is made."""

    def __init__(self) -> None:
        self._waits = _n_waits()
        self._busy = thread_time()
        self._start = perf_counter()

    def seconds(self) -> float:
        """Seconds so far, without those in which another thread had the processor.

        A call that never waited was busy whenever it could be.
        """
        passed, waits = perf_counter() - self._start, _n_waits()
        return passed if waits is None or waits != self._waits else thread_time() - self._busy


def _n_waits() -> int | None:
    """How often this thread gave the processor away to wait; None where the system does not say."""
    whose = getattr(resource, "RUSAGE_THREAD", None)
    return None if whose is None else resource.getrusage(whose).ru_nvcsw


class Timed:
    """The hooks of a component, with their times."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._slow: dict[str, list[float]] = {}
        self._last = ""
        self.calling: tuple[str, float] | None = None
        self.blocked = False

    def watch(self, plugin: Any) -> Any:
        """The same package, its hooks timed."""
        hooks = dict(vars(plugin.implementation))
        for name, function in hooks.items():
            if name != "declare_component":
                hooks[name] = self._timed(name, function)
        return replace(plugin, implementation=SimpleNamespace(**hooks))

    def _timed(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if hook != self._last:
                self._last = hook
                self._note("calling", hook, "")
            self.calling = (hook, perf_counter())
            watch = Stopwatch()
            try:
                return function(*given, **named)
            finally:
                self.calling = None
                self._took(hook, watch.seconds())

        return call

    def _took(self, hook: str, seconds: float) -> None:
        slow = self._slow.setdefault(hook, [])
        if seconds < BLOCKS_S or hook == "create_component":
            slow.clear()
            return
        slow.append(seconds)
        if len(slow) == TIMES and not self.blocked:
            self.blocked = True
            said = f"the fastest of {TIMES} calls in a row took {min(slow):.2f} s"
            self._note("blocked", hook, said)

    def is_slow(self, hook: str) -> bool:
        """Whether the last call was slow and more calls must decide."""
        return bool(self._slow.get(hook)) and not self.blocked
