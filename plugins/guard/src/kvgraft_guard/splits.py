"""Whether a split loses nothing (T10, B5)."""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.errors import ContractViolation
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree

__all__ = ["check_split", "read_node"]


class _Cell(NamedTuple):
    """A cell before a split: the slots that are cut, and the values that both parts keep."""

    device: bytes | None
    host: bytes | None
    incoming: bytes | None
    kept: tuple[object, ...]


class Before(NamedTuple):
    """A node before it is split."""

    key: bytes
    start: int
    end: int
    hits: int
    operations: tuple[int, ...]
    hashes: bytes | None
    names: tuple[int, ...]
    cells: list[_Cell]


def read_node(node: Node) -> Before:
    """The data of a node."""
    names = node.names
    return Before(
        node.key,
        node.start,
        node.end,
        node.hits,
        tuple(id(each) for each in node.operations or ()),
        bytes(names.hashes) if names is not None else None,
        (names.wanted, names.store) if names is not None else (),
        [
            _Cell(
                cell.device,
                cell.host,
                cell.incoming.slots if cell.incoming is not None else None,
                (cell.device_pins, cell.host_pins, cell.stamp),
            )
            for cell in node.cells
        ],
    )


def check_split(tree: Tree, was: Before, upper: Node, lower: Node, at: int) -> None:
    """A split at page `at` keeps all that the node held (T10, B5)."""
    above, below = read_node(upper), read_node(lower)
    shape = (above.start, above.end, below.start, below.end, above.key + below.key)
    linked = lower.parent is upper and list(upper.each_child()) == [lower]
    if shape != (was.start, at, at, was.end, was.key) or not linked:
        raise ContractViolation("T2", None, f"a split at page {at} makes {upper!r} and {lower!r}")
    same = all(
        getattr(part, name) == getattr(was, name)
        for part in (above, below)
        for name in ("hits", "operations", "names")
    )
    hashes = (above.hashes or b"") + (below.hashes or b"")
    if not same or hashes != (was.hashes or b""):
        raise ContractViolation(
            "T10",
            None,
            f"a split at page {at} makes {upper!r} and {lower!r} of {was.hits} hits, "
            f"{len(was.operations)} transfers and {len(was.hashes or b'')} bytes of page hashes; "
            f"they have {above.hits} and {below.hits}, {len(above.operations)} and "
            f"{len(below.operations)}, {len(hashes)}",
        )
    for component, old, high, low in zip(tree.components, was.cells, above.cells, below.cells):
        if component.is_state:
            good = low == old and high[:3] == (None, None, None)
        else:
            cut = (at - was.start) * component.slots_per_page * SLOT_BYTES
            good = high.kept == low.kept == old.kept
            for mine, upper_part, lower_part in zip(old[:3], high[:3], low[:3]):
                whole = mine if isinstance(mine, bytes) else None
                parts = (None, None) if whole is None else (whole[:cut], whole[cut:])
                good = good and parts == (upper_part, lower_part)
        if not good:
            raise ContractViolation(
                "T10",
                component.name,
                f"a split at page {at} of pages [{was.start}, {was.end}) changes the data held: "
                f"pins and recency were {old.kept}, are {high.kept} and {low.kept}; slots on "
                f"DEVICE {_n(old.device)}, are {_n(high.device)} and {_n(low.device)}; on HOST "
                f"{_n(old.host)}, are {_n(high.host)} and {_n(low.host)}",
            )


def _n(slots: bytes | None) -> int:
    return len(slots or b"") // SLOT_BYTES
