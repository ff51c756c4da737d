"""For an engine's loop over a cache: all running requests at once, and waiting ones.

stepping       one step of all running requests, between two passes of the model
rows           their page tables and lengths, as attention kernels index them, and how far each goes
               before a step has more to do than to count its tokens
device_tables  the same tables and lengths on a device
slot_copies    copies within a pool that the engine makes, composed
engine_slots   slots that an engine takes and fills before a request adopts them
trees          drafts with several candidates for a position
pending        pages that a running request computes and a waiting one could resume from
waiting        the order in which waiting requests are tried
sessions       conversations whose requests stay open between turns
ready          waiting on asyncio for copies
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgraft_scheduling.device_tables import DeviceTables
    from kvgraft_scheduling.engine_slots import EngineSlots
    from kvgraft_scheduling.sessions import KeptSession, KeptSessions
    from kvgraft_scheduling.slot_copies import SlotCopies
    from kvgraft_scheduling.trees import Moves, Subtree, best_subtree, moves_of_accepted, tree_mask
    from kvgraft_scheduling.waiting import WaitingPlace, WaitingQueue

_LAZY = {
    "DeviceTables": "device_tables",
    "EngineSlots": "engine_slots",
    "KeptSession": "sessions",
    "KeptSessions": "sessions",
    "Moves": "trees",
    "SlotCopies": "slot_copies",
    "Subtree": "trees",
    "WaitingPlace": "waiting",
    "WaitingQueue": "waiting",
    "best_subtree": "trees",
    "moves_of_accepted": "trees",
    "tree_mask": "trees",
}
"""Loaded when they are used: not every engine needs the queue or tables on a device."""

__all__ = [
    "DeviceTables",
    "EngineSlots",
    "KeptSession",
    "KeptSessions",
    "Moves",
    "SlotCopies",
    "Subtree",
    "WaitingPlace",
    "WaitingQueue",
    "best_subtree",
    "moves_of_accepted",
    "tree_mask",
]


def __getattr__(name: str) -> Any:
    """A public name.

    Raises:
        AttributeError: there is none of that name.
    """
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
