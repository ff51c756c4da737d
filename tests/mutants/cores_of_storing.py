"""More cores with one line changed: the store behind HOST, and steps of several requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvgraft.requests.slots import took_pages
from kvgraft_storage.tier.deliveries import Deliveries
from kvgraft_storage.tier.fetching import Fetch
from kvgraft_storage.tier.prefetching import Prefetching
from kvgraft_storage.tier.storing import Storing

from .cores import CORES, CoreMutant
from .cores_held_out import edited

__all__: list[str] = []

STORED = "everything+window+stored"
"""In front of a store whose calls end when they are told to."""


def change(
    name: str, kinds: str, rules: str, function: Callable[..., Any], old: str, new: str
) -> None:
    """Register one."""
    CORES[name.replace(" ", "_")] = CoreMutant(
        tuple(kinds.split("+")), tuple(rules.split()), edited(function, old, new)
    )


change(
    "slots of a fetch given up are free at once",
    STORED,
    "S5 T9 B3 T8",
    Fetch._give_up_ticket,
    "if self.phase is Phase.LOOKING or ticket.done:",
    "if True:",
)
change(
    "delivered data is not kept for its request",
    STORED,
    "S4",
    Deliveries.keep,
    "hold_host(tree, matching.anchor_node(tree, found), found.anchor)",
    "hold_host(tree, tree.root(prefetch.key.namespace), 0)",
)
change(
    "the pins of delivered data are never let go of",
    STORED,
    "T8 L1 L2 T3",
    Deliveries.release,
    "release(self.tree, delivery.receipt)",
    "pass",
)
change(
    "data that leaves HOST is stored as zeros",
    STORED,
    "T9 B3 S9",
    Storing.leaving,
    "copy(buffers[-1], slab)",
    "pass",
)
change(
    "slots of a fetch given up are never free again",
    STORED,
    "T8",
    Prefetching.poll,
    "ledger.cancel(slots)",
    "pass",
)
change(
    "a prefetch goes on in a namespace that was cleared",
    STORED,
    "S5 T3 S10 T8",
    Prefetching.stop,
    "self._stop(fetch, reason)",
    "pass",
)
change(
    "two requests of a step get the same slots",
    "everything",
    "T9 T8 I1",
    took_pages,
    "slots[start:stop]",
    "slots[: stop - start]",
)
change(
    "a delivery that is kept again keeps its first pins",
    STORED,
    "L2 L1 T8",
    Deliveries.keep,
    "release(tree, before.receipt)",
    "pass",
)
