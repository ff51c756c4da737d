"""Facts of several ranks made equal (D1 to D4), and bad agreements that the same checks find."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from kvgraft_ranks import agreement
from kvgraft_ranks.agreement import Agreement
from kvgraft_ranks.copies import AgreedTicket
from kvgraft_ranks.log import CallLog
from kvgraft_ranks.stores import AgreedCall

from .agreeing import CHECKS


class Defect(NamedTuple):
    """A function whose text differs in one place."""

    says: str
    owner: Any
    name: str
    old: str
    new: str


DEFECTS = [
    Defect("facts are reduced by MAX", agreement, "_common", "found &= each", "found |= each"),
    Defect("the clock is this rank's", Agreement, "clock", "self.now if", "self.local_clock() if"),
    Defect(
        "digests are not compared",
        Agreement,
        "finish",
        "each[4:6] != heads[0][4:6]",
        "each[4:4] != heads[0][4:4]",
    ),
    Defect("calls are not counted", CallLog, "note", "self.number += 1", "pass"),
    Defect("results are not in the digest", CallLog, "note", "text.encode()", "b''"),
    Defect(
        "a failure elsewhere is none", AgreedTicket, "agree", "if failed:", "if self.real.error:"
    ),
    Defect(
        "another rank's failure counts alone",
        Agreement,
        "_take_in",
        "if mask >> number & 1]",
        "if mask >> number & 1 and r != self.link.rank]",
    ),
    Defect("no answer is a miss", AgreedCall, "agree", "if marks & UNSURE:", "if False:"),
    Defect("a full store is a miss", AgreedCall, "agree", "elif marks & FULL:", "elif False:"),
    Defect(
        "stores work if this rank's does",
        Agreement,
        "finish",
        "_common([each[2] for each in heads])",
        "heads[self.link.rank][2]",
    ),
    Defect(
        "answers go in this rank's order",
        Agreement,
        "_take_in",
        "if settled >> number & 1 and not call.told:",
        "if call.real.settled and not call.told:",
    ),
]


@pytest.mark.rule("D1", "D2", "D3", "D4")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ranks_agree(check: Callable[[], None]) -> None:
    check()


@pytest.mark.one_in(9)
@pytest.mark.rule("D1", "D2", "D3", "D4")
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.says)
def test_a_bad_agreement_is_found(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    function = inspect.getattr_static(defect.owner, defect.name)
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(defect.old) == 1, defect.says
    scope: dict[str, Any] = {}
    code = compile(text.replace(defect.old, defect.new), defect.name, "exec")
    exec(code, function.__globals__, scope)
    monkeypatch.setattr(defect.owner, defect.name, scope[defect.name])
    assert [check.__name__ for check in CHECKS if fails(check)]


def fails(check: Callable[[], None]) -> bool:
    """Whether a check finds a fault."""
    try:
        check()
    except Exception:  # noqa: BLE001 - a defect may raise anything
        return True
    return False
