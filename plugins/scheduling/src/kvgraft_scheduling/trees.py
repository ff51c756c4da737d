"""Drafts that form a tree: several candidates for a position, verified in one pass with a mask.

The nodes of a request's tree take the slots of its pass in their order, a parent before its
children; the root is the token that was sampled last. The accepted path's data then moves to the
first slots, behind one another, where the tables have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from kvgraft.parts import Step

__all__ = ["Moves", "moves_of_accepted"]


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
