"""The rules the guard checks while a cache serves, and what it looks at.

`docs/guard.md` shows the same list, and a test compares the two. What no rule's id stands for here
is checked elsewhere: see `docs/contract.md`.
"""

from __future__ import annotations

__all__ = ["GUARDED"]

GUARDED: dict[str, str] = {
    "T1": "Roots are as they were made; recomputed by every full check.",
    "T2": "Nodes and their parents list each other, and keys are whole pages; by every full check.",
    "T3": "No dead node stands; by every full check.",
    "T4": "Data of a contained reach lies on the containing one's; by every full check.",
    "T5": "Prefix-closed data has no gap above it; by every full check.",
    "T6": "Pins are not negative, the base's at least any contained one's; by every full check.",
    "T7": "Candidates and live counts equal their definition; by every full check.",
    "T8": "Every ledger balances after every operation; it equals the tree at every full check.",
    "T9": "A request's slots change only in its own operations; one owner by every full check.",
    "T10": "Nodes keep the transfers they wait for; by every full check.",
    "T11": "A match is anchored in its own namespace's tree.",
    "M1": "The anchor's path ends in the request's tokens, and its data is on some tier.",
    "M2": "The anchor is page aligned and leaves a token to compute.",
    "M3": "The device anchor is at most the anchor, and what is needed up to it is on DEVICE.",
    "M4": "A load-back takes no more slots than the match said.",
    "M5": "`finalize_match_result` answers a page up to the anchor and captures ahead of it.",
    "M6": "A match changes no pool but for pins, and adds nodes only by splits.",
    "M7": "After an eviction, leases that are looked at still have their data.",
    "M8": "A request's live state is not the one its anchor holds.",
    "I2": "Data leaves the tree's pools only as it is counted as evicted.",
    "I6": "What is cached or shared is a page boundary, and at most what was computed.",
    "I8": "A failed operation leaves ledgers balanced, and as they were if nothing was done yet.",
    "L1": "A segment is released as it was acquired; nothing is pinned when nobody is left.",
    "L2": "A segment is released once.",
    "L3": "What a lease needs is pinned.",
    "L5": "Making room takes nothing that is in flight.",
    "L7": "A bounded reach pins at most itself and a page.",
    "L8": "A transfer holds pins, or the slots it moves.",
    "E1": "Making room takes nothing that is pinned.",
    "E2": "Room is made for what an operation needs, where it is short, until there is enough.",
    "E3": "Making room takes only contained components along, unless prefix-closed data is gone.",
    "E5": "Making room on HOST changes nothing on DEVICE, but for components at home on HOST.",
    "E6": "Evictions return and count what became free, and are short only if nothing was left.",
    "B1": "What a backup publishes does not hang below a gap.",
    "B2": "A backup covers all components of its node, and all their slots and planes.",
    "B3": "Copies write the transfer's own rows, each once, and are published when they ended.",
    "R1": "A load-back leaves out nothing that the request's reaches lack.",
    "R2": "A transfer is committed or aborted once; one that failed leaves nothing in flight.",
    "R3": "A load-back makes room for its own slots, in its own pools.",
    "R5": "A load-back copies every slot, and what it delivered is on DEVICE before it is used.",
    "R7": "A copy names the layer it writes.",
    "A1": "What was demanded is promised, and an allocation takes what its pages need.",
    "A3": "A demand holds the next step and the host hits, once.",
    "A4": "The demand of a bounded reach is bounded by it and the step.",
    "A5": "Asking for a chunk, and an allocation that is refused, change nothing.",
    "A6": "A chunk is no larger than asked for; one made smaller is whole pages.",
    "A7": "An admitted request gets its load-back, its chunks and its slots.",
    "A8": "Who is not admitted hears which pools are short; who never fits would not fit alone.",
    "A9": "A rejection leaves ledgers as they were, and a budget takes nothing.",
    "A10": "A request is promised a state of its own, and has one before it runs.",
    "A12": "Promises never exceed free and evictable slots, and change only by their owners.",
    "H4": "HOST slots of a running request are pinned.",
    "H8": "What a request owned and was promised comes back at its end.",
}
"""By rule, what must hold for the guard to be silent."""
