"""A cache whose operations are checked, one by one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ContractViolation
from kvgraft.requests.request import Request
from kvgraft.types import Namespaces, Tier
from kvgraft_guard.watching import Guard

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvgraft.admission.decision import Decision
    from kvgraft.cache import Cache
    from kvgraft.parts import Step
    from kvgraft.policies import Hint
    from kvgraft.transfers import Fence, Transfer
    from kvgraft.tree.keys import TokenKey
    from kvgraft_retention.pins import Pin
    from kvgraft_retention.stats import ClearStats

__all__ = ["guarded_operations"]


def guarded_operations(plain: type[Cache]) -> type[Cache]:
    """`plain`, with the guard around its operations.

    It has no other base, so a cache of class `plain` can become one of this class. No
    `__init_subclass__` hears of it: that may want arguments, or enter classes in a list.
    """
    if not any("__init_subclass__" in vars(each) for each in plain.__mro__[:-1]):
        return _guarded(plain)
    own = vars(plain).get("__init_subclass__")
    plain.__init_subclass__ = classmethod(lambda cls: None)  # type: ignore[assignment]
    try:
        return _guarded(plain)
    finally:
        del plain.__init_subclass__
        if own is not None:
            plain.__init_subclass__ = own  # type: ignore[method-assign]


def _guarded(plain: type[Cache]) -> type[Cache]:
    class Guarded(plain):  # type: ignore[misc, valid-type]
        __doc__ = plain.__doc__

        guard: Guard

        def begin(self, key: TokenKey, *, resume_at: Any = None, **others: Any) -> Request:
            if isinstance(resume_at, Iterator):  # the guard reads it, too
                resume_at = tuple(resume_at)
            found: Request = self.guard.look(
                "begin", super().begin, key, resume_at=resume_at, **others
            )
            return found

        def admit(self, request: Request) -> Decision:
            decision: Decision = self.guard.look("admit", super().admit, request)
            return decision

        def load_back(self, request: Request, fence: Fence | None = None) -> list[Transfer]:
            started: list[Transfer] = self.guard.look(
                "load_back", super().load_back, request, fence
            )
            return started

        def restart(self, request: Request) -> None:
            self.guard.look("restart", super().restart, request)

        def next_chunk(self, request: Request, limit: int | None = None) -> int:
            limit = _index(limit)
            n_tokens: int = self.guard.look("next_chunk", super().next_chunk, request, limit)
            return n_tokens

        def allocate(self, request: Request, n_tokens: int) -> bool:
            given: bool = self.guard.look("allocate", super().allocate, request, _number(n_tokens))
            return given

        def computed(self, request: Request, n_tokens: int, fence: Fence | None = None) -> None:
            with self.guard.moves.naming(fence):
                self.guard.look("computed", super().computed, request, _number(n_tokens), fence)

        def checkpoint(
            self, request: Request, fence: Fence | None = None, *, keep_slots: bool = False
        ) -> bool:
            with self.guard.moves.naming(fence):
                shared: bool = self.guard.look(
                    "checkpoint", super().checkpoint, request, fence, keep_slots=keep_slots
                )
            return shared

        def finish(
            self,
            request: Request,
            fence: Fence | None = None,
            hint: Hint | str | None = None,
            **others: Any,
        ) -> int:
            with self.guard.moves.naming(fence):
                cached: int = self.guard.look(
                    "finish", super().finish, request, fence, hint, **others
                )
            return cached

        def abort(self, request: Request) -> None:
            self.guard.look("abort", super().abort, request)

        def fork(self, request: Any, *given: Any, **named: Any) -> Request:
            n_tokens = request.key.n_tokens if isinstance(request, Request) else 0
            forked: Request = super().fork(request, *given, **named)
            if request.key.n_tokens != n_tokens:
                with self.guard.checking("fork"):
                    raise ContractViolation(
                        "T11",
                        None,
                        f"a fork changed its parent's key of {n_tokens} tokens to {request.key!r}",
                    )
            return forked

        def step(
            self,
            requests: Sequence[Request],
            tokens: object = None,
            *,
            n_computed: object = None,
            **others: Any,
        ) -> Step:
            with self.guard.moves.naming(others.get("fence")):
                step: Step = self.guard.look_at_step(
                    super().step, requests, tokens, n_computed=n_computed, **others
                )
            return step

        def key_was_cut(self, key: TokenKey, end: int) -> None:
            super().key_was_cut(key, end)
            self.guard.steps.cut(self.running[id(key)], end)

        def table(self, request: Request, component: str, start: int = 0) -> npt.NDArray[np.int32]:
            table: npt.NDArray[np.int32] = super().table(request, component, start)
            if self.guard.period == 1 and not start:
                with self.guard.checking("table"):
                    self.guard.watched.shares.check_table(request, component, table)
            return table

        def poll(self) -> int:
            # A poll has nothing to do, and is not looked at, where nothing is in flight or cleared,
            # nothing is copied ahead and no memory moves.
            watched = self.guard.watched
            idle = not any(watched.queues) and not self.tree.cleared and not watched.write_back
            if self.arenas is None and idle:
                n_ended: int = super().poll()
                return n_ended
            ended: int = self.guard.look("poll", super().poll)
            return ended

        def drain(self) -> bool:
            all_ended: bool = self.guard.look("drain", super().drain)
            return all_ended

        def move_memory(self, giver: str, taker: str, tier: Tier = Tier.DEVICE) -> bool:
            moves: bool = self.guard.look("move_memory", super().move_memory, giver, taker, tier)
            return moves

        def evict(self, component: str, n_slots: int, tier: Tier = Tier.DEVICE) -> int:
            n_slots = _index(n_slots)
            freed: int = self.guard.look("evict", super().evict, component, n_slots, tier)
            return freed

        def pin(self, key: TokenKey, **others: Any) -> Pin:
            pin: Pin = self.guard.look("pin", super().pin, key, **others)
            return pin

        def unpin(self, pin: Pin) -> None:
            self.guard.look("unpin", super().unpin, pin)

        def unpin_all(self, owner: str) -> int:
            n_pins: int = self.guard.look("unpin_all", super().unpin_all, owner)
            return n_pins

        def clear(
            self, namespace: object = Namespaces.ALL, *, version: object = None
        ) -> ClearStats:
            plain = partial(super().clear, version=version)
            cleared: ClearStats = self.guard.look("clear", plain, namespace)
            return cleared

        def close(self) -> None:
            # An error on its way, as out of a `with`, or found before, is not hidden.
            known = sys.exc_info()[0] is not None or self.guard.broken
            try:
                super().close()
            except Exception:
                if not known:
                    raise
                self.journal.engine.close()
            if not known:
                self.guard.closed()

    Guarded.__name__, Guarded.__qualname__ = plain.__name__, plain.__qualname__
    Guarded.__module__ = plain.__module__
    return Guarded


def _number(given: Any) -> Any:
    """A number of another library as Python's, which the guard adds to others without overflow.

    Other objects stay as they are: the operation says what is wrong with them.
    """
    if type(given) is bool or not isinstance(given, Integral):
        return given
    return int(given)


def _index(given: Any) -> Any:
    """The same where the operation takes whatever is an index, such as a tensor of one number."""
    if type(given) is bool:
        return given
    try:
        return index(given)
    except TypeError:
        return given
