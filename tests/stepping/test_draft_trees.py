"""Trees of drafts: each node has a slot; the accepted path's data goes where the tables have it."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from kvgraft import Cache, ConfigError, Request
from kvgraft_scheduling import best_subtree, moves_of_accepted, tree_mask

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


def rows_of(cache: Cache, request: Request, n_tokens: int) -> torch.Tensor:
    """Where a request's first tokens have their keys and values."""
    size, at = cache.config.page_size, np.arange(n_tokens)
    return torch.from_numpy(
        cache.table(request, "full")[at // size].astype(np.int64) * size + at % size
    )


def attended(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The output of one token that reads all of these."""
    return torch.softmax(keys @ query, 0) @ values


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_pass_with_the_mask_of_a_tree_computes_each_path_as_a_sequence(page_size: int) -> None:
    """Several requests with trees of several sizes in one batch, by PyTorch's own attention."""
    draw, noise = random.Random(page_size), torch.Generator().manual_seed(1)
    entries, positions = torch.randn(2, 200, 8, dtype=torch.float64, generator=noise)
    n_prompt = 21
    layer = {"n_kv_heads": 1, "head_dim": 8, "dtype": "float64"}
    with Cache.open({"full": layer}, page_size=page_size, device_tokens=512, max_drafts=9) as cache:
        keys, values = (
            cache.mounted[0].component.device.plane(0, name).view(-1, 8) for name in "kv"
        )
        requests = [
            life.admitted(cache, [at, *range(100, 99 + n_prompt)], reserve=20) for at in range(3)
        ]
        for request in requests:
            assert cache.allocate(request, n_prompt)
            rows = rows_of(cache, request, n_prompt)
            keys[rows] = values[rows] = (
                entries[request.key.tokens().tolist()] + positions[:n_prompt]
            )
            cache.computed(request, n_prompt)
        step = cache.step(requests, n_drafts=9)
        trees = [[-1, *(draw.randrange(node) for node in range(1, n))] for n in (10, 6, 1)]
        mask = tree_mask([[*tree, *[-1] * (10 - len(tree))] for tree in trees])
        assert torch.equal(mask[1, :6, :6], tree_mask(trees[1]))
        assert torch.equal(mask[1, 6:], torch.eye(10, dtype=torch.bool)[6:])
        for place, (request, tree) in enumerate(zip(requests, trees)):
            depths = mask[place].sum(-1) - 1
            nodes = entries[50 : 50 + len(tree)] + positions[n_prompt + depths[: len(tree)]]
            slots = step.slot_mapping["full"].view(3, -1)[place]
            keys[slots[: len(tree)]] = values[slots[: len(tree)]] = nodes
            rows = torch.cat([rows_of(cache, request, n_prompt), slots])
            reads = torch.cat([torch.ones(10, n_prompt, dtype=torch.bool), mask[place]], 1)
            found = torch.nn.functional.scaled_dot_product_attention(
                torch.cat([nodes, torch.zeros(10 - len(tree), 8)])[None],
                keys[rows][None],
                values[rows][None],
                attn_mask=reads[None],
                scale=1.0,
            )[0]
            for node in range(len(tree)):
                path = [node]
                while tree[path[0]] >= 0:
                    path.insert(0, tree[path[0]])
                alone = torch.cat(
                    [
                        entries[request.key.tokens().tolist()] + positions[:n_prompt],
                        entries[[50 + each for each in path]]
                        + positions[n_prompt : n_prompt + len(path)],
                    ]
                )
                assert torch.allclose(found[node], attended(alone[-1], alone, alone))


def test_the_best_subtree_is_the_best_of_all_that_have_the_root() -> None:
    draw = random.Random(0)
    for _ in range(60):
        n = draw.randrange(1, 8)
        parents = [-1, *(draw.randrange(node) for node in range(1, n))]
        scores = [1.0]
        for parent in parents[1:]:  # of paths: no node's is above its parent's
            scores.append(scores[parent] * draw.random())
        for most in range(1, n + 2):
            found = best_subtree(parents, scores, most)
            closed = [
                chosen
                for chosen in itertools.combinations(range(n), min(most, n))
                if 0 in chosen and all(parents[node] in (-1, *chosen) for node in chosen)
            ]
            best = max(closed, key=lambda chosen: sum(scores[node] for node in chosen))
            assert found.nodes == list(best)
            own = tree_mask(parents)[found.nodes][:, found.nodes]
            assert torch.equal(tree_mask(found.parents), own)


def test_the_best_subtree_has_no_node_without_its_parent() -> None:
    """Also where a child has the better score."""
    assert best_subtree([-1, 0, 0, 1], [0, 0.1, 0.5, 0.9], 3) == ([0, 1, 2], [-1, 0, 0])


def test_parents_that_no_tree_has_are_refused() -> None:
    for bad in ([], [0], [-1, 1], [-1, -2], [[[-1]]], "x", [-1, 0.5], [[-1, 0], [-1]], None):
        with pytest.raises(ConfigError, match=r"parents .* are none of a tree; give of each node"):
            tree_mask(bad)
    with pytest.raises(ConfigError, match="are none of a tree"):
        best_subtree([[-1]], [1], 1)
    wrong: list[tuple[Any, Any]] = [([1], 2), ([1, 1], 0), ([1, math.nan], 2), (["a", "b"], 1)]
    for scores, n in [*wrong, ([1, 1], 1.5), (None, 1)]:
        with pytest.raises(ConfigError, match=r"scores of 2 nodes, of which .* are kept"):
            best_subtree([-1, 0], scores, n)
