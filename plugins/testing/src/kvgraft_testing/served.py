"""The process of a `SuiteProcess`: `python -m kvgraft_testing.served DESCRIPTOR`."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import sys
from typing import Any

from kvgraft.errors import ConfigError, PluginError
from kvgraft.packages.registry import select
from kvgraft_testing.checking import Checker, unusable
from kvgraft_testing.clause import CLAUSES
from kvgraft_testing.production.engine.forks import end_forks
from kvgraft_testing.production.sealing import seal

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Answer questions, a line each, until there are no more."""

    def answer(fields: dict[str, Any], write: Any = os.write, dumps: Any = json.dumps) -> None:
        write(descriptor, (dumps(fields) + "\n").encode())

    # Everything below that a component could replace is bound before its code runs.
    questions, loads, idents, replaced_code = sys.stdin, json.loads, tuple(CLAUSES), seal()
    forks: list[bool] = []
    end_forks(lambda: forks.append(True))

    def changes() -> str:
        return replaced_code() or ("its code forked the suite's process" if forks else "")

    job = loads(questions.readline())
    given = pickle.loads(base64.b64decode(job["given"]))
    answer({"idents": idents})
    name = job["name"]
    try:
        checker = Checker(select([name])[0], **given, changes=changes)
        ready: dict[str, Any] = {"usable": True}
    except ConfigError as error:
        ready = {"refused": str(error)}
    except PluginError as error:
        ready = {"unusable": unusable(name, error).as_json()}
    replaced = changes()
    answer({"replaced": replaced} if replaced else ready)
    for line in questions:
        said = _said(checker, loads(line))
        replaced = changes()
        answer({"replaced": replaced} if replaced else said)


def _said(checker: Checker, question: dict[str, Any]) -> dict[str, Any]:
    """The answer to a question of `SuiteProcess`."""
    if "decide" in question:
        return {"result": checker.decide(question["decide"]).as_json()}
    if "verdict" in question:
        return {"results": [result.as_json() for result in checker.verdict()]}
    if "finding" in question:
        found = checker.finding()
        return {"finding": None if found is None else found.as_json()}
    return {"ident": checker.told_by()}


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # nobody waits for the answer any more
        main(int(sys.argv[1]))
