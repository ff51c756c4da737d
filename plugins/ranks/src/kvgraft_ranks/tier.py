"""The storage tier of a rank: its steps are counted, not timed, and ranks wait together."""

from __future__ import annotations

import itertools
import time
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.errors import KvgraftError, SnapshotError
from kvgraft.tree.keys import TokenKey
from kvgraft_ranks.agreement import Agreement
from kvgraft_ranks.stores import AgreedCall, ranked_storage
from kvgraft_storage import StorageBackend, StorageTicket
from kvgraft_storage.tier import Prefetch, Restoring
from kvgraft_storage.tier.slicing import Pace

if TYPE_CHECKING:
    from kvgraft_storage.tier import StorageTier

    _Tier = StorageTier
else:
    _Tier = object

__all__ = ["RankedTier", "ranked_tier"]

STEPS = 16
"""Steps that one call of the tier makes at most, in place of a slice of time."""


class RankedTier(_Tier):
    """A storage tier whose work depends on agreed facts alone (D1)."""

    agreement: Agreement
    opened = False

    def __init__(self, *given: Any, **named: Any) -> None:
        count = itertools.count()
        named["pace"] = Pace(lambda: float(next(count)), STEPS)
        super().__init__(*given, **named)
        self.opened = True

    def attach(self, backend: StorageBackend) -> None:
        """Use an open store on every rank; on none if one rank's cannot be used (D3)."""
        if not self.opened:
            super().attach(backend)
            return
        self._note("storage.attach")
        error: KvgraftError | None = None
        try:
            super().attach(backend)
        except KvgraftError as found:
            error = found
        try:
            self.agreement.expect_all(error)
        except KvgraftError:
            if error is None:
                super().detach().wait(self.settings.deadline_s)
            raise
        self.versions.write_again()

    def detach(self, deadline_s: float | None = None) -> StorageTicket:
        """See `StorageTier.detach`; the ticket is done when all ranks' stores are closed."""
        self._note("storage.detach")
        return self._agreed(super().detach(deadline_s))

    def prefetch(self, key: TokenKey) -> Prefetch:
        """See `StorageTier.prefetch`."""
        found = super().prefetch(key)
        self._note("storage.prefetch", found.arrival, found.limit, found.anchor_tokens)
        return found

    def cancel(self, prefetch: Prefetch) -> None:
        """See `StorageTier.cancel`."""
        super().cancel(prefetch)
        self._note("storage.cancel", prefetch.arrival, prefetch.tokens)

    def _note(self, call: str, *result: object) -> None:
        self.agreement.expect_whole()
        self.agreement.log.note(call, result)

    def clear(self) -> StorageTicket:
        """See `StorageTier.clear`; the ticket is done when all ranks' stores are empty."""
        self._note("storage.clear")
        ticket = self._agreed(super().clear())
        self._clearing = ticket
        return ticket

    def _agreed(self, real: StorageTicket) -> StorageTicket:
        if self.agreement.broken is not None:
            return real
        call = AgreedCall(real, self.agreement)
        self.agreement.add_call(call)
        return call

    def load(self, path: str | Path) -> Restoring:
        """Fill HOST from this rank's snapshot; on no rank if one's cannot be read (D3).

        Raises:
            SnapshotError: on all ranks, naming the first whose file cannot be read, or is of
                another moment than rank 0's.
        """
        self._note("storage.load")
        found: Restoring | None = None
        said = b""
        try:
            found = super().load(path)
            said = b"\0" + _digest_of(found)
        except SnapshotError as error:
            said = f"{error}"[:400].encode()
        told = self.agreement.gather(said)
        for rank, text in enumerate(told):
            if text[:1] != b"\0" or text != told[0]:
                if found is not None:
                    found.stop()
                reason = text.decode(errors="replace") if text[:1] != b"\0" else "of another moment"
                raise SnapshotError(f"snapshot {path}: rank {rank}: {reason}")
        assert found is not None
        return found

    def drain(self, timeout_s: float) -> bool:
        """Wait for all work under way on all ranks, at most `timeout_s` seconds of rank 0."""
        if self.agreement.broken is not None:
            return super().drain(timeout_s)
        until = time.monotonic() + timeout_s
        self.storing.hurry()
        self.agreement.wait(self._is_idle, timeout_s, time.sleep)
        self.touching.hurry()
        self.agreement.wait(self._has_touched, max(0.0, until - time.monotonic()), time.sleep)
        ended = not self.n_in_flight and not self.prefetching.n_short
        return ended and not self.versions.n_unwritten

    def _is_idle(self) -> bool:
        self.poll()
        return not self._goes_on()

    def _has_touched(self) -> bool:
        self.poll()
        return not self.touching.under_way


def _digest_of(restoring: Restoring) -> bytes:
    """A digest of the boundaries that a snapshot names."""
    digest = blake2b(digest_size=16)
    for boundary in restoring._left:
        digest.update(f"{boundary.pages}".encode())
        digest.update(bytes(boundary.key().data))
    return digest.digest()


def ranked_tier(plain: type[StorageTier], agreement: Agreement) -> type[StorageTier]:
    """A class of storage tiers that agree with the other ranks."""
    new_client = ranked_storage(plain.new_client, agreement)
    return type(
        "StorageTier", (RankedTier, plain), {"agreement": agreement, "new_client": new_client}
    )
