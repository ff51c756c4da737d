"""Transfers with one defect in their order, and odd ones without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from kvgraft.cache import Cache
from kvgraft.errors import TransferError
from kvgraft.pools.device import DevicePool
from kvgraft.requests.request import Request
from kvgraft.transfers.journal import Journal
from kvgraft_accelerator import routes, streams

from ..mutants.cores_held_out import edited

__all__ = ["LEGAL", "MUTANTS", "Mutant"]

Put = Callable[[pytest.MonkeyPatch], None]


class Mutant(NamedTuple):
    """A defect.

    Attributes:
        rules: those that may be named.
        put_in: puts it in.
    """

    rules: tuple[str, ...]
    put_in: Put


def _mutant(rules: str, function: Callable[..., object], old: str, new: str) -> Mutant:
    return Mutant(tuple(rules.split()), edited(function, old, new))


EARLY = (
    "self.runtime.compute().record()]",
    "self.__dict__.setdefault('early', self.runtime.compute().record())]",
)
"""The event of the first submission stands for those of all others."""


def _loads_end_with_their_requests(patch: pytest.MonkeyPatch) -> None:
    plain = Cache.abort

    def abort(self: Cache, request: Request) -> None:
        waits = [each for each in request.waits if not each.ended]
        plain(self, request)
        for transfer in waits:
            self.journal.queues[transfer.direction].remove(transfer)
            transfer.ticket.error = TransferError("nobody waits for it")
            self.journal.acknowledge(transfer)

    patch.setattr(Cache, "abort", abort)


MUTANTS = {
    "a gather does not wait for compute": _mutant(
        "B4", streams._Lane.start, "self.local.wait(event)", "pass"
    ),
    "an event is recorded too early": _mutant("B4", streams._Lane.add, *EARLY),
    "an event is recorded on the wrong stream": _mutant(
        "B4", streams._Lane.add, "self.runtime.compute().record()", "self.local.record()"
    ),
    "a backup's ring is emptied before it is filled": _mutant(
        "B3", streams._Backups.through_ring, "(slabs, full)", "(slabs, ())"
    ),
    "a backup's ring is filled before it is emptied": _mutant(
        "B3", streams._Backups.through_ring, "in part.emptied", "in ()"
    ),
    "a backup's ring is emptied at the event of its gather": _mutant(
        "B3", streams._Backups.through_ring, "part.emptied = ", "part.emptied = full; _ = "
    ),
    "a load's ring is emptied before it is filled": _mutant(
        "R7", streams._Loads.through_ring, "in full", "in ()"
    ),
    "a load's ring is filled before it is emptied": _mutant(
        "R7 L8", streams._Loads.through_ring, "(slabs, part.emptied)", "(slabs, ())"
    ),
    "a load's ring is emptied when it is full": _mutant(
        "R7 L8 B3",
        streams._Loads.through_ring,
        "part.emptied = [self.local.record()]",
        "part.emptied = full",
    ),
    "a backup is over when its first rows are gathered": _mutant(
        "B3 R7",
        streams._Lane.start,
        "return events, [",
        "events = events if self.announces_layers else events[:1]\n    return events, [",
    ),
    "a layer is announced before its copies": _mutant(
        "R7",
        streams._Lane.start,
        "dict.fromkeys(step.layers, len(events))",
        "dict.fromkeys(step.layers, 1)",
    ),
    "a layer is announced with the layer before": _mutant(
        "R7",
        streams.StreamTicket.layer_event,
        "self.layers.index(layer)]",
        "max(0, self.layers.index(layer) - 1)]",
    ),
    "a transfer is over before it ran": _mutant(
        "B3 R7 L8 B4", Journal.poll, "queue[0].ticket.done", "queue[0].ticket.events"
    ),
    "a transfer is over when a part of it is there": _mutant(
        "R7 B3",
        streams.StreamTicket.done,
        "self._look(None)",
        "self._look(None) or self._n_passed > 0",
    ),
    "the load of an aborted request gives its slots back at once": Mutant(
        ("L8", "R7"), _loads_end_with_their_requests
    ),
    "a donor is copied on a stream of its own": _mutant(
        "M8",
        DevicePool.copy_slots,
        "self._runtime.compute().copy",
        "self._runtime.stream(self._runtime.compute().purpose).copy",
    ),
}

LEGAL = {
    "every copy waits for the whole device": _mutant(
        "",
        streams._Lane.add,
        "events: list[Event] = [",
        "self.runtime.synchronize(); events: list[Event] = [",
    ),
    "a load waits twice": _mutant(
        "",
        streams._Lane.start,
        "stream.wait(event)\n",
        "stream.wait(event); stream.wait(event)\n",
    ),
    "layers are announced together": _mutant(
        "", streams.StreamTicket.layer_event, "self.ends[self.layers.index(layer)] - 1", "-1"
    ),
    "nothing is staged": _mutant("", routes.Routes._find, "if len(some) > 1", "if not some"),
    "rows are gathered and scattered on a stream of the bus": _mutant(
        "",
        streams._Lane.__init__,
        "self.local = runtime.stream(self.on_device)",
        "self.local = self.bus[0]",
    ),
}
