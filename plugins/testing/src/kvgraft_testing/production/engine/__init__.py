"""A small engine that notes a component's answers and the effects of a cache with it.

It imports the core and nothing of the suite, so that it also runs without the suite: as a program
in a process of its own, from a copy of this folder. Its calls and requests are the same every time;
so are its notes, unless the component uses more than its arguments.

timing     how long hooks take, and the notes
asking     all calls of a component's hooks, on its own
serving    requests served in a cache with the component alone
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from kvgraft_testing.production.engine.asking import Asking
from kvgraft_testing.production.engine.serving import PLAYS, Serving
from kvgraft_testing.production.engine.timing import BLOCKS_S, HANGS_S, Note, Seen, Timed

__all__ = ["BLOCKS_S", "HANGS_S", "Seen", "watch", "watch_together"]


def watch(plugin: Any, options: Mapping[str, Any], note: Note) -> None:
    """Call all hooks of a component and serve requests with it, on a thread of its own.

    Returns when that ended, or a hook hangs; its thread is then abandoned.
    """
    _watch(_one_by_one, plugin, options, note)


def watch_together(plugin: Any, options: Mapping[str, Any], note: Note) -> None:
    """Make the same calls while it is built for several caches at once, the last one first."""
    _watch(_together, plugin, options, note)


def _watch(run: Callable[..., None], plugin: Any, options: Mapping[str, Any], note: Note) -> None:
    timed = Timed(note)
    thread = threading.Thread(
        target=run, args=(timed.watch(plugin), dict(options), note, timed), daemon=True
    )
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
        calling = timed.calling
        if calling is not None and perf_counter() - calling[1] > HANGS_S and thread.is_alive():
            note("blocked", calling[0], f"it did not return within {HANGS_S:.0f} s")
            return


def _together(plugin: Any, options: dict[str, Any], note: Note, timed: Timed) -> None:
    try:
        Asking(plugin, options, note, timed).ask_together()
    except Exception as error:  # noqa: BLE001 - the clauses judge it
        note("seen", "asking together, to its end", f"{type(error).__name__}: {error}")
    note("end", "", "")


def _one_by_one(plugin: Any, options: dict[str, Any], note: Note, timed: Timed) -> None:
    """Ask, then serve; the note `"end"` says that it got there."""

    def go_on(what: str, part: Callable[..., None], *given: Any) -> None:
        """Run a part, unless a hook blocks; its error is noted, the next one runs anyway."""
        if timed.blocked:
            return
        try:
            part(*given)
        except Exception as error:  # noqa: BLE001 - the clauses judge it
            note("seen", f"{what}, to its end", f"{type(error).__name__}: {error}")

    asking = Asking(plugin, options, note, timed)
    caches = asking.caches()
    for each in caches:
        go_on(f"asking, {each.where}", asking.ask, each)
    note("cache", "", "")
    for page_size in dict.fromkeys(each.page_size for each in caches):
        for number in range(len(PLAYS)):
            serving = Serving(plugin, options, note, timed, page_size, number)
            go_on(serving.where, serving.run)
    note("end", "", "")
