"""The slots of a request as kernels index them: its page tables, and its states."""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvgraft.errors import ConfigError, LeaseError
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.request import CLOSED, Request, no_request
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.inserting import Run
from kvgraft.tree.ledger import DEVICE
from kvgraft.tree.node import Node
from kvgraft.types import Tier

from_buffer: Final[Any] = np.frombuffer
INT32: Final[Any] = np.dtype(np.int32)

NO_SLOT: Final = -1
"""The slot number for no slot."""


def _nothing(n_pages: int, component: TreeComponent) -> bytes:
    """-1 for every slot of `n_pages` pages."""
    return b"\xff" * (n_pages * component.slots_per_page * SLOT_BYTES)


def _fill_gaps(parts: list[Any], first: int, node: Node, component: TreeComponent) -> None:
    """Put -1 for nodes without data; those from `node` upwards are in `parts` from `first` on."""
    for at in range(first, len(parts)):
        if parts[at] is None:
            parts[at] = _nothing(node.end - node.start, component)
        node = node.parent  # type: ignore[assignment]


def _expect_pages(request: object, component: TreeComponent) -> Request:
    """Refuse a component of states, no requests, and one that has ended: its slots are others'."""
    if component.is_state:
        raise ConfigError(
            f"component {component.name!r} keeps states and has no page table; use state_slot"
        )
    if not isinstance(request, Request):
        raise no_request(request)
    if request.stage is CLOSED:
        raise LeaseError("request is closed and has no slots; read its table before it ends")
    return request


def state_slot(request: Request, component: TreeComponent) -> int:
    """The slot of a state component that the model writes for an admitted request."""
    part = request.state_component(component.index)
    if part is None:
        raise ConfigError(f"component {component.name!r} has no states; use table")
    if part.live is None:
        raise LeaseError(f"component {component.name!r}: no state yet; allocate first")
    return state_number(part.live)


def slot_table(
    given: object, component: TreeComponent, tier: Tier, start: int = 0
) -> npt.NDArray[np.int32]:
    """The slots that a request holds on one tier, page by page from `start` on; -1 for none.

    These are its pinned slots and its own. The tree may have data before a bounded reach; others
    may take those slots at any time, so they are not in the table.

    Raises:
        LeaseError: the request has ended, or is none.
        ConfigError: a component of states.
    """
    #   start ─── above ───────── anchor ──────────── allocated
    #        -1 ... │ pinned cells   │ its own runs, -1 between them
    #               │ own runs where it reads its own pages, though the tree has some (`beside`)
    request = _expect_pages(given, component)
    on_device, index = tier is DEVICE, component.index
    runs = request.components[index].runs
    parts: list[Any] = []
    append = parts.append
    node = request.receipt.anchor
    page = above = node.end
    if start:
        start = min(start, request.allocated)
    first = min(start, above)
    for low, high in reversed(request.receipt.segments[index]):
        if above <= first:
            break
        while node.end > high:
            node = node.parent  # type: ignore[assignment]
        if node.end < above:
            parts.append(_nothing(above - node.end, component))
        low = max(low, first)  # noqa: PLW2901
        below, n_parts = node, len(parts)
        if on_device:
            while node.end > low:
                append(node.cells[index].device)
                node = node.parent  # type: ignore[assignment]
        while node.end > low:
            append(node.cells[index].host)
            node = node.parent  # type: ignore[assignment]
        if None in parts:
            _fill_gaps(parts, n_parts, below, component)
        above = node.end
    if above > first:
        parts.append(_nothing(above - first, component))
        above = first
    parts.reverse()
    beside: list[Run] = []
    for run in runs:
        slots = run.device if on_device else run.host
        if slots is None:
            continue
        if run.first < page:
            # Published only for wider components, or by another request: it reads its own.
            beside.append(run)
            continue
        if run.first > page:
            parts.append(_nothing(run.first - page, component))
        parts.append(slots)
        page = run.end
    if page < request.allocated:
        parts.append(_nothing(request.allocated - page, component))
    joined = b"".join(parts)
    # From page `above` on; a node or a run may begin before `start`.
    left_out = (start - above) * component.slots_per_page
    if not beside:
        return from_buffer(joined, INT32, -1, left_out * SLOT_BYTES)  # type: ignore[no-any-return]
    return _with_own(joined, beside, above, component, on_device=on_device)[left_out:]


def _with_own(
    joined: bytes, beside: list[Run], above: int, component: TreeComponent, *, on_device: bool
) -> npt.NDArray[np.int32]:
    """A table from page `above` on, with a request's own slots where the tree has others."""
    table = np.frombuffer(bytearray(joined), dtype=np.int32)
    for run in beside:
        slots = run.device if on_device else run.host
        assert slots is not None
        place = (run.first - above) * component.slots_per_page
        skipped = max(0, -place)
        own = np.frombuffer(slots, dtype=np.int32)[skipped:]
        table[place + skipped : place + skipped + len(own)] = own
    table.flags.writeable = False
    return table


def state_number(slot: bytes | None) -> int:
    """The number of a state's slot; -1 for none."""
    return NO_SLOT if slot is None else int.from_bytes(slot, sys.byteorder)
