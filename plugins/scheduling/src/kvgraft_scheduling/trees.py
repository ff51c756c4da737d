"""Drafts that form a tree: several candidates for a position, verified in one pass with a mask.

The nodes of a request's tree take the slots of its pass in their order, a parent before its
children; the root is the token that was sampled last. The accepted path's data then moves to the
first slots, behind one another, where the tables have it.

A tree is given as its nodes' parents: of each node the number of its parent, -1 of the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from kvgraft.parts import Step

__all__ = ["Moves", "Subtree", "best_subtree", "moves_of_accepted", "tree_mask"]

ROOT = -1
"""The parent of a root."""


class Subtree(NamedTuple):
    """Some nodes of a tree.

    Attributes:
        nodes: their numbers in the tree, ascending; the root, 0, is the first.
        parents: of each of them its parent's place in `nodes`; -1 of the root.
    """

    nodes: list[int]
    parents: list[int]


def tree_mask(parents: Any) -> torch.Tensor:
    """The nodes that each node of a tree reads: its ancestors and itself.

    A node's position is the root's plus `mask.sum(-1) - 1`.

    Args:
        parents: int `[n]`, or `[n_requests, n]` of several trees; -1 of padding too, which nothing
            else reads.

    Returns:
        Bool `[n, n]` or `[n_requests, n, n]`, true at `[..., i, j]` if node i reads node j.

    Raises:
        ConfigError: parents of another shape, or with numbers that are no earlier nodes.
    """
    rows = _parents(parents, 1, 2)
    n = rows.shape[-1]
    mask = np.broadcast_to(np.eye(n, dtype=np.bool_), (*rows.shape, n)).copy()
    for node in range(1, n):
        above = rows[..., node]
        read = np.take_along_axis(mask, np.maximum(above, 0)[..., None, None], -2)[..., 0, :]
        mask[..., node, :] |= read & (above >= 0)[..., None]
    return torch.from_numpy(mask)


def best_subtree(parents: Any, scores: Sequence[float], n_nodes: int) -> Subtree:
    """The part of a tree that a pass of fewer slots verifies, such as one ahead of a kept state.

    From the root on, the node with the best score of those whose parent is taken is taken next.

    Args:
        parents: int `[n]`.
        scores: of each node; the larger, the likelier it is that the path up to it is accepted.
        n_nodes: most nodes that are kept, at least 1: `step.n_tokens` of the request.

    Raises:
        ConfigError: another number of scores than of parents, or parents that `tree_mask` refuses.
    """
    above = _parents(parents, 1, 1).tolist()
    try:
        ranks = np.asarray(scores, np.float64)
        n_kept = index(n_nodes)
    except (TypeError, ValueError):
        ranks, n_kept = np.empty(0), 0
    if ranks.shape != (len(above),) or n_kept < 1 or np.isnan(ranks).any():
        raise ConfigError(
            f"{scores!r:.40}: scores of {len(above)} nodes, of which {n_nodes!r:.20} are kept; "
            "give a number for each, and keep the root"
        )
    children: list[list[int]] = [[] for _ in above]
    for node, parent in enumerate(above[1:], 1):
        if parent != ROOT:
            children[parent].append(node)
    taken: list[int] = []
    waiting = [(0.0, 0)]
    while waiting and len(taken) < n_kept:
        _, node = heappop(waiting)
        taken.append(node)
        for child in children[node]:
            heappush(waiting, (-float(ranks[child]), child))
    nodes = sorted(taken)
    places = {node: place for place, node in enumerate(nodes)}
    return Subtree(nodes, [places.get(above[node], ROOT) for node in nodes])


def _parents(parents: Any, *n_dims: int) -> npt.NDArray[np.int64]:
    """The parents of one or several trees' nodes, each before its children.

    Raises:
        ConfigError: they are none.
    """
    try:
        given = np.asarray(parents)
    except (TypeError, ValueError):  # rows of several lengths, tensors on a device
        given = np.array(None)
    n = given.shape[-1] if given.ndim in n_dims else 0
    if not n or given.dtype.kind not in "iu" or (given < ROOT).any() or (given >= range(n)).any():
        raise ConfigError(
            f"parents {parents!r:.60} are none of a tree; give of each node, 0 being the root, "
            "the number of an earlier one, or -1, in an array on the CPU"
        )
    return given.astype(np.int64)


class Moves(NamedTuple):
    """Rows of a pool that move: gather all before scattering any.

    Attributes:
        sources: int64 `[n]`, `slot * page_size + offset`.
        targets: int64 `[n]`, likewise.
    """

    sources: torch.Tensor
    targets: torch.Tensor


def moves_of_accepted(step: Step, accepted: Sequence[Iterable[Any]]) -> dict[str, Moves]:
    """The moves after which the accepted nodes of a pass are where a sequence has them.

    `rows[targets] = rows[sources]` makes them, over the rows of each plane that has one for a token
    (`plane.flatten(0, 1)`); planes with a row for a page, and rows on HOST, are the component's.
    Then the keys take the path's tokens, and the next step's `n_computed` is its length.

    Args:
        step: the pass, of `n_drafts`; a tree has no more nodes than `step.n_tokens` says.
        accepted: for each request of it, the path's nodes from the root, 0, on, by their number;
            sequences, arrays or tensors of integers.

    Returns:
        By paged component with a slot mapping; without nodes that stay where they are.

    Raises:
        ConfigError: another number of paths, or one that is none: it does not begin with the root,
            has a child before its parent, or a node that the pass left out.
    """
    n_requests = len(step.requests)
    if len(accepted) != n_requests:
        raise ConfigError(f"{len(accepted)} accepted paths for {n_requests} requests; give as many")
    try:
        paths = [[index(node) for node in path] for path in accepted]
    except TypeError as error:
        raise ConfigError(f"accepted: {error}; give the numbers of nodes") from None
    widths = [1] * n_requests if step.n_tokens is None else step.n_tokens.tolist()
    for at, (path, width) in enumerate(zip(paths, widths)):
        rises = all(low < high for low, high in pairwise(path))
        if not path or path[0] or not rises or path[-1] >= width:
            raise ConfigError(
                f"accepted[{at}]={path} is no path of a tree of {width} nodes; begin with 0, "
                "the root, and number children behind their parents"
            )
    lengths = np.array([len(path) for path in paths], np.int64)
    nodes = np.array([node for path in paths for node in path], np.int64)
    places = np.arange(len(nodes)) - (lengths.cumsum() - lengths).repeat(lengths)
    moves: dict[str, Moves] = {}
    for name, mapping in step.slot_mapping.items():
        first = (np.arange(n_requests) * (len(mapping) // max(1, n_requests))).repeat(lengths)
        sources, targets = mapping[first + nodes], mapping[first + places]
        move = (sources != targets) & (targets >= 0)
        moves[name] = Moves(sources[move], targets[move])
    return moves
