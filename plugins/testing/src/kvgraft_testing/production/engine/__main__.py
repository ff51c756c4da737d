"""The engine as a program, which prints a note a line."""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys

from kvgraft_testing.production.engine import watch, watch_together
from kvgraft_testing.production.engine.forks import end_forks
from kvgraft_testing.production.engine.timing import Note

__all__ = ["main"]


def _lines(out: int) -> Note:
    def note(kind: str, done: str, came: str) -> None:
        os.write(out, (json.dumps([kind, done, came]) + "\n").encode())

    return note


def main() -> None:
    """Watch an installed component, in one cache or in several; prints a note a line."""
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from kvgraft.packages.registry import select

    note = _lines(out)
    job = json.loads(sys.stdin.readline())
    options = pickle.loads(base64.b64decode(job["options"]))
    end_forks(lambda: note("forked", "", ""))
    note("calling", "declare_component", "")
    run = watch_together if job["together"] else watch
    run(select([job["name"]])[0], options, note)
    # Threads that a component left behind are not waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
