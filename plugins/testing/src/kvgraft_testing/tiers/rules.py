"""The rules of tiers and stores below an engine: their ids and texts.

They are not the contract of kvgraft's components: an engine relies on each of them, whoever wrote
the tier.
"""

from __future__ import annotations

__all__ = ["TIER_RULES"]

TIER_RULES = {
    "O1": "A page that is found has the bytes that were stored under its key.",
    "O2": "A damaged page is never loaded as a good one.",
    "O3": "A killed process leaves pages that are whole or missing, and a tier that opens.",
    "O4": "Jobs, threads and processes that use the tier at once get the right pages.",
    "O5": "The tier keeps to its capacity; a full disk damages nothing.",
    "O6": "A page that hangs holds up no other.",
    "O7": "Pages stored before an orderly restart are found after it.",
    "O8": "Pages of another memory layout are not found.",
    "O9": "Pages of another model, rank or tenant are not found.",
    "O10": "Each job ends once; a page that cannot be loaded is a miss in the end.",
    "O11": "Shutdown and drain end while jobs are in flight; memory is not touched afterwards.",
}
"""Each rule's sentence, by id."""
