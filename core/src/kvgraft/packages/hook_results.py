"""Checks of hooks' answers, made where hooks are called.

The core reads fields of these answers on its hot path and hands them on; a wrong type would show
far from the component that gave it. An answer's meaning, such as a match that is too long, is
judged where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from reprlib import Repr
from typing import NamedTuple

from kvgraft.types import ComponentMatch, Demand

__all__ = ["HOOK_RESULTS", "HookResult", "are_spans", "shown"]

_SHORT = Repr()
_SHORT.maxother = _SHORT.maxstring = 120


def shown(answer: object) -> str:
    """An answer in a message; long ones are cut, and tensors are not printed in full."""
    return " ".join(_SHORT.repr(answer).split())


class HookResult(NamedTuple):
    """The form of a hook's answers other than None.

    Attributes:
        fits: whether an answer is of that form.
        wanted: the form, in words.
        rule: the rule that an answer of another form breaks.
    """

    fits: Callable[[object], bool]
    wanted: str
    rule: str


def _whole(number: object) -> bool:
    return isinstance(number, Integral)


def _all_whole(numbers: object) -> bool:
    if not isinstance(numbers, (tuple, list)):
        return False
    return all(type(number) is int or _whole(number) for number in numbers)


def _is_match(answer: object) -> bool:
    if not isinstance(answer, ComponentMatch):
        return False
    limit, pages = answer[:2]
    if type(limit) is not int and not _whole(limit):
        return False
    return pages == () or _all_whole(pages)


def are_spans(answer: object) -> bool:
    """Whether a segment to pin is a list of pairs of whole pages.

    Asked where the pin is taken, not where the hook is called: a refused lock is released (L1).
    """
    if not isinstance(answer, (list, tuple)):
        return False
    for span in answer:
        if not isinstance(span, (tuple, list)) or len(span) != 2:
            return False
        start, end = span
        if (type(start) is not int or type(end) is not int) and not all(map(_whole, span)):
            return False
    return True


def _are_copies(answer: object) -> bool:
    # By their fields: the transfers' own type stands above this module.
    return isinstance(answer, Sequence) and all(
        isinstance(copy, tuple) and hasattr(copy, "target_rows") and _whole(copy[0])
        for copy in answer
    )


def _is_demand(answer: object) -> bool:
    if not isinstance(answer, Demand):
        return False
    now: object = answer.now
    later: object = answer.later
    private: object = answer.private
    if not isinstance(now, int) or not isinstance(later, int):
        return False
    return private == () or _all_whole(private)


HOOK_RESULTS = {
    "finalize_match_result": HookResult(
        _is_match, "ComponentMatch or None, its boundaries in whole pages", "M5"
    ),
    "build_hicache_transfers": HookResult(_are_copies, "a list of PlaneCopy or None", "R2"),
    "budget_contribution": HookResult(_is_demand, "Demand or None, in whole slots", "A1"),
}
"""By hook, for those whose answers the core reads fields of."""
