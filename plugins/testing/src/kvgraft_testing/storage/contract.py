"""The storage clauses as a pytest class that holds data only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvgraft_storage import StorageBackend
from kvgraft_testing.result import Status
from kvgraft_testing.storage.checking import check_clause
from kvgraft_testing.storage.clause import STORAGE_CLAUSES
from kvgraft_testing.storage.subject import StorageSubject, opener_of

__all__ = ["StorageContract"]

DATA = frozenset({"url", "opener", "deadline_s"})
"""Attributes that a subclass may set."""


class StorageContract:
    """Every clause as a test of one backend.

        class TestMine(StorageContract):
            url = "mine:{directory}?capacity=4MiB"

    A subclass sets data and nothing else. The store's content is removed.

    Attributes:
        url: names the store; `{directory}` stands for an empty directory.
        opener: opens a store for an empty directory, instead of `url`; wrap it in `staticmethod`.
        deadline_s: longest time for a call.
    """

    url: ClassVar[str] = ""
    opener: ClassVar[staticmethod[[Path], StorageBackend] | None] = None
    deadline_s: ClassVar[float] = 10.0

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        own = {name for name in vars(cls) if not (name.startswith("__") and name != "__test__")}
        if own - DATA:
            raise TypeError(
                f"{cls.__name__} defines {', '.join(sorted(own - DATA))}; a contract class holds "
                f"data only: {', '.join(sorted(DATA))}"
            )

    @pytest.mark.parametrize("ident", list(STORAGE_CLAUSES))
    def test_clause(self, ident: str, record_property: Any) -> None:
        """One clause."""
        opener = type(self).opener or opener_of(self.url)
        subject = StorageSubject(type(self).__name__, opener, self.deadline_s)
        result = check_clause(subject, STORAGE_CLAUSES[ident])
        record_property("contract", result.as_json())
        if result.status is Status.NOT_APPLICABLE:
            pytest.skip(result.evidence)
        if result.bad:
            pytest.fail(f"{result.heading}\n{result.evidence}", pytrace=False)
