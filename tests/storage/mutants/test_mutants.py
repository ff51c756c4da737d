"""The storage contract finds every known-bad backend, and passes the sound one they are made of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvgraft_storage import Capabilities, Status, Value
from kvgraft_testing.storage import STORAGE_CLAUSES, check_storage
from kvgraft_testing.storage.checking import check_clause
from kvgraft_testing.storage.subject import StorageSubject

from .backends import MUTANTS, Hangs, Kept


def test_the_sound_one_passes_every_clause() -> None:
    results = check_storage(Kept, name="kept")
    assert [result.clause for result in results if result.status.value != "passed"] == []


@pytest.mark.one_in(12)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_killed(mutant: type[Kept]) -> None:
    results = check_storage(mutant, name=mutant.__name__, deadline_s=0.1)
    broken = {result.rule: result.evidence for result in results if result.bad}
    assert MUTANTS[mutant] in broken, broken


class HangsInMyMemory(Hangs):
    """Memory lent to it does not come back in time either."""

    @property
    def capabilities(self) -> Capabilities:
        return super().capabilities._replace(synchronous=True)

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        return super().get_into(keys, values, deadline_s + 3)


@pytest.mark.parametrize(
    ("backend", "said"), [(Hangs, "timeout"), (HangsInMyMemory, "get did not end")]
)
def test_a_backend_that_hangs_fails_where_several_threads_use_it(
    backend: type[Kept], said: str
) -> None:
    """Found in other threads, it is said in this one."""
    subject = StorageSubject("hangs", backend, deadline_s=0.05)
    result = check_clause(subject, STORAGE_CLAUSES["S9-several-threads"])
    assert result.bad
    assert said in result.evidence
