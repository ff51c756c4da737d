"""The storage contract finds every known-bad backend, and passes the sound one they are made of."""

from __future__ import annotations

import pytest

from kvgraft.testing.storage import check_storage

from .backends import MUTANTS, Kept


def test_the_sound_one_passes_every_clause() -> None:
    results = check_storage(Kept, name="kept")
    assert [result.clause for result in results if result.status.value != "passed"] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_killed(mutant: type[Kept]) -> None:
    results = check_storage(mutant, name=mutant.__name__, deadline_s=0.1)
    broken = {result.rule: result.evidence for result in results if result.bad}
    assert MUTANTS[mutant] in broken, broken
