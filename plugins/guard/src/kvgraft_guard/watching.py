"""The guard itself: checks a cache's operations, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvgraft.cache import Cache
from kvgraft.config import GuardMode
from kvgraft.errors import ContractViolation, KvgraftError
from kvgraft.requests.request import CLOSED, Request
from kvgraft.tree.pinning import Receipt
from kvgraft_guard.admitting import Admitting
from kvgraft_guard.adopting import Adopting
from kvgraft_guard.books import Reading
from kvgraft_guard.clearing import Clearing
from kvgraft_guard.failing import Attempt, Failing, GuardError, own_error
from kvgraft_guard.hooks import HookGuard
from kvgraft_guard.moves import Moves
from kvgraft_guard.pins import Pinning
from kvgraft_guard.reserve import Reserve
from kvgraft_guard.running import Running
from kvgraft_guard.standing import Standing
from kvgraft_guard.steps import Steps
from kvgraft_guard.watched import After, Watched

__all__ = ["Guard"]

FEWEST_OPERATIONS = 8
"""Operations between two recomputations of all books of a small cache."""

SLOTS_A_CHECK = 64
"""Each this many slots make a recomputation one operation rarer, which bounds its cost."""


class _Looked:
    """An operation that is looked at.

    Attributes:
        name, request, given, named: the call, its request and its arguments.
        receipt: the request's before.
        was: the books before.
        after: the check to run when it is over.
    """

    __slots__ = ("after", "given", "name", "named", "receipt", "request", "was")

    def __init__(
        self,
        name: str,
        request: Request | None,
        given: tuple[Any, ...],
        named: dict[str, Any],
        was: Reading,
    ) -> None:
        self.name = name
        self.request = request
        self.given = given
        self.named = named
        self.receipt: Receipt | None = None
        self.was = was
        self.after: After | None = None


class Guard:
    """Watches one cache; see `docs/guard.md`.

    The guarded parts of the cache call it (`kvgraft_guard.parts`). Its cost per operation depends
    on the number of pools, and on the length of the path if a lease is checked. The books after an
    operation must be those before the next one, so a change in between is found.

    Args:
        cache: the cache, just built.
        hooks: the wrappers around its components' hooks.

    Attributes:
        looked_at: operations that were checked.
        full_checks: how often all books were recomputed.
        chosen: requests of the running step whose operations are checked.

    Not thread safe: it runs on the scheduler thread, inside the cache's operations.
    """

    def __init__(self, cache: Cache, hooks: list[HookGuard]) -> None:
        config = cache.config
        self.cache = cache
        self.hooks = hooks
        self.period = 1 if config.guard is GuardMode.ON else max(1, round(1 / config.guard_sample))
        self.watched = Watched(cache, hooks)
        self.watched.shares.follows = self.watched.promises.follows = self.period == 1
        self.books = self.watched.books
        self.running = Running(self.watched)
        self.standing = Standing(self.watched)
        self.failing = Failing(self.watched, self.standing)
        self.looked_at = self.full_checks = 0
        self.chosen: list[Request] = []
        self._looking = self._stepping = False
        self._broken = False
        self._last: Reading | None = None
        # Recomputing the books costs as much as there are slots; so it is as rare as they are many.
        slots = sum(pool.ledger.capacity for pool in self.books.pools)
        self._full_every = config.guard_full_check or max(FEWEST_OPERATIONS, slots // SLOTS_A_CHECK)
        self._until_full = self._full_every
        self.moves = Moves(self.watched, hooks, lambda: self._looking)
        self.steps = Steps(self.watched, cache.stepper.rows)
        self.reserve = Reserve(self.watched)
        self._steps = self._checks()
        self._counts = dict.fromkeys(self._steps, 0)
        self._current: _Looked | None = None

    def __repr__(self) -> str:
        every = "every operation" if self.period == 1 else f"every {self.period}th call of each"
        return (
            f"<Guard of {every}: {self.looked_at} looked at, {self.full_checks} full checks, "
            f"one after {self._full_every}>"
        )

    @property
    def looking(self) -> bool:
        """Whether the running operation is checked."""
        return self._looking

    def _checks(self) -> dict[str, Callable[..., After]]:
        """The checks of each operation."""
        admitting, running = Admitting(self.watched), self.running
        pinning, adopting = Pinning(self.watched), Adopting(self.watched)
        return {
            "begin": admitting.begin,
            "admit": admitting.admit,
            "load_back": running.load_back,
            "restart": admitting.restart,
            "next_chunk": running.next_chunk,
            "allocate": running.allocate,
            "computed": running.computed,
            "checkpoint": running.checkpoint,
            "finish": admitting.finish,
            "abort": admitting.abort,
            "poll": running.poll,
            "drain": running.drain,
            "evict": running.evict,
            "move_memory": running.move_memory,
            "clear": Clearing(self.watched).clear,
            "pin": pinning.pin,
            "unpin": pinning.unpin,
            "unpin_all": pinning.unpin,
            "take": adopting.take,
            "give_back": adopting.give_back,
            "admit_unpromised": adopting.admit_unpromised,
            "adopt": adopting.adopt,
            "allocate_at": adopting.allocate_at,
        }

    def look(self, name: str, operation: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Run an operation, and check one of every `period`; nested calls are part of it."""
        self._counts[name] += 1
        first = given[0] if given else None
        request = first if isinstance(first, Request) else None
        is_turn = self._counts[name] >= self.period or any(each is request for each in self.chosen)
        if not is_turn or self._looking or self._is_foreign(request):
            return operation(*given, **named)
        self._counts[name] = 0
        self.looked_at += 1
        if self.period == 1:
            self.running.clock = self.looked_at
        try:
            return self._looked(name, operation, request, given, named)
        except ContractViolation:
            self._broken = True
            raise

    def look_at_step(self, step: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Run a step of all running requests; the stepper says which of them are checked."""
        if self.period == 1:
            self.steps.asked(given[0], named["n_computed"])
            self._last = None
            self.looked_at += 1  # what a request was offered before counts no more
            self.running.clock = self.looked_at
        self._stepping = True
        try:
            result = step(*given, **named)
        except (ContractViolation, GuardError):
            self._broken = True
            raise
        except Exception as error:
            own = own_error(error)
            if own is not None:
                self._broken = True
                raise GuardError("step", own) from error
            self._check_failed(Attempt("step", None, None, self.books.read()), error)
            raise
        finally:
            self._last, self._stepping = None, False
            self.chosen = []
        return result

    def _looked(
        self,
        name: str,
        operation: Callable[..., Any],
        request: Request | None,
        given: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        was, self._last = None if self._stepping else self._last, None
        seen = _Looked(name, request, given, named, was or self.books.read())
        try:
            self._begins(seen)
        except ContractViolation:
            raise
        except Exception as error:
            operation(*given, **named)  # refuses arguments of other types in its own words
            raise self._failure(name, error) from error
        self._looking, self._current = True, seen
        try:
            result = operation(*given, **named)
        except ContractViolation:
            raise
        except Exception as error:
            own = own_error(error)
            if own is not None:
                self._broken = True
                raise GuardError(name, own) from error
            self._check_failed(Attempt(name, request, seen.receipt, seen.was), error)
            raise
        finally:
            self._looking = self.watched.rooms.active = False
            self._current = None
        if seen.after is not None:
            with self.checking(name):
                self._check(seen, result)
        return result

    def _check(self, seen: _Looked, result: Any) -> None:
        """The checks after an operation."""
        now = self._ends(seen)
        assert seen.after is not None
        seen.after(result, seen.was, now)
        self._check_losses(seen, now)
        self.watched.shares.check_others(seen.request)
        if seen.request is not None:
            self.watched.promises.check_accounts(seen.request)
        self._until_full -= 1
        if self._until_full <= 0:
            self._check_all()
        if self.period == 1:
            self._last = now

    @contextmanager
    def checking(self, name: str) -> Iterator[None]:
        """Run the guard's own code after a call; its errors become violations or `GuardError`."""
        try:
            yield
        except ContractViolation:
            self._broken = True
            raise
        except Exception as error:
            raise self._failure(name, error) from error

    def _failure(self, name: str, error: Exception) -> KvgraftError:
        """The broken books that a check stumbled over, if there are any; else its own failure."""
        self._broken = True
        try:
            self.cache.check_integrity()
        except ContractViolation as found:
            return found
        except Exception as other:  # noqa: BLE001 - books that cannot be recomputed
            return GuardError(name, other)
        return GuardError(name, error)

    def _is_foreign(self, request: Request | None) -> bool:
        """Whether another cache began a request: this one refuses it."""
        if request is None or request.stage is CLOSED:
            return False
        return self.cache.requests.get(id(request)) is not request

    def _begins(self, seen: _Looked) -> None:
        """The readings and expectations before an operation."""
        self.watched.operation = seen.name
        seen.after = self._steps[seen.name](*seen.given, **seen.named)
        seen.receipt = seen.request.receipt if seen.request is not None else None

    def _ends(self, seen: _Looked) -> Reading:
        """The books now; they balance, and changed as they may."""
        now = self.books.read_after(seen.was, left=self.watched.rooms.left)
        self.standing.check(seen.name, seen.was, now)
        return now

    def _check_losses(self, seen: _Looked, now: Reading) -> None:
        self.standing.check_losses(seen.name, seen.request, seen.was, now)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of the storage tier: an operation of its own, even inside one of the cache's.

        The guard checks the cache's operation up to the step, and starts a new check after it, so
        each may make only its own changes.
        """
        seen, looking, self._current = self._current, self._looking, None
        try:
            if seen is not None and seen.after is not None:
                self._check_losses(seen, self._ends(seen))
            self._looking = self.watched.rooms.active = False
            self._last = None
            yield
            if seen is not None:
                seen.was = self.books.read()
                self._begins(seen)
        except BaseException as error:
            self._broken = self._broken or isinstance(error, ContractViolation)
            if seen is not None:
                seen.after = None  # begun anew it cannot be; nor may that hide the error
            own = None if isinstance(error, ContractViolation) else own_error(error)
            if own is not None:
                raise GuardError("a step of the storage tier", own) from error
            raise
        finally:
            self._last = None
            self._looking, self._current = looking, seen

    def acknowledged(self) -> None:
        """A transfer ended; if outside of an operation, the next one reads the books again."""
        if not self._looking:
            self._last = None

    def _check_failed(self, attempt: Attempt, error: Exception) -> None:
        try:
            self.failing.check(attempt, error)
        except ContractViolation as violation:
            raise violation from error
        except Exception:  # noqa: BLE001 - the operation's own error comes first
            self._broken = True

    def _check_all(self) -> None:
        """Recompute every book (T1 to T10, A12)."""
        self._until_full = self._full_every
        self.full_checks += 1
        self.cache.check_integrity()

    # -- the end

    @property
    def broken(self) -> bool:
        """Whether a violation was found, after which the books may be wrong."""
        return self._broken

    def closed(self) -> None:
        """The cache was closed: its remaining books are in order."""
        if not self.cache.journal.n_in_flight:
            with self.checking("close"):
                self._check_all()
                self._check_ended()

    def _check_ended(self) -> None:
        """Each built transfer ended (R2), and each segment was released (L1)."""
        for hook in self.hooks:
            if hook.moves:
                raise ContractViolation(
                    "R2",
                    hook.name,
                    f"{len(hook.moves)} transfers were built and neither committed nor aborted",
                )
            if hook.locks and not self.cache.requests and not self.cache.pins:
                raise ContractViolation(
                    "L1",
                    hook.name,
                    f"{len(hook.locks)} segments were acquired and not released: "
                    f"{[each[1] for each in hook.locks.values()]}",
                )
