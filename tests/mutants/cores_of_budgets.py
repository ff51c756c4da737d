"""More cores with one defect each: boundaries between pools that move (K7)."""

from __future__ import annotations

from kvgraft_arena import extents, holders, moving, resizing

from .cores import mutant
from .cores_held_out import Defect, edited

__all__ = ["BUDGET_DEFECTS"]

MOVE = moving.Mover._move
PLACES = moving.Mover._places

BUDGET_DEFECTS: dict[str, tuple[tuple[str, ...], Defect]] = {
    "data_that_moves_leaves_its_bytes": (
        ("T9", "M8", "M7", "K7", "B3"),
        edited(MOVE, "pool.memory.copy_slots(source, target)", "pass"),
    ),
    "a_running_request_keeps_its_old_pages": (
        ("K7", "T9", "I4"),
        edited(moving._put_run, "run.end, slots,", "run.end, run.device,"),
    ),
    "a_running_request_keeps_its_old_state": (
        ("K7", "T9", "M8"),
        edited(moving._in_request, "partial(setattr, part, name)", "lambda slots: None"),
    ),
    "the_last_state_of_a_decode_stays_in_its_place": (
        ("K7",),
        edited(
            moving._in_request,
            '(("live", part.live), ("tracked", part.tracked))',
            '(("live", part.live),)',
        ),
    ),
    "a_shrink_asks_nobody": (
        ("K7", "A12", "A7"),
        edited(
            extents.ArenaPool.may_give,
            "self.leased > 1 and self.ledger.headroom >= self.extent",
            "self.leased > 1",
        ),
    ),
    "an_extent_goes_though_less_than_it_is_free": (
        ("K7", "A12"),
        edited(
            extents.ArenaPool.may_give,
            "self.leased > 1 and self.ledger.headroom >= self.extent",
            "self.leased > 1 and self.ledger.headroom > 0",
        ),
    ),
    "slots_that_close_cost_no_headroom": (
        ("A12", "A7", "A8", "K7"),
        edited(
            resizing.MovableLedger.headroom,
            " - allocator.closing",
            "",
        ),
    ),
    "an_extent_is_leased_twice": (
        ("K7",),
        edited(extents.Arena.step, "giver.leased -= 1", "pass"),
    ),
    "the_allocator_gives_a_closed_slot": (
        ("K7", "T9", "T8"),
        edited(resizing.ResizableAllocator.close, "if n_stacked:", "if False:"),
    ),
    "pinned_pages_stay_behind": (
        ("K7",),
        edited(
            PLACES,
            "if node.operations is None:",
            "if node.operations is None and not node.receipts:",
        ),
    ),
    "an_extent_leaves_with_live_slots": (
        ("K7", "T9"),
        edited(
            extents.Arena.step,
            "if giver.allocator.closing:\n        return",
            "if giver.allocator.closing:\n        pass",
        ),
    ),
    "slots_of_a_transfer_move": (
        ("L8", "B3", "B5", "T9", "K7", "R5", "T8"),
        edited(PLACES, "if node.operations is None:", "if True:"),
    ),
    "a_split_is_not_followed": (
        ("K7", "T9"),
        edited(holders.SlotHolders.split, "if slots is not None:", "if False:"),
    ),
}
"""Per defect, the rules that a report may name, and what puts it in."""


BY_TESTS = (
    "a_running_request_keeps_its_old_pages",
    "a_running_request_keeps_its_old_state",
    "the_last_state_of_a_decode_stays_in_its_place",
    "slots_that_close_cost_no_headroom",
    "an_extent_leaves_with_live_slots",
    "slots_of_a_transfer_move",
    "a_split_is_not_followed",
)
"""Defects that few examples of the machine reach; `tests/arena/test_defects.py` finds them all."""

for name, (rules, put_in) in BUDGET_DEFECTS.items():
    put_in.__name__ = name
    if name not in BY_TESTS:
        mutant("everything+state+share", *rules)(put_in)
