"""The guard itself: a cache's operations, looked at one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from kvgraft.config import GuardMode
from kvgraft.errors import ContractViolation
from kvgraft.guard.admitting import Admitting
from kvgraft.guard.books import Reading
from kvgraft.guard.failing import Attempt, Failing
from kvgraft.guard.hooks import HookGuard
from kvgraft.guard.moves import Moves
from kvgraft.guard.running import Running
from kvgraft.guard.splits import watch_splits
from kvgraft.guard.standing import Standing
from kvgraft.guard.tiering import Tiering
from kvgraft.guard.watched import After, Watched
from kvgraft.requests.request import Request, Stage

if TYPE_CHECKING:
    from kvgraft.cache import Cache

__all__ = ["Guard", "watch"]

FEWEST_OPERATIONS = 8
"""Operations between two recomputations of all books of a small cache."""

SLOTS_A_CHECK = 64
"""Slots for which a recomputation is one operation rarer: its cost per operation is bounded."""


class Guard:
    """Watches one cache; see `docs/guard.md`.

    It wraps the cache's methods, on that instance alone. What it costs per operation depends on the
    number of pools, and on the length of the path where a lease is looked at. The books after an
    operation are those before the next one: whoever changes them in between is found out there.

    Args:
        cache: the cache, just built.
        hooks: the wrappers around its components' hooks.

    Attributes:
        looked_at: operations that were looked at.
        full_checks: how often all books were recomputed.

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
        self._looking = False
        self._broken = False
        self._last: Reading | None = None
        # Recomputing the books costs as much as there are slots; so it is as rare as they are many.
        slots = sum(pool.ledger.capacity for pool in self.books.pools)
        self._full_every = config.guard_full_check or max(FEWEST_OPERATIONS, slots // SLOTS_A_CHECK)
        self._until_full = self._full_every
        watch_splits(cache.tree)
        Moves(self.watched, hooks, lambda: self._looking)
        poll = cache.poll
        for name, prepare in self._steps().items():
            setattr(cache, name, self._wrapped(name, getattr(cache, name), prepare))
        setattr(cache, "poll", self._while_in_flight(poll, cache.poll))  # noqa: B010
        if cache.storage:
            Tiering(
                cache,
                cache.storage,
                self.watched.operations,
                lambda: self._looking,
                self._outside,
                self.period,
            )
        setattr(cache, "close", self._closing(cache.close))  # noqa: B010 - on this instance alone

    def __repr__(self) -> str:
        every = "every operation" if self.period == 1 else f"every {self.period}th call of each"
        return (
            f"<Guard of {every}: {self.looked_at} looked at, {self.full_checks} full checks, "
            f"one after {self._full_every}>"
        )

    def _steps(self) -> dict[str, Callable[..., After]]:
        """The checks of each operation."""
        admitting, running = Admitting(self.watched), self.running
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
        }

    def _wrapped(
        self, name: str, operation: Callable[..., Any], prepare: Callable[..., After]
    ) -> Callable[..., Any]:
        """An operation that is looked at every `period` times; what it calls is part of it."""
        period, count = self.period, 0
        read, read_after = self.books.read, self.books.read_after
        standing, rooms, running = self.standing, self.watched.rooms, self.running

        @wraps(operation)
        def call(*given: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            first = given[0] if given else named.get("request")
            request = first if isinstance(first, Request) else None
            if count < period or self._looking or self._is_foreign(request):
                return operation(*given, **named)
            count = 0
            self.looked_at += 1
            if period == 1:
                running.clock = self.looked_at
            was, self._last = self._last, None
            if was is None:
                was = read()
            self.watched.operation = name
            try:
                after = _prepared(prepare, operation, *given, **named)
                receipt = request.receipt if request is not None else None
                self._looking = True
                try:
                    result = operation(*given, **named)
                except ContractViolation:
                    raise
                except Exception as error:
                    self._check_failed(Attempt(name, request, receipt, was), error)
                    raise
                finally:
                    self._looking = rooms.active = False
                now = read_after(was, left=rooms.left)
                standing.check(name, was, now)
                after(result, was, now)
                standing.check_losses(name, request, was, now)
                self.watched.shares.check_others(request)
                if request is not None:
                    self.watched.promises.check_accounts(request)
                self._until_full -= 1
                if self._until_full <= 0:
                    self._check_all()
            except ContractViolation:
                self._broken = True
                raise
            if period == 1:
                self._last = now
            return result

        return call

    def _is_foreign(self, request: Request | None) -> bool:
        """Whether another cache began a request: this one refuses it."""
        if request is None or request.stage is Stage.CLOSED:
            return False
        return self.watched.cache.requests.get(id(request)) is not request

    def _while_in_flight(
        self, poll: Callable[[], int], looked_at: Callable[[], int]
    ) -> Callable[[], int]:
        """A poll has nothing to do, and is not looked at, where nothing is in flight."""
        queues = self.watched.queues

        @wraps(poll)
        def call() -> int:
            return looked_at() if any(queues) else poll()

        return call

    def _check_failed(self, attempt: Attempt, error: Exception) -> None:
        try:
            self.failing.check(attempt, error)
        except ContractViolation as violation:
            raise violation from error

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """The books change now, outside of the cache's operations."""
        self._last = None
        try:
            yield
        except ContractViolation:
            self._broken = True
            raise

    def _check_all(self) -> None:
        """Recompute every book (T1 to T10, A12)."""
        self._until_full = self._full_every
        self.full_checks += 1
        self.cache.check_integrity()

    # -- the end

    def _closing(self, close: Callable[[], None]) -> Callable[[], None]:
        @wraps(close)
        def call() -> None:
            close()
            if self._broken:
                return  # what was found is on its way up
            if not self.cache.journal.n_in_flight:
                self._check_all()
                self._check_ended()

        return call

    def _check_ended(self) -> None:
        """Each built transfer ended (R2), and each segment was released (L1)."""
        for hook in self.hooks:
            if hook.moves:
                raise ContractViolation(
                    "R2",
                    hook.name,
                    f"{len(hook.moves)} transfers were built and neither committed nor aborted",
                )
            if hook.locks and not self.cache.requests:
                raise ContractViolation(
                    "L1",
                    hook.name,
                    f"{len(hook.locks)} segments were acquired and not released: "
                    f"{[each[1] for each in hook.locks.values()]}",
                )


def watch(cache: Cache) -> Guard:
    """Wrap a cache's operations; its hooks are wrapped where it was built with a guard.

    Called by the cache itself if its configuration asks for a guard.
    """
    hooks = [
        plugin
        for each in cache.mounted
        if each.manager is not None
        for plugin in each.manager.get_plugins()
        if isinstance(plugin, HookGuard)
    ]
    return Guard(cache, hooks)


def _prepared(
    prepare: Callable[..., After], operation: Callable[..., Any], *given: Any, **named: Any
) -> After:
    """The checks of an operation; it refuses arguments of other types in its own words."""
    try:
        return prepare(*given, **named)
    except ContractViolation:
        raise
    except Exception:
        operation(*given, **named)
        raise
