"""Points of the computation that the test reaches when it wants to."""

from __future__ import annotations

import threading
import time

import torch

from kvgraft import TokenKey
from kvgraft.cache import Cache
from kvgraft.policies.policy import is_left_behind
from kvgraft.tree import matching
from kvgraft.types import Tier

from ..serving.server import slots_on

__all__ = ["Broken", "GatedRows", "HeldFence", "kept_on", "pages_on", "settle"]


class HeldFence(threading.Event):
    """A fence that notes whether a worker has come to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.met = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.met.set()
        return super().wait(timeout)


class Broken:
    """A computation that failed: a copy that waits for it fails."""

    def wait(self, timeout: float | None = None) -> object:
        raise OSError("the device was lost")


class GatedRows:
    """Rows of a plane that cannot be read before a gate opens."""

    def __init__(self, rows: torch.Tensor, gate: threading.Event) -> None:
        self.rows, self.gate = rows, gate

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        assert self.gate.wait(10)
        return self.rows[index]


def kept_on(cache: Cache, tokens: list[int], component: str) -> list[int]:
    """Those of `pages_on` DEVICE that are worth a copy: not left behind without a use since."""
    tree_component, node = cache.tree.component(component), cache.tree.root(None)
    kept: list[int] = []
    path = matching.follow(cache.tree, node, TokenKey(tokens).data, len(tokens))
    for each in path.nodes:
        cell = each.cells[tree_component.index]
        if cell.device is not None and not is_left_behind(cell.stamp):
            pages = range(each.start, min(each.end, path.end))
            kept += [pages[-1]] if tree_component.is_state else pages
    return kept


def pages_on(cache: Cache, tokens: list[int], component: str, tier: Tier) -> list[int]:
    """Numbers of the pages of `tokens` that the component holds on a tier."""
    found = slots_on(cache, tokens, component, tier)
    return [page for page, slot in enumerate(found) if slot is not None]


def settle(cache: Cache) -> None:
    """Wait until all copies have ended."""
    deadline = time.monotonic() + 60
    while not cache.drain():
        assert time.monotonic() < deadline
