"""Calls of stores that end on all ranks alike (D2, D3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft_ranks.agreement import Agreement
from kvgraft_storage import TRANSIENT, Access, BreakerState, Status, StorageTicket
from kvgraft_storage.ticket import STEP_S

if TYPE_CHECKING:
    from kvgraft_storage import Storage

    _Storage = Storage
else:
    _Storage = object

__all__ = ["AgreedCall", "RankedStorage", "ranked_storage"]

UNSURE, FULL = 1, 2
"""Marks of a result: some keys have no answer; the store is full."""


def _nothing(*_: object) -> None:
    pass


class AgreedCall(StorageTicket):
    """One call of every rank's store: a key is OK if it is on all of them (D2).

    Its keys have no status until all ranks have agreed on all of them.

    Attributes:
        real: this rank's ticket.
        told: whether all ranks have a status for every key, and send them.
        free: whether the stores of all ranks have left the caller's memory.
        result_nbytes: bytes of its result in messages.
    """

    __slots__ = ("_agreed", "_agreement", "free", "real", "result_nbytes", "told")

    def __init__(self, real: StorageTicket, agreement: Agreement) -> None:
        super().__init__(len(real.statuses), _nothing, _nothing)
        self.real = real
        self.told = self.free = self._agreed = False
        self.result_nbytes = 1 + (len(self.statuses) + 7) // 8
        self._agreement = agreement

    @property
    def decided(self) -> bool:
        """Whether all ranks have agreed on every key."""
        return self.settled

    @property
    def settled(self) -> bool:
        """Whether all ranks have agreed on every key."""
        if not self._agreed and self._agreement.broken is not None and self.real.settled:
            self._agreed, self.statuses[:] = True, self.real.statuses
        return self._agreed

    @property
    def done(self) -> bool:
        """Whether it is settled, and the memory is the caller's again on all ranks."""
        if self._agreement.broken is not None:
            return self.settled and self.real.done
        return self._agreed and self.free

    def result(self) -> bytes:
        """This rank's result, with a bit set for every key that is OK and every mark not set."""
        ok = np.array([each is Status.OK for each in self.real.statuses], dtype=np.bool_)
        marks = 0
        unanswered = not self.statuses and self.real.value is None
        if unanswered or any(each in TRANSIENT for each in self.real.statuses):
            marks |= UNSURE
        if Status.FULL in self.real.statuses:
            marks |= FULL
        return bytes([0xFF ^ marks]) + np.packbits(ok, bitorder="little").tobytes()

    def agree(self, result: bytes) -> None:
        """All ranks agreed on a result."""
        marks = 0xFF ^ result[0]
        lacking = Status.MISS
        if marks & UNSURE:
            lacking = Status.TIMEOUT
        elif marks & FULL:
            lacking = Status.FULL
        n_keys = len(self.statuses)
        bits = np.unpackbits(
            np.frombuffer(result[1:], np.uint8), count=n_keys, bitorder="little"
        ).tolist()
        self.statuses[:] = [Status.OK if bit else lacking for bit in bits]
        self.value = None if marks & UNSURE else self.real.value
        self._agreed = True

    def cancel(self) -> None:
        """Give up, on all ranks; keys without a status become TIMEOUT."""
        self.cancelled = True
        self.real.cancel()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is done on all ranks, at most `timeout_s` seconds of rank 0."""
        if self._agreement.broken is not None:
            return self.real.wait(timeout_s)
        return self._agreement.wait(
            lambda: self.done, timeout_s, lambda pause_s: self.real.wait(min(STEP_S, pause_s))
        )


class RankedStorage(_Storage):
    """A supervised store of one rank, with tickets that end on all ranks alike."""

    agreement: Agreement

    def __init__(self, *given: Any, **named: Any) -> None:
        named["clock"] = self.agreement.local_clock
        super().__init__(*given, **named)
        self.agreement.local_working = self._working

    def _working(self) -> int:
        """The accesses whose breakers are closed, a bit each."""
        return sum(
            (super(RankedStorage, self).state_of(access) is BreakerState.CLOSED) << bit
            for bit, access in enumerate(Access)
        )

    def state_of(self, access: Access) -> BreakerState | None:
        """The stores' breakers of all ranks: closed if all are."""
        if not self.attached:
            return super().state_of(access)
        working = self.agreement.working >> list(Access).index(access) & 1
        return BreakerState.CLOSED if working else BreakerState.OPEN

    def get(self, *given: Any, **named: Any) -> StorageTicket:
        """See `Storage.get`."""
        return self._agreed(super().get(*given, **named))

    def set(self, *given: Any, **named: Any) -> StorageTicket:
        """See `Storage.set`."""
        return self._agreed(super().set(*given, **named))

    def exists(self, *given: Any, **named: Any) -> StorageTicket:
        """See `Storage.exists`."""
        return self._agreed(super().exists(*given, **named))

    def touch(self, *given: Any, **named: Any) -> StorageTicket:
        """See `Storage.touch`."""
        return self._agreed(super().touch(*given, **named))

    def ask(self, verb: str, *given: Any, **named: Any) -> StorageTicket:
        """See `Storage.ask`; writes end on all ranks alike, other questions are this rank's own."""
        real = super().ask(verb, *given, **named)
        return self._agreed(real) if verb == "set_version" else real

    def _agreed(self, real: StorageTicket) -> StorageTicket:
        if self.agreement.broken is not None:
            return real
        call = AgreedCall(real, self.agreement)
        self.agreement.add_call(call)
        return call


def ranked_storage(plain: type[Storage], agreement: Agreement) -> type[Storage]:
    """A class of supervised stores that agree with the other ranks."""
    return type("Storage", (RankedStorage, plain), {"agreement": agreement})
