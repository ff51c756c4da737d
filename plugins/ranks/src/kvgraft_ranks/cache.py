"""A cache whose calls are noted, so that ranks find the first one that differs (D4)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from kvgraft.admission.decision import Decision
from kvgraft.errors import ConfigError, KvgraftError
from kvgraft.pools import SLOT_BYTES
from kvgraft.requests.request import Request
from kvgraft.tree.keys import TokenKey
from kvgraft_ranks.agreement import Agreement
from kvgraft_ranks.errors import RanksError

if TYPE_CHECKING:
    from kvgraft.cache import Cache

__all__ = ["ranked_cache"]

NOTED = (
    *("begin", "admit", "load_back", "restart", "next_chunk", "allocate", "computed"),
    *("checkpoint", "finish", "abort", "step", "drain", "evict", "move_memory"),
    *("pin", "unpin", "unpin_all", "clear"),
)
"""Calls that change the cache, or decide."""

SHARING = ("checkpoint", "finish")
"""Calls that give a request's data to others, under the tokens of its key."""

NO_NAMES: Mapping[str, object] = MappingProxyType({})

TO_THE_END = ("abort",)
"""Calls that are allowed after an error of the ranks."""


def ranked_cache(plain: type[Cache], agreement: Agreement) -> type[Cache]:
    """`plain`, with calls that are noted and compared with the other ranks'.

    It has no other base, so that the guard can go around it.
    """

    class Ranked(plain):  # type: ignore[misc, valid-type]
        __doc__ = plain.__doc__

        ranks = agreement

        def poll(self) -> int:
            agreement.log.begin("poll")
            agreement.finish()
            agreement.expect_whole()
            ended: int = super().poll()
            numbers.note(self, "poll", ended)
            agreement.start()
            return ended

        async def ready(self, awaited: object) -> None:
            raise ConfigError(
                "ready: polls at times of its own, and ranks poll together; poll in the loop of "
                "the engine, on all ranks"
            )

        def close(self) -> None:
            with suppress(RanksError):  # the caches close without each other then
                agreement.finish()
            super().close()

    numbers = _Numbers(agreement)
    for name in NOTED:
        setattr(Ranked, name, _noted(name, getattr(plain, name), numbers))
    return Ranked


def _noted(name: str, call: Callable[..., Any], numbers: _Numbers) -> Callable[..., Any]:
    agreement = numbers.agreement

    @wraps(call)
    def noted(self: Cache, *given: Any, **named: Any) -> Any:
        if name not in TO_THE_END:
            agreement.expect_whole()
        agreement.log.begin(name)
        try:
            result = call(self, *given, **named)
        except RanksError:
            raise
        except KvgraftError as error:
            numbers.note(self, name, type(error).__name__, given, named)
            raise
        numbers.note(self, name, result, given, named)
        return result

    return noted


class _Numbers:
    """Arguments and results of calls as numbers that are equal on all ranks.

    Requests get numbers in the order in which they begin.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self._requests: dict[int, int] = {}
        self._n_begun = 0

    def note(
        self,
        cache: Cache,
        call: str,
        result: object,
        given: Sequence[object] = (),
        named: Mapping[str, object] = NO_NAMES,
    ) -> None:
        """Note a call, its arguments, its result, and all books behind it."""
        if isinstance(result, Request) and id(result) not in self._requests:
            self._n_begun += 1
            self._requests[id(result)] = self._n_begun
        requests = [each for each in given if isinstance(each, Request)]
        about: list[object] = [_shown(each) for each in given if not isinstance(each, Request)]
        about += [f"{name}={_shown(named[name])}" for name in sorted(named)]
        for each in requests:
            about += self._of(each)
            if call in SHARING:
                about.append(_shown(each.key))
        books = [
            number
            for component in cache.tree.components
            for books in (component.device, component.host)
            if books is not None
            for number in (books.free, books.evictable, books.pinned, books.allocator.n_allocated)
        ]
        self.agreement.log.note(call, [*about, *self._result(result), *books])
        for each in requests:
            if id(each) not in cache.requests:
                self._requests.pop(id(each), None)

    def _of(self, request: Request) -> list[object]:
        """A request's number, where it stands, and the last slot it holds of each component."""
        runs = [part.runs[-1].device for part in request.components if part.holds_pages]
        states = [part.live for part in request.state_components if part.live is not None]
        slots = [int.from_bytes(each[-SLOT_BYTES:], sys.byteorder) for each in (*runs, *states)]
        number = f"request {self._requests.get(id(request), 0)}"
        return [number, request.anchor_tokens, request.device_tokens, request.computed, *slots]

    def _result(self, result: object) -> list[object]:
        if isinstance(result, Request):
            return self._of(result)
        if isinstance(result, Decision):
            shortages = [(each.component, each.pool, each.needed) for each in result.shortages]
            return [result.outcome.value, *shortages]
        if isinstance(result, list):
            return [len(result)]
        if isinstance(result, (bool, int, str)) or result is None:
            return [result]
        return [type(result).__name__]


def _shown(argument: object) -> object:
    """An argument, equal where it is: a number as it is, others by a digest.

    Texts are not shown because a namespace may be a secret.
    """
    if argument is None or isinstance(argument, (bool, int, float)):
        return argument
    if isinstance(argument, TokenKey):
        said = f"{argument.namespace!r}" if _has_a_text(argument.namespace) else ""
        digest = xxhash.xxh3_64(argument.data)
        digest.update(said.encode())
        return f"{argument.n_tokens} tokens {digest.hexdigest()}"
    if _has_a_text(argument):
        return xxhash.xxh3_64_hexdigest(f"{argument!r}".encode())[:8]
    if isinstance(argument, (list, tuple)) and argument and isinstance(argument[0], Request):
        return len(argument)
    try:
        numbers = np.asarray(argument, np.int64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return type(argument).__name__
    return f"{numbers.size} numbers {xxhash.xxh3_64_hexdigest(numbers.tobytes())[:8]}"


def _has_a_text(value: object) -> bool:
    """Whether its `repr` is the same in all processes."""
    if isinstance(value, tuple):
        return all(map(_has_a_text, value))
    return value is None or isinstance(value, (bool, int, float, str, bytes))
