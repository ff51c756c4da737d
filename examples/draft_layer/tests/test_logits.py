"""A draft layer resumes with the entries of its own sequence, bit for bit.

The contract cannot see which token an entry was computed with. Logits of the draft layer can: they
are compared with those of one pass, behind prefixes that others continued with other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvgraft import Cache, Request
from kvgraft_testing import check_restored_logits

WIDTH = 4
LAYER = {"head_dim": WIDTH, "dtype": "float64"}
COMPONENTS = {name: {**LAYER, "hidden": WIDTH} for name in ("draft@model", "draft")}
"""The model's own layer takes a pool of the same package, so that the test needs no other."""


def attention(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last `len(q)` tokens, added to their input."""
    ahead = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return x + torch.softmax((q @ k.T).masked_fill(ahead, -torch.inf), -1) @ v


class Drafting:
    """A layer of full attention, and a draft layer behind it; the logits of both.

    Row j of the draft layer's is of its input (hidden state of token j - 1, token j), 0 at first.
    """

    vocabulary = 32

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(32, WIDTH, dtype=torch.float64, generator=generator)
        shape = 2, 3, WIDTH, WIDTH
        self.weights = torch.randn(shape, dtype=torch.float64, generator=generator)
        self.last = torch.zeros(0, WIDTH)

    def whole(self, tokens: Sequence[int]) -> torch.Tensor:
        """Without a cache."""
        embedded = self.embedding[torch.tensor(tokens)]
        hidden = attention(embedded, *(embedded @ self.weights[0]))
        drafting = hidden[:-1] + embedded[1:]
        drafted = attention(drafting, *(drafting @ self.weights[1]))
        return self.logits(hidden, torch.cat([torch.zeros_like(embedded[:1]), drafted]))

    def logits(self, hidden: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        """`[n_tokens, 2 * vocabulary]`."""
        return torch.cat([hidden @ self.embedding.T, drafted @ self.embedding.T], -1)

    def step(self, cache: Cache, request: Request, tokens: Sequence[int]) -> torch.Tensor:
        """Over the pools: the draft layer's inputs are the hidden states, moved on by a token."""
        start, end = request.computed, request.computed + len(tokens)
        embedded = self.embedding[torch.tensor(tokens)]
        hidden = self.layer(cache, request, "draft@model", embedded, start, 0)
        before = torch.cat([self.hidden_before(cache, request), hidden])
        drafting = before[:-1] + embedded[-len(before) + 1 :]
        first = end - len(drafting)
        drafted = self.layer(cache, request, "draft", drafting, first, 1)
        self.last = hidden[-1:]
        self.keep(cache, request, hidden)
        none = torch.zeros(len(tokens) - len(drafted), WIDTH, dtype=drafted.dtype)
        return self.logits(hidden, torch.cat([none, drafted]))

    def layer(
        self, cache: Cache, request: Request, name: str, x: torch.Tensor, start: int, leaves: int
    ) -> torch.Tensor:
        """A layer over its pool: it writes from slot `start` on, and reads none before `leaves`."""
        q, k, v = x @ self.weights[leaves]
        page = cache.config.page_size
        at = torch.arange(leaves, start + len(x))
        rows = torch.tensor(cache.table(request, name)[at // page]) * page + at % page
        pool = next(each.component.device for each in cache.mounted if each.name == name)
        keys, values = (pool.plane(0, plane).view(-1, WIDTH) for plane in "kv")
        keys[rows[start - leaves :]], values[rows[start - leaves :]] = k, v
        return attention(x, q, keys[rows], values[rows])

    def hidden_before(self, cache: Cache, request: Request) -> torch.Tensor:
        """The hidden state of the token before the next one; none at the start."""
        at, page = request.computed, cache.config.page_size
        if not at:
            return torch.zeros(0, WIDTH, dtype=torch.float64)
        if at % page:
            return self.last
        slot = int(cache.table(request, "draft")[at // page - 1])
        return self.kept_states(cache)[slot : slot + 1]

    def keep(self, cache: Cache, request: Request, hidden: torch.Tensor) -> None:
        """Keep the hidden state of each page's last token with the page."""
        start, page = request.computed, cache.config.page_size
        table = cache.table(request, "draft")
        for at in range(start, start + len(hidden)):
            if (at + 1) % page == 0:
                self.kept_states(cache)[int(table[at // page])] = hidden[at - start]

    def kept_states(self, cache: Cache) -> torch.Tensor:
        """The plane of hidden states, `[n_slots, WIDTH]`."""
        pool = next(each.component.device for each in cache.mounted if each.name == "draft")
        return pool.plane(0, "hidden")


def test_a_draft_layer_goes_on_behind_restored_prefixes_as_in_one_pass() -> None:
    report = check_restored_logits(Drafting(), COMPONENTS, n_tokens=16)
    assert not report.differences, report
    assert len(report.restored["host"]) == 3


def test_a_page_without_the_hidden_state_of_its_last_token_is_found() -> None:
    class Forgetful(Drafting):
        def keep(self, cache: Cache, request: Request, hidden: torch.Tensor) -> None:
            """Leave the pages without."""

    report = check_restored_logits(Forgetful(), COMPONENTS, n_tokens=16)
    assert report.differences
