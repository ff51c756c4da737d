"""A request's slots in the order of its pages, as kernels index them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvgraft.errors import LeaseError
from kvgraft.request import Request, Stage
from kvgraft.slots import SLOT_BYTES
from kvgraft.tree.track import Track

__all__ = ["device_table", "host_table"]


def _nothing(n_pages: int, track: Track) -> bytes:
    """-1 for every slot of `n_pages` pages."""
    return b"\xff" * (n_pages * track.slots_per_page * SLOT_BYTES)


def _expect_open(request: Request) -> None:
    """Refuse one that has ended: its slots may be others' by now."""
    if request.stage is Stage.CLOSED:
        raise LeaseError("request is closed and has no slots; read its table before it ends")


def device_table(request: Request, track: Track) -> npt.NDArray[np.int32]:
    """DEVICE slots of a paged component, int32 `[n_pages * slots_per_page]`; -1 for none."""
    _expect_open(request)
    parts: list[bytes] = []
    node = request.receipt.anchor
    while node.parent is not None:
        slots = node.cells[track.index].device
        parts.append(slots if slots is not None else _nothing(node.end - node.start, track))
        node = node.parent
    parts.reverse()
    page = request.receipt.anchor.end
    for run in request.runs[track.index] if request.runs else ():
        if run.first > page:
            parts.append(_nothing(run.first - page, track))
        parts.append(run.device)
        page = run.end
    return np.frombuffer(b"".join(parts), dtype=np.int32)


def host_table(request: Request, track: Track) -> npt.NDArray[np.int32]:
    """HOST slots of a component at home there, int32 `[n_pages * slots_per_page]`; -1 for none."""
    _expect_open(request)
    parts: list[bytes] = []
    node = request.receipt.anchor
    while node.parent is not None:
        slots = node.cells[track.index].host
        parts.append(slots if slots is not None else _nothing(node.end - node.start, track))
        node = node.parent
    parts.reverse()
    page = request.receipt.anchor.end
    for run in request.runs[track.index] if request.runs else ():
        if run.host is None:
            continue
        if run.first > page:
            parts.append(_nothing(run.first - page, track))
        parts.append(run.host)
        page = run.end
    return np.frombuffer(b"".join(parts), dtype=np.int32)
