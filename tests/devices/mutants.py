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
from kvgraft_accelerator import streams

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
    "a backup does not wait for compute": _mutant(
        "B4", streams._Backups.start, "for event in behind:", "for event in ():"
    ),
    "a gather does not wait for compute": _mutant(
        "B4", streams._Backups.start, "self._gathers.wait(event)", "pass"
    ),
    "a load does not wait for compute": _mutant(
        "B4", streams._Loads.start, "self.stream.wait(event)", "pass"
    ),
    "an event is recorded too early": _mutant("B4", streams._Lane.add, *EARLY),
    "an event is recorded on the wrong stream": _mutant(
        "B4", streams._Lane.add, "self.runtime.compute().record()", "self.stream.record()"
    ),
    "the ring is emptied before it is filled": _mutant(
        "B3", streams._Backups._copy_slab, "self.stream.wait(full)", "pass"
    ),
    "the ring is filled before it is emptied": _mutant(
        "B3", streams._Backups._copy_slab, "self._gathers.wait(part.emptied)", "pass"
    ),
    "the ring is emptied at the event of its gather": _mutant(
        "B3", streams._Backups._copy_slab, "(part.emptied,) = ", "part.emptied = full; _ = "
    ),
    "a backup is over when it is gathered": _mutant(
        "B3 R7",
        streams._Backups.start,
        "[*[self.stream.record()] * len(ticket.layers), *parts]",
        "[self._gathers.record()] * len(ticket.layers)",
    ),
    "a layer is announced before its copies": _mutant(
        "R7",
        streams._Loads.start,
        "return _copy(self.stream, ticket)",
        "return [self.stream.record()] * len(ticket.layers) + _copy(self.stream, ticket)",
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
    "a transfer is over when its first layer is there": _mutant(
        "R7 B3",
        streams.StreamTicket.done,
        "self._look(None)",
        "self._look(None) or self.layers_done > 0",
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
        streams._Loads.start,
        "self.stream.wait(event)",
        "self.stream.wait(event); self.stream.wait(event)",
    ),
    "layers are announced together": _mutant(
        "", streams.StreamTicket.layer_event, "self.layers.index(layer)]", "-1]"
    ),
    "nothing is gathered": _mutant("", streams._Backups.start, "slabs is None", "True"),
    "rows are gathered on the stream of the copies": _mutant(
        "", streams._Backups._copy_slab, "self._gathers.copy", "self.stream.copy"
    ),
}
