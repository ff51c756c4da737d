"""Running the storage clauses on one backend, without pytest."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from kvgraft.errors import ContractViolation, KvgraftError
from kvgraft_testing.result import Result, Status
from kvgraft_testing.storage import keeping as _keeping  # noqa: F401 - fills STORAGE_CLAUSES
from kvgraft_testing.storage import knowing as _knowing  # noqa: F401 - fills STORAGE_CLAUSES
from kvgraft_testing.storage import moving as _moving  # noqa: F401 - fills STORAGE_CLAUSES
from kvgraft_testing.storage.clause import STORAGE_CLAUSES, StorageClause
from kvgraft_testing.storage.subject import Opener, StorageSubject, opener_of

__all__ = ["check_clause", "check_storage"]


def check_clause(subject: StorageSubject, entry: StorageClause) -> Result:
    """One clause."""
    start = perf_counter()

    def result(status: Status, evidence: str = "", rule: str = entry.rule) -> Result:
        seconds = round(perf_counter() - start, 3)
        return Result(
            subject.name, entry.ident, rule, entry.sentence, status, evidence, seconds=seconds
        )

    if not entry.applies(subject.capabilities):
        return result(Status.NOT_APPLICABLE, f"the backend is not {entry.needs}")
    try:
        entry.check(subject)
    except ContractViolation as violation:
        return result(Status.FAILED, violation.evidence, violation.rule)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a backend's is a finding
        told = str(error) if isinstance(error, KvgraftError) else repr(error)
        return result(Status.FAILED, told)
    return result(Status.PASSED)


def check_storage(
    store: str | Opener,
    *,
    name: str = "",
    deadline_s: float = 10.0,
    progress: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run every clause on one backend. The store's content is removed.

    Args:
        store: a URL in which `{directory}` stands for an empty directory, or a function that opens
            a store in such a directory; a small capacity is fast.
        name: for reports.
        deadline_s: longest time for a call.
        progress: called with each result as it comes.

    Returns:
        One result per clause.

    Raises:
        ConfigError: the store cannot be opened.
    """
    url = store if isinstance(store, str) else ""
    opener = opener_of(store) if isinstance(store, str) else store
    subject = StorageSubject(name or url.partition(":")[0] or "storage", opener, deadline_s)
    results = []
    for entry in STORAGE_CLAUSES.values():
        results.append(check_clause(subject, entry))
        progress(results[-1])
    return results
