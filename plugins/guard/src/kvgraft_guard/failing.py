"""Checks of operations that raise (I8, R2), and the guard's own failures."""

from __future__ import annotations

from traceback import extract_tb
from typing import NamedTuple

from kvgraft.errors import ContractViolation, KvgraftError, PluginHookError
from kvgraft.requests.request import Request
from kvgraft.tree.ledger import PoolBooks
from kvgraft.tree.pinning import Receipt
from kvgraft_guard.books import FREE, IN_FLIGHT, PINNED, PRIVATE, PROMISED, Counts, Reading
from kvgraft_guard.standing import Standing
from kvgraft_guard.watched import Watched

__all__ = ["Attempt", "Failing", "GuardError", "own_error"]

LEAVES_NO_TRACE = frozenset({"begin", "admit", "load_back", "restart", "next_chunk", "evict"})
"""Operations that, if they fail, leave promises and requests' slots as they were."""


MATCHES = frozenset({"begin", "admit", "restart"})
"""Operations that may begin backups of matched data."""


GIVES_PROMISED = frozenset({"load_back", "allocate", "allocate_at", "step"})
"""Operations in which admitted requests get their slots."""

INTERNAL = (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that the core raises for the impossible, or for arguments of wrong types."""


class GuardError(KvgraftError):
    """A check of the guard failed although the books are in order.

    Attributes:
        call: the call that was being checked.
    """

    def __init__(self, call: str, cause: Exception) -> None:
        last = extract_tb(cause.__traceback__)[-1]
        where = f"{last.filename.replace(chr(92), '/').rpartition('/')[2]}:{last.lineno}"
        super().__init__(
            f"the guard failed as it checked {call}: {type(cause).__name__} at {where}: {cause}; "
            "report it, and open the cache with guard='off' meanwhile"
        )
        self.call = call


def own_error(error: BaseException) -> Exception | None:
    """The exception that the guard's code raised, also in a hook wrapper; None if there is none.

    One that the call itself raised, where the guard made it, is of arguments that it does not have.
    """
    trace = error.__traceback__
    if trace is None or trace.tb_next is None:
        return None
    if isinstance(error, PluginHookError) and error.__cause__ is not None:
        error = error.__cause__
        trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    its = module.partition(".")[0] == __name__.partition(".")[0]
    return error if its and isinstance(error, Exception) else None


class Attempt(NamedTuple):
    """An operation before it ran.

    Attributes:
        name: of the operation.
        request: whose it is, if it is a request's.
        receipt: that request's then.
        was: the books then.
    """

    name: str
    request: Request | None
    receipt: Receipt | None
    was: Reading


class Failing:
    """Checks the books of one cache after an exception."""

    def __init__(self, watched: Watched, standing: Standing) -> None:
        self.watched = watched
        self.standing = standing

    def check(self, attempt: Attempt, error: Exception) -> None:
        """The books balance, and are unchanged if nothing was done yet.

        Evictions made for the operation stay; the slots that they freed were evictable.
        """
        now = self.watched.books.read()
        self.standing.check_balance(attempt.name, now)
        kept = self._kept(attempt, error)
        was = attempt.was.swept(now)
        for at, (before, after) in enumerate(zip(was.counts, now.counts)):
            if any(before[term] != after[term] for term in kept):
                self._raise(attempt.name, at, before, after, error)
        if isinstance(error, INTERNAL):
            self._check_internal(attempt, error)

    def _check_internal(self, attempt: Attempt, error: Exception) -> None:
        """The core stumbled: over broken books, or over a promise that it could not keep (A7).

        An assertion where slots are given says that there were none for an admitted request. In the
        midst of a step the books are no help: some requests have theirs.
        """
        if attempt.name != "step":
            self.watched.cache.check_integrity()
        if attempt.name not in GIVES_PROMISED or not isinstance(error, AssertionError):
            return
        last = extract_tb(error.__traceback__)[-1]
        raise ContractViolation(
            "A7",
            None,
            f"{attempt.name} of an admitted request ends at `{last.line}` in {last.name}: "
            f"{'; '.join(ledger.equation() for ledger in self._ledgers())}",
        )

    def _ledgers(self) -> list[PoolBooks]:
        books = self.watched.books
        return [pool.ledger for pool in books.pools[: books.n_device]]

    def _kept(self, attempt: Attempt, error: Exception) -> tuple[int, ...]:
        """Terms of the ledgers that must be as they were."""
        name, request = attempt.name, attempt.request
        asked_first = (
            isinstance(error, PluginHookError)
            and error.hook == "acquire_component_lock"
            and not self.watched.tree.has_state
        )
        if name not in LEAVES_NO_TRACE:
            return (FREE, PINNED, PRIVATE, IN_FLIGHT, PROMISED) if asked_first else ()
        if request is not None and request.receipt is not attempt.receipt:
            # Matched anew before it failed: the pins are others', and a restart gives up the rest.
            return () if name == "restart" else (PRIVATE, PROMISED)
        if name in self.watched.ends_backups:
            return (PRIVATE, PROMISED)
        if self.watched.copies_hits and name in MATCHES and not asked_first:
            return (PRIVATE, PROMISED)
        return (PINNED, PRIVATE, IN_FLIGHT, PROMISED)

    def _raise(self, name: str, at: int, before: Counts, after: Counts, error: Exception) -> None:
        pool = self.watched.books.pools[at]
        evidence = (
            f"{name} raised {type(error).__name__} and the {pool.name} pool went from {before} to "
            f"{after} (free, evictable, pinned, private, in flight, promised)"
        )
        if name == "load_back":
            raise ContractViolation("R2", pool.component, evidence)
        raise ContractViolation("I8", pool.component, evidence)
