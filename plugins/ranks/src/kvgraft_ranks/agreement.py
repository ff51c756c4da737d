"""Facts that differ between ranks, made equal by one gathering of messages per poll (D2, D3).

    poll ─► finish: read all messages ─► the cache's own work ─► start: send the next one ─► step
                                                                                              │
    poll ─► finish ... ◄──────────────────────────────────────────────────────────────────────┘

A message has a fixed size: which of the open copies and calls ended here, which failed, the clock,
and results of ended calls of stores, bit by bit. A copy has ended when it ended on all ranks, and
has failed if it failed on one. A key of a store is OK if it is on all.
"""

from __future__ import annotations

import json
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvgraft.errors import ConfigError
from kvgraft_ranks.errors import RanksDivergedError, RanksError
from kvgraft_ranks.log import CallLog, first_difference

if TYPE_CHECKING:
    from kvgraft_ranks.copies import AgreedTicket
    from kvgraft_ranks.stores import AgreedCall

__all__ = ["MESSAGE_NBYTES", "Agreement", "Messenger"]

MESSAGE_NBYTES = 1024
"""Bytes of a message."""

COPIES = 512
"""Copies that a message covers, the oldest ones: bits of a mask."""

CALLS = 256
"""Calls of stores that a message covers."""

HEAD = struct.Struct("<BBBxIQ8sd")
"""Kind, whether a wait timed out, working stores, bytes to gather, calls, their digest, clock."""

MASKS = (COPIES // 8, COPIES // 8, CALLS // 8, CALLS // 8)
RESULTS_NBYTES = MESSAGE_NBYTES - HEAD.size - sum(MASKS)

PAUSE_S = 0.002
"""Longest pause between two messages of a rank that waits."""


class Messenger(Protocol):
    """Sends a message to all ranks and reads theirs, see `link.Link`."""

    rank: int
    size: int
    timeout_s: float

    def start(self, message: bytes) -> None:
        """Send a message; returns at once."""

    def finish(self) -> Sequence[bytes]:
        """The messages of all ranks, by rank."""


class Kind(IntEnum):
    """The place of a message: all ranks must be at the same one (D2)."""

    POLL = 1
    WAIT = 2
    GATHER = 3


class Covered(NamedTuple):
    """The copies and calls that the message on its way is about, in order."""

    copies: list[AgreedTicket]
    calls: list[AgreedCall]
    results_nbytes: int


class Agreement:
    """The facts that this rank shares with the others.

    Args:
        link: reaches the others.
        clock: monotonic, in seconds; rank 0's counts.

    Attributes:
        now: the agreed time, of rank 0 when it sent its last message.
        log: results of this rank's calls.
        broken: why nothing is served any more; None while all is well.
        local_clock: this rank's own.
        local_working: gives the bits of this rank's store that works.
        working: bits of the stores' accesses that work on all ranks.
        n_messages: messages sent so far.
    """

    def __init__(self, link: Messenger, clock: Callable[[], float] = time.monotonic) -> None:
        self.link = link
        self.log = CallLog()
        self.now = 0.0
        self.broken: RanksError | None = None
        self.working = 0xFF
        self.local_working: Callable[[], int] = lambda: 0xFF
        self.n_messages = 0
        self.local_clock = clock
        self._copies: list[AgreedTicket] = []
        self._calls: list[AgreedCall] = []
        self._covered: Covered | None = None
        self._kind = Kind.POLL
        self._gave_up = self._timed_out = False
        self._gather_nbytes: list[int] = []
        self._results = bytearray()
        self._agreed_results = bytearray()
        self._awaited: deque[AgreedCall] = deque()

    def clock(self) -> float:
        """The time that all ranks have agreed on; it moves with messages only."""
        return self.now if self.broken is None else self.local_clock()

    def expect_whole(self) -> None:
        """Raise the error that broke the ranks, if there is one."""
        if self.broken is not None:
            raise self.broken

    def add_copy(self, ticket: AgreedTicket) -> None:
        """A copy was submitted, on all ranks."""
        self._copies.append(ticket)

    def add_call(self, call: AgreedCall) -> None:
        """A call of a store was made, on all ranks."""
        self._calls.append(call)

    # -- messages

    def start(self, kind: Kind = Kind.POLL, nbytes: int = 0) -> None:
        """Send this rank's facts; returns at once.

        Raises:
            RanksError: the others cannot be reached.
        """
        self.expect_whole()
        copies, calls = self._copies[:COPIES], self._calls[:CALLS]
        done = failed = settled = free = 0
        for at, ticket in enumerate(copies):
            if ticket.real.done:
                done |= 1 << at
                failed |= (ticket.real.error is not None) << at
        for at, call in enumerate(calls):
            if call.real.done:
                settled |= 1 << at
                free |= 1 << at
            elif call.real.settled:
                settled |= 1 << at
        working = self.local_working()
        head = HEAD.pack(
            kind,
            self._gave_up,
            working,
            nbytes,
            self.log.number,
            self.log.digest,
            self.local_clock(),
        )
        results = bytes(self._results[:RESULTS_NBYTES])
        masks = [
            mask.to_bytes(n, "little") for mask, n in zip((done, failed, settled, free), MASKS)
        ]
        self._kind, self._covered = kind, Covered(copies, calls, len(results))
        self.n_messages += 1
        try:
            self.link.start(b"".join([head, *masks, results]).ljust(MESSAGE_NBYTES, b"\0"))
        except RanksError as error:
            self.broken = error
            raise

    def finish(self) -> None:
        """Take in the messages on their way, if there are any; waits for the others' (D2).

        Raises:
            RanksDivergedError: ranks made other calls, or got other results (D4).
            RanksError: a rank is dead or hangs.
        """
        covered, self._covered = self._covered, None
        if covered is None or self.broken is not None:
            return
        try:
            messages = self.link.finish()
        except RanksError as error:
            self.broken = error
            raise
        heads = [HEAD.unpack_from(each) for each in messages]
        if any(each[4:6] != heads[0][4:6] or each[0] != heads[0][0] for each in heads):
            self._name_difference()
        self._timed_out = bool(heads[0][1])
        self._gather_nbytes = [each[3] for each in heads]
        self.now = heads[0][6]
        self.working = _common([each[2] for each in heads])
        self._take_in(covered, messages)

    def _take_in(self, covered: Covered, messages: Sequence[bytes]) -> None:
        masks: list[list[int]] = [[] for _ in MASKS]
        for message in messages:
            at = HEAD.size
            for mask, nbytes in zip(masks, MASKS):
                mask.append(int.from_bytes(message[at : at + nbytes], "little"))
                at += nbytes
        done, settled, free = _common(masks[0]), _common(masks[2]), _common(masks[3])
        if done:
            for number, ticket in enumerate(covered.copies):
                if done >> number & 1:
                    failed = [r for r, mask in enumerate(masks[1]) if mask >> number & 1]
                    ticket.agree(failed)
            self._copies = [each for each in self._copies if not each.agreed]
        if covered.results_nbytes:
            self._take_results(covered.results_nbytes, messages)
        if settled or free:
            for number, call in enumerate(covered.calls):
                if settled >> number & 1 and not call.told:
                    call.told = True
                    self._results += call.result()
                    self._awaited.append(call)
                call.free = call.free or bool(free >> number & 1)
        self._calls = [each for each in self._calls if not each.done]

    def _take_results(self, nbytes: int, messages: Sequence[bytes]) -> None:
        """The next bytes of results, a bit set where it is set on all ranks (D2)."""
        start = MESSAGE_NBYTES - RESULTS_NBYTES
        parts = [int.from_bytes(each[start : start + nbytes], "little") for each in messages]
        self._agreed_results += _common(parts).to_bytes(nbytes, "little")
        del self._results[:nbytes]
        while self._awaited and len(self._agreed_results) >= self._awaited[0].result_nbytes:
            call = self._awaited.popleft()
            call.agree(bytes(self._agreed_results[: call.result_nbytes]))
            del self._agreed_results[: call.result_nbytes]

    # -- waits

    def wait(
        self, is_over: Callable[[], bool], timeout_s: float, pause: Callable[[float], object]
    ) -> bool:
        """Exchange messages until something is over, at most `timeout_s` seconds of rank 0's.

        Args:
            is_over: asked after each message; it gives the same answer on all ranks.
            timeout_s: of rank 0; those of others are ignored.
            pause: waits at most so many seconds, on this rank.

        Returns:
            Whether it is over.
        """
        self.finish()
        end = time.monotonic() + timeout_s
        while not is_over():
            self._gave_up = time.monotonic() >= end
            try:
                self.start(Kind.WAIT)
            finally:
                self._gave_up = False
            self.finish()
            if self._timed_out:
                return is_over()
            pause(min(PAUSE_S, max(0.0, end - time.monotonic())))
        return True

    def gather(self, mine: bytes) -> list[bytes]:
        """Bytes of all ranks, by rank; waits for them. A collective of any size.

        Raises:
            RanksError: a rank is dead, hangs, or is at another call.
        """
        self.finish()
        self.start(Kind.GATHER, len(mine))
        self.finish()
        return self._gather(mine, self._gather_nbytes)

    def _gather(self, mine: bytes, sizes: Sequence[int]) -> list[bytes]:
        if not any(sizes):
            return [b"" for _ in sizes]
        try:
            self.link.start(mine.ljust(max(sizes), b"\0"))
            found = self.link.finish()
        except RanksError as error:
            self.broken = error
            raise
        return [each[:nbytes] for each, nbytes in zip(found, sizes)]

    def expect_all(self, error: Exception | None) -> None:
        """Raise on all ranks if a call failed on one of them (D3).

        Args:
            error: of this rank; None if it went well.

        Raises:
            ConfigError: naming the first rank that failed.
        """
        said = self.gather(b"" if error is None else f"{error}"[:400].encode())
        for rank, text in enumerate(said):
            if text:
                raise ConfigError(f"rank {rank}: {text.decode(errors='replace')}") from error

    def _name_difference(self) -> None:
        """Find the first call that differs, from all ranks' logs (D4)."""
        mine = json.dumps(self.log.kept()).encode()
        try:
            self.link.start(struct.pack("<Q", len(mine)))
            sizes = [struct.unpack("<Q", each)[0] for each in self.link.finish()]
            logs = [json.loads(each) for each in self._gather(mine, sizes)]
        except RanksError as error:
            self.broken = error
            raise
        self.broken = RanksDivergedError(*first_difference(logs))
        raise self.broken


def _common(masks: Sequence[int]) -> int:
    """The bits that are set in all."""
    found = masks[0]
    for each in masks[1:]:
        found &= each
    return found
