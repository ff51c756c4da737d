"""A request's slots in the order of its pages, as kernels index them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvgraft.errors import LeaseError
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.request import Request, Stage, no_request
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.inserting import Run
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier

__all__ = ["RequestTables"]


def _nothing(n_pages: int, component: TreeComponent) -> bytes:
    """-1 for every slot of `n_pages` pages."""
    return b"\xff" * (n_pages * component.slots_per_page * SLOT_BYTES)


def _expect_open(request: Request) -> None:
    """Refuse one that has ended: its slots may be others' by now."""
    try:
        closed = request.stage is Stage.CLOSED
    except AttributeError:
        raise no_request(request) from None
    if closed:
        raise LeaseError("request is closed and has no slots; read its table before it ends")


class RequestTables:
    """Tables and states that an engine reads; the part of `Cache` that changes nothing."""

    tree: Tree

    def _expect(self, request: Request, stage: Stage) -> None:
        raise NotImplementedError

    def table(self, request: Request, component: str) -> npt.NDArray[np.int32]:
        """The request's DEVICE slots of a paged component, int32 `[n_pages * slots_per_page]`.

        -1 where it holds none, such as behind a window. Raises `LeaseError` once it has ended.
        """
        return _table(request, self.tree.component(component), Tier.DEVICE)

    def host_table(self, request: Request, component: str) -> npt.NDArray[np.int32]:
        """The request's HOST slots of a component at home there, int32 `[n_pages]`."""
        return _table(request, self.tree.component(component), Tier.HOST)

    def private_slots(self, request: Request, component: str) -> tuple[bytes, ...]:
        """Slots of a component's private pools, in their order: the request's until it ends (H8).

        Each is int32 `[n]` as bytes, taken at admission; `restart` takes them back too.

        Raises:
            LeaseError: the request is not admitted, or has ended.
        """
        self._expect(request, Stage.ADMITTED)
        return request.parts[self.tree.component(component).index].private

    def state_slot(self, request: Request, component: str) -> int:
        """The slot of a state component that the model writes for this request."""
        self._expect(request, Stage.ADMITTED)
        part = request.state_part(self.tree.component(component).index)
        if part is None or part.live is None:
            raise LeaseError(f"component {component!r}: no state yet; allocate first")
        return int.from_bytes(part.live, "little")


def _table(request: Request, component: TreeComponent, tier: Tier) -> npt.NDArray[np.int32]:
    """Slots on one tier, page by page; -1 for none."""
    _expect_open(request)
    on_device = tier is Tier.DEVICE
    runs = request.parts[component.index].runs
    parts: list[bytes] = []
    node = request.receipt.anchor
    page = node.end
    while node.parent is not None:
        cell = node.cells[component.index]
        slots = cell.device if on_device else cell.host
        parts.append(slots if slots is not None else _nothing(node.end - node.start, component))
        node = node.parent
    parts.reverse()
    beside: list[Run] = []
    for run in runs:
        slots = run.device if on_device else run.host
        if slots is None:
            continue
        if run.first < page:
            # Published of wider components only, or another request's: its own are what it reads.
            beside.append(run)
            continue
        if run.first > page:
            parts.append(_nothing(run.first - page, component))
        parts.append(slots)
        page = run.end
    if page < request.allocated:
        parts.append(_nothing(request.allocated - page, component))
    joined = b"".join(parts)
    if not beside:
        return np.frombuffer(joined, dtype=np.int32)
    table = np.frombuffer(bytearray(joined), dtype=np.int32)
    for run in beside:
        slots = run.device if on_device else run.host
        assert slots is not None
        first = run.first * component.slots_per_page
        table[first : first + len(slots) // SLOT_BYTES] = np.frombuffer(slots, dtype=np.int32)
    table.flags.writeable = False
    return table
