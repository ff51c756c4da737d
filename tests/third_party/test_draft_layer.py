"""Layers of a draft model, from a package outside: no entry is served with another's token (G5).

The engine here computes digests. An entry is right if it was computed from the hidden state of the
token before, so from all tokens up to there, and from the token of its slot.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from kvgraft import Cache, Request, TokenKey
from kvgraft.config import parse_config
from kvgraft.packages.registry import Plugin, load_plugin, select

from ..commands import ROOT
from .asking import expect_kept

EXAMPLE = ROOT / "examples" / "draft_layer"
LAYER: dict[str, Any] = {"n_kv_heads": 1, "head_dim": 1, "dtype": "float64"}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"full": {}},
    "full + swa + mamba": {"full": {}, "swa": {"window": 5}, "mamba": {"states": 40}},
}
MOST_DRAFTS = 3
FEW = 3
"""Tokens of the vocabulary: sequences part at every place of a page."""


@pytest.fixture
def draft(monkeypatch: pytest.MonkeyPatch) -> Plugin:
    monkeypatch.syspath_prepend(EXAMPLE / "src")
    return load_plugin("draft", importlib.import_module("kvgraft_draft").plugin)


def digest(*parts: int) -> int:
    """A number that float64 holds, of these in their order."""
    return hash(parts) % 2**50


class Chat(NamedTuple):
    """A request that decodes, and where its answer ends."""

    request: Request
    end: int


class Engine:
    """Requests that share prefixes decode in passes with drafts, of which some are right.

    Attributes:
        checked: entries that were compared.
        wrong: those that differed.
    """

    def __init__(self, cache: Cache, seed: int) -> None:
        self.cache, self.page = cache, cache.config.page_size
        self.draw = random.Random(seed)
        pool = next(each.component.device for each in cache.mounted if each.name == "draft")
        self.entries, self.hidden = pool.plane(0, "k").view(-1), pool.plane(0, "hidden").view(-1)
        for plane in pool.planes:
            plane[:] = -1
        self.checked = self.wrong = 0

    def row(self, request: Request, at: int) -> int:
        """The row of the slot of token number `at`."""
        return int(self.cache.table(request, "draft")[at // self.page]) * self.page + at % self.page

    def hidden_before(self, request: Request, at: int) -> int:
        """The model's hidden state of the token before: it resumes with what the page has."""
        if at == request.anchor_tokens:
            return int(self.hidden[self.row(request, at - 1) // self.page])
        return digest(*self.tokens(request)[:at])

    def tokens(self, request: Request) -> list[int]:
        """All of it so far."""
        tokens: list[int] = request.key.tokens().tolist()
        return tokens

    def write(self, request: Request, start: int, end: int) -> None:
        """The model and its draft layer compute the tokens from `start` on, before `end`."""
        tokens = self.tokens(request)
        for at in range(start, end):
            if at:
                entry = digest(self.hidden_before(request, at), tokens[at])
                self.entries[self.row(request, at)] = entry
            if (at + 1) % self.page == 0:
                self.hidden[self.row(request, at) // self.page] = digest(*tokens[: at + 1])

    def check(self, request: Request) -> None:
        """Compare all entries that the draft layer reads, and the hidden states between pages."""
        tokens = self.tokens(request)
        for at in range(1, request.computed):
            found = int(self.entries[self.row(request, at)])
            self.wrong += found != digest(digest(*tokens[:at]), tokens[at])
            self.checked += 1

    def begin(self, tokens: Sequence[int], n_tokens: int) -> Chat | None:
        request = self.cache.begin(TokenKey(tokens), reserve=n_tokens, chunk=5)
        if not self.cache.admit(request).admitted:
            self.cache.abort(request)
            return None
        self.cache.load_back(request)
        assert self.cache.drain()
        self.check(request)
        while request.computed < request.prompt:
            n = self.cache.next_chunk(request)
            assert self.cache.allocate(request, n)
            self.write(request, request.computed, request.computed + n)
            self.cache.computed(request, n)
        return Chat(request, len(tokens) + n_tokens)

    def decode(self, running: list[Chat], kept: list[int]) -> list[int]:
        """One pass of all: the drafts' entries are of wrong tokens until they are verified."""
        requests = [each.request for each in running]
        n_drafts = self.draw.randrange(MOST_DRAFTS + 1)
        step = self.cache.step(requests, n_drafts=n_drafts, n_computed=kept)
        assert not step.refused
        widths = [1] * len(running) if step.n_tokens is None else step.n_tokens.tolist()
        self.entries[step.slot_mapping["draft"][step.slot_mapping["draft"] >= 0]] = -2
        accepted = []
        for (request, end), width in zip(running, widths):
            n = min(self.draw.randint(1, width), end - request.computed)
            request.key.extend(self.draw.choices(range(FEW), k=n))
            self.write(request, request.computed, request.computed + n)
            self.check(request)
            accepted.append(n)
        return accepted

    def run(self, n_rounds: int) -> None:
        """Some prompts at a time go on from a part of an earlier sequence, with other tokens."""
        cache, draw = self.cache, self.draw
        known = [draw.choices(range(FEW), k=20)]
        for _ in range(n_rounds):
            running: list[Chat] = []
            for _ in range(3):
                stem = draw.choice(known)
                prompt = stem[: draw.randint(1, len(stem))][:40] + draw.choices(range(FEW), k=2)
                if all(self.tokens(each.request)[: len(prompt)] != prompt for each in running):
                    chat = self.begin(prompt, draw.randint(4, 12))
                    running += [chat] if chat else []
            kept = [0] * len(running)
            while running:
                kept = self.decode(running, kept)
                over = [each.request.key.n_tokens >= each.end for each in running]
                ended = [each.request for each, is_over in zip(running, over) if is_over]
                noted = [n for n, is_over in zip(kept, over) if is_over]
                if ended:
                    cache.step(ended, n_tokens=0, n_computed=noted)
                for request in ended:
                    self.check(request)
                    known.append(self.tokens(request))
                    (cache.abort if draw.random() < 0.2 else cache.finish)(request)
                kept = [n for n, is_over in zip(kept, over) if not is_over]
                running = [each for each, is_over in zip(running, over) if not is_over]
        cache.check_integrity()


class AtItsOwnPosition(Engine):
    """Writes an entry where its hidden state's token is, once the token that follows is known.

    A request that resumes takes the last entry as it is.
    """

    def write(self, request: Request, start: int, end: int) -> None:
        tokens = self.tokens(request)
        for at in range(max(start, 1), end):
            if at > request.anchor_tokens or not request.anchor_tokens:
                entry = digest(digest(*tokens[:at]), tokens[at])
                self.entries[self.row(request, at - 1)] = entry

    def check(self, request: Request) -> None:
        tokens = self.tokens(request)
        for at in range(1, request.computed):
            found = int(self.entries[self.row(request, at - 1)])
            self.wrong += found != digest(digest(*tokens[:at]), tokens[at])
            self.checked += 1


class Amending(AtItsOwnPosition):
    """The same, and a request that resumes writes the last entry anew, in the page it shares."""

    def write(self, request: Request, start: int, end: int) -> None:
        tokens = self.tokens(request)
        for at in range(max(start, 1), end):
            entry = digest(digest(*tokens[:at]), tokens[at])
            self.entries[self.row(request, at - 1)] = entry


class Trusting(Engine):
    """Keeps the entries that the draft layer wrote for drafts, from hidden states of its own."""

    def write(self, request: Request, start: int, end: int) -> None:
        super().write(request, start, end if start < request.prompt else start + 1)
        tokens = self.tokens(request)
        for at in range(start + 1, end):
            if (at + 1) % self.page == 0:
                self.hidden[self.row(request, at) // self.page] = digest(*tokens[: at + 1])


def ran(engine: type[Engine], draft: Plugin, model: str, page_size: int, seed: int) -> Engine:
    settings = {
        "components": MODELS[model] | {"draft": {**LAYER, "hidden": 1}},
        "page_size": page_size,
        "max_drafts": MOST_DRAFTS,
        "load": None,
        "device_tokens": 160,
        "host_tokens": 320,
    }
    plugins = [draft, *select(list(MODELS[model]))]
    with Cache(parse_config(settings), plugins=plugins) as cache:
        made = engine(cache, seed)
        made.run(12)
        hits = cache.stats().components["draft"].hits
    assert hits.device > 40
    assert hits.host or page_size > 1
    assert made.checked > 3000
    return made


@pytest.mark.one_in(3)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_no_entry_is_served_that_was_computed_with_another_token(
    draft: Plugin, model: str, page_size: int
) -> None:
    """G5, with drafts that are rejected, pages that others continue, evictions and loads."""
    for seed in (1, 2):
        assert ran(Engine, draft, model, page_size, seed).wrong == 0


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("engine", [AtItsOwnPosition, Amending])
def test_entries_at_the_position_of_their_hidden_state_are_found(
    draft: Plugin, engine: type[Engine], page_size: int
) -> None:
    """G5: the last entry of a shared page would have the following token of one continuation."""
    assert ran(engine, draft, "full", page_size, 1).wrong > 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_entries_of_verified_drafts_that_are_not_written_again_are_found(
    draft: Plugin, page_size: int
) -> None:
    """G5: a verified token is right, its entry is not: the model had no hidden state yet."""
    assert ran(Trusting, draft, "full", page_size, 1).wrong > 0


def test_the_package_keeps_every_clause_that_is_asked_of_hooks_and_pools() -> None:
    expect_kept(["draft"], [EXAMPLE / "src"])
