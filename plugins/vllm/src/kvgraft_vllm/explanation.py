"""Explains why a request did not get more from the store.

vLLM looks up a request's chunks group by group: for full attention from the first chunk on until
one is missing, for a window or a state from the last chunk backwards. A group can only shorten the
hit that earlier ones allowed, so the last group that missed a chunk ended it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvgraft_storage import Status
from kvgraft_vllm.identity import Engine

__all__ = ["Ending", "Explanations"]


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a hit ended.

    Attributes:
        group: number of the group that ended it.
        chunk: number of the chunk that was missing, from 0; None if vLLM did not say.
        status: why it was missing; OK if no missing chunk ended the hit.
    """

    group: int
    chunk: int | None
    status: Status


@dataclass(slots=True)
class _Group:
    """The chunks of one group that a request asked for."""

    n_found: int = 0
    missing: tuple[int | None, Status] | None = None
    n_failed: int = 0


@dataclass(slots=True)
class _Request:
    groups: dict[int, _Group] = field(default_factory=dict)
    seen: set[bytes] = field(default_factory=set)


class Explanations:
    """Keeps the answers that every running request got, until it ends.

    Args:
        engine: the engine with its groups.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests: dict[str, _Request] = {}

    def note(
        self, request: str, key: bytes, group: int, end_token: int | None, status: Status
    ) -> None:
        """Note the answer about a chunk: OK, or why it is missing."""
        mine = self._requests.setdefault(request, _Request())
        if key in mine.seen:
            return
        mine.seen.add(key)
        told = mine.groups.setdefault(group, _Group())
        if status is Status.OK:
            told.n_found += 1
        elif told.missing is None:
            told.missing = self._chunk(group, end_token), status

    def note_failures(self, request: str, failed: Iterable[tuple[int, int | None, Status]]) -> None:
        """Note chunks that were found and could not be loaded: group, end and reason of each."""
        mine = self._requests.get(request)
        for group, end_token, status in failed:
            if mine is None:
                return
            told = mine.groups.setdefault(group, _Group())
            told.n_failed += 1
            told.n_found -= 1
            if told.n_failed == 1:
                told.missing = self._chunk(group, end_token), status

    def finish(self, request: str) -> tuple[Ending, str] | None:
        """How a request's hit ended, and a line that says so; None if it asked for nothing."""
        mine = self._requests.pop(request, None)
        if mine is None:
            return None
        ending = Ending(next(iter(mine.groups)), None, Status.OK)
        for group, told in mine.groups.items():
            if told.missing is not None:
                ending = Ending(group, *told.missing)
        n_found = sum(told.n_found for told in mine.groups.values())
        groups = "; ".join(self._group(group, told) for group, told in mine.groups.items())
        line = f"request {request}: {n_found} chunks from the store, {_ended(ending)}; {groups}"
        return ending, line

    def _group(self, number: int, told: _Group) -> str:
        known = number < len(self._engine.groups)
        window = self._engine.groups[number].window_chunks if known else None
        layers = f"{len(self._engine.groups[number].layers)} layers, " if known else ""
        reach = "all chunks" if window is None else f"the last {window}"
        failed = f", {told.n_failed} could not be loaded" if told.n_failed else ""
        return f"group {number} ({layers}needs {reach}): {told.n_found} found{failed}"

    def _chunk(self, group: int, end_token: int | None) -> int | None:
        size = self._engine.tokens_per_chunk(group)
        return None if end_token is None or not size else (end_token - 1) // size


def _ended(ending: Ending) -> str:
    if ending.status is Status.OK:
        return "nothing was missing"
    chunk = "a chunk" if ending.chunk is None else f"chunk {ending.chunk}"
    return f"ended by group {ending.group}: {chunk} is {_WORDS.get(ending.status, 'missing')}"


_WORDS = {
    Status.MISS: "not there",
    Status.CORRUPT: "damaged",
    Status.STALE: "another's",
    Status.TOO_LARGE: "of another size",
    Status.TIMEOUT: "late",
    Status.DOWN: "out of reach",
}
