"""A request and a tree compared whole, field by field, before and after a call (A5, A9)."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any

from kvgraft.cache import Cache
from kvgraft.compiled import fields_of
from kvgraft.requests.components import RequestComponent, RequestState
from kvgraft.requests.request import Request
from kvgraft.transfers import Transfer
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt
from kvgraft_testing.machine.judging import Judge

__all__ = ["LEASE", "check_unchanged", "pins", "plain"]

LEASE = frozenset(
    {
        *("receipt", "limited", "anchor_tokens", "device_tokens", "storage_tokens", "computed"),
        *("allocated", "host_slots", "waits", "checkpoints", "chunk", "points", "cached"),
        *("left", "last_point", "last_left", "published", "points_left_out", "root"),
        *("keeps_decoded", "draft_pages"),
    }
)
"""Fields of a request that a new match sets."""


def plain(request: Request) -> dict[str, Any]:
    """All fields and slots of a request, as comparable values."""
    # a row of the page tables holds nothing, a refused step may have read where keys were cut, and
    # a deferred request remembers that it fits
    left_out = ("components", "row", "cuts", "fits")
    own = [name for name in fields_of(Request) if not name.endswith(left_out)]
    fields = {name: _plain(getattr(request, name)) for name in own}
    for name in dict.fromkeys(("runs", *fields_of(RequestComponent), *fields_of(RequestState))):
        # the demand is the last decision's; of its pages `runs` has all
        if name not in ("component", "demand") and not name.startswith("_"):
            fields[name] = tuple(_plain(getattr(part, name, None)) for part in request.components)
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, TokenKey):
        return bytes(value.data), repr(value.namespace), value.edits
    if isinstance(value, Receipt):
        held = (value.released, value.host_from, value.locks is not None)
        return (value.anchor.ident, value.anchor.end, tuple(value.segments), *held)
    if isinstance(value, Ledger):
        return value.component, value.tier
    if isinstance(value, (Transfer, Node)):
        return id(value)
    if isinstance(value, dict):
        return tuple((key, _plain(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    slots = fields_of(type(value))
    if slots and not isinstance(value, enum.Enum):
        return tuple((name, _plain(getattr(value, name))) for name in slots)
    return value


def pins(cache: Cache) -> list[tuple[Any, ...]]:
    """Everything that holds the tree: pins, receipts and transfers of every node."""
    return [
        (
            *(node.ident, node.start, node.end, node.receipts, len(node.operations or ())),
            *((cell.device_pins, cell.host_pins, cell.incoming) for cell in node.cells),
        )
        for node in cache.tree.nodes()
    ]


def check_unchanged(
    judge: Judge,
    rule: str,
    before: dict[str, Any] | None,
    request: Request,
    name: str,
    free: Collection[str] = (),
) -> None:
    """A call that was refused left every field of the request as it was, but for those `free`."""
    if before is None:
        return
    after = plain(request)
    for field, value in before.items():
        if field not in free and after[field] != value:
            judge.fail(rule, None, f"{field} of {name} was {value}, it is {after[field]}")
            return
