"""Trees of drafts: each node has a slot; the accepted path's data goes where the tables have it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from kvgraft import Cache, ConfigError, Request
from kvgraft_scheduling import moves_of_accepted

from ..serving import life

LAYER: dict[str, Any] = {"n_kv_heads": 1, "head_dim": 1, "dtype": "float64"}
SETS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"full": LAYER},
    "full + swa": {"full": LAYER, "swa": {**LAYER, "window": 40}},
    "full + mamba": {"full": LAYER, "mamba": {"states": 24}},
}
MOST_DRAFTS = 6


def digest(tokens: list[int]) -> int:
    """A number that float64 holds, of a sequence."""
    return hash(tuple(tokens)) % 2**50


class Verifying:
    """An engine that verifies trees of drafts; an entry is a digest of the tokens up to it."""

    def __init__(self, cache: Cache, seed: int) -> None:
        self.cache, self.page = cache, cache.config.page_size
        self.draw = random.Random(seed)
        self.rows = {
            each.name: each.component.device.plane(0, "k").view(-1)
            for each in cache.mounted
            if each.name in ("full", "swa")
        }

    def write(self, request: Request, n_tokens: int) -> None:
        """A chunk of a prompt."""
        tokens = request.key.tokens().tolist()
        for name, rows in self.rows.items():
            table = self.cache.table(request, name)
            for at in range(request.computed, request.computed + n_tokens):
                rows[int(table[at // self.page]) * self.page + at % self.page] = digest(
                    tokens[: at + 1]
                )

    def check(self, request: Request) -> int:
        """Compare all entries that a request could read; how many there are."""
        tokens, checked = request.key.tokens().tolist(), 0
        for name, rows in self.rows.items():
            table = self.cache.table(request, name)
            for at in range(request.computed):
                slot = int(table[at // self.page])
                if slot >= 0:
                    found = int(rows[slot * self.page + at % self.page])
                    assert found == digest(tokens[: at + 1]), (name, at)
                    checked += 1
        return checked

    def begin(self, tokens: list[int], n_tokens: int) -> Request:
        request = life.admitted(self.cache, tokens, reserve=n_tokens)
        while request.computed < request.prompt:
            n = self.cache.next_chunk(request)
            assert self.cache.allocate(request, n)
            self.write(request, n)
            self.cache.computed(request, n)
        return request

    def grown(self, n_nodes: int) -> list[list[int]]:
        """A tree: each node's path from the root, as node numbers; its tokens are these plus 50."""
        paths = [[0]]
        while len(paths) < n_nodes:
            paths.append([*self.draw.choice(paths), len(paths)])
        return paths

    def run(self, requests: list[Request], n_passes: int) -> int:
        """Passes of several requests with trees; the moves that they needed."""
        cache, kept, n_moved = self.cache, [0] * len(requests), 0
        for _ in range(n_passes):
            step = cache.step(requests, n_drafts=MOST_DRAFTS, n_computed=kept)
            assert not step.refused
            for request in requests:
                self.check(request)
            assert step.n_tokens is not None
            accepted = []
            for place, (request, width) in enumerate(zip(requests, step.n_tokens.tolist())):
                before = request.key.tokens().tolist()
                paths = self.grown(width)
                for name, rows in self.rows.items():
                    slots = step.slot_mapping[name].view(len(requests), -1)[place]
                    for node, path in enumerate(paths):
                        rows[slots[node]] = digest([*before, *(50 + each for each in path)])
                accepted.append(self.draw.choice(paths))
                request.key.extend([50 + each for each in accepted[-1]])
            for name, (sources, targets) in moves_of_accepted(step, accepted).items():
                self.rows[name][targets] = self.rows[name][sources]
                n_moved += len(targets)
            kept = [len(path) for path in accepted]
        cache.step(requests, n_tokens=0, n_computed=kept)
        return n_moved


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", SETS)
def test_the_accepted_path_of_a_tree_is_the_requests_and_the_next_turns(
    name: str, page_size: int
) -> None:
    """G2: with windows and states, whose passes have fewer nodes; next to other requests."""
    settings: dict[str, Any] = {
        "page_size": page_size,
        "device_tokens": 1024,
        "max_drafts": MOST_DRAFTS,
    }
    with Cache.open(SETS[name], decode_interval_tokens=16, **settings) as cache:
        engine = Verifying(cache, 1)
        requests = [engine.begin([at, *range(100, 121 + at)], 60) for at in range(3)]
        assert engine.run(requests, 12) > 15
        for request in requests:
            engine.check(request)
            key = request.key
            told = cache.finish(request)
            key.extend([1] * 5)
            following = life.admitted(cache, key)
            assert following.anchor_tokens == told > 21
            assert engine.check(following) >= (told if name != "full + swa" else 40)
            cache.abort(following)
        cache.check_integrity()


def test_a_path_that_the_tree_cannot_have_is_refused() -> None:
    with Cache.open(["full"], page_size=4, device_tokens=64, max_drafts=3) as cache:
        request = life.prefilled(cache, range(9), reserve=9)
        step = cache.step([request], n_drafts=3)
        for path in ([], [1, 2], [0, 2, 1], [0, 4], [0, 0]):
            with pytest.raises(
                ConfigError, match=r"accepted\[0\]=.* is no path of a tree of 4 nod"
            ):
                moves_of_accepted(step, [path])
        for bad in (None, [0, 1.5], ["0"]):
            with pytest.raises(ConfigError, match=r"accepted: .*; give the numbers of nodes"):
                moves_of_accepted(step, [bad])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="2 accepted paths for 1 requests"):
            moves_of_accepted(step, [[0], [0]])
        sources, targets = moves_of_accepted(step, [[0, 2, 3]])["full"]
        assert (targets - step.slot_mapping["full"][0]).tolist() == [1, 2]
        assert sources.tolist() == step.slot_mapping["full"][2:].tolist()
        for nodes in (torch.tensor([0, 2, 3]), np.array([0, 2, 3])):
            assert torch.equal(moves_of_accepted(step, [nodes])["full"].sources, sources)
        assert torch.equal(moves_of_accepted(step, [[0, 1]])["full"].sources, sources[:0])
