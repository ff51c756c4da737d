"""No accepted family is wrong, and each refusal gives its reason in one line."""

from __future__ import annotations

import pytest

from .families import SURVEYED
from .survey import survey_family

SOME = ["afmoe", "bailing_hybrid", "gpt2", "marian", "moshi", "zaya"]


def check(family: str) -> None:
    verdict = survey_family(family)
    assert verdict.kind != "wrong", verdict.reason
    assert "\n" not in verdict.reason
    assert verdict.kind != "refused" or verdict.reason.startswith("model ")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", SOME)
def test_some_families_are_exact_or_refused(family: str) -> None:
    check(family)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [name for name in SURVEYED if name not in SOME])
def test_every_family_is_exact_or_refused(family: str) -> None:
    check(family)
