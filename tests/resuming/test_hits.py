"""Hybrids hit as deep as an oracle with unlimited memory says, for all shapes (I9, I10).

The oracle knows sequences of tokens, the points of each request, and nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from kvgraft import Cache, Chunk, ChunkedLocal, Leading, Reach, Trailing
from kvgraft.config import parse_config
from kvgraft.packages.registry import Plugin, load_plugin

from ..serving import life
from ..serving.components import PagedPackage

SINKS = PagedPackage("sinks", Reach(Leading(5), Trailing(100)))
CHUNKED = PagedPackage("chunked", Reach(ChunkedLocal(192)))
TRAILED = PagedPackage("trailed", Reach(Chunk(128), Trailing(40)))
PLUGINS: list[Plugin] = [
    load_plugin(package.name, package) for package in (SINKS, CHUNKED, TRAILED)
]
SMALL: dict[str, Any] = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 2}
TOKENS = 40_000
DECODE_PAGES = 3
"""Pages between two states that are kept while decoding."""


def swa(window: int) -> dict[str, Any]:
    return {**SMALL, "window": window}


WINDOWS: dict[str, dict[str, dict[str, Any]]] = {
    "window 100": {"full": SMALL, "swa": swa(100)},
    "window 128": {"full": SMALL, "swa": swa(128)},
    "window 1024": {"full": SMALL, "swa": swa(1024)},
    "near and far": {"full": SMALL, "swa@near": swa(60), "swa@far": swa(400)},
    "sinks": {"full": SMALL, "sinks": {}},
    "chunked": {"full": SMALL, "chunked": {}},
    "chunked and a window": {"full": SMALL, "chunked": {}, "trailed": {}, "swa": swa(100)},
}
STATES: dict[str, dict[str, dict[str, Any]]] = {
    "state": {"full": SMALL, "mamba": {"states": 800}},
    "state and window 128": {"full": SMALL, "swa": swa(128), "mamba": {"states": 800}},
    "state and window 1024": {"full": SMALL, "swa": swa(1024), "mamba": {"states": 800}},
}


def open_cache(components: dict[str, dict[str, Any]], page_size: int) -> Cache:
    named = [plugin for plugin in PLUGINS if plugin.name in components]
    return Cache(
        parse_config(
            {
                "components": components,
                "device_tokens": TOKENS // page_size * page_size,
                "page_size": page_size,
                "decode_interval_tokens": DECODE_PAGES * page_size,
            }
        ),
        plugins=named,
    )


class Turn(NamedTuple):
    """A request: its prompt, and its decoded tokens."""

    prompt: list[int]
    decoded: list[int]


def conversation(seed: int, page_size: int) -> Iterator[Turn]:
    """Repeats, shared system prompts, branches and continuations, near page boundaries or not."""
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(1, 50_000) for _ in range(max(n, 1))]

    def length(most: int) -> int:
        whole = rng.randrange(1, max(2, most // page_size)) * page_size
        return whole + rng.choice((-1, 0, 0, 1, rng.randrange(page_size)))

    system = tokens(length(900))
    past: list[Turn] = []
    for _ in range(14):
        kind = rng.choice(("repeat", "system", "branch", "continue")) if past else "system"
        before = rng.choice(past) if past else Turn([], [])
        if kind == "repeat":
            prompt = before.prompt
        elif kind == "system":
            prompt = [*system, *tokens(length(500))]
        elif kind == "branch":
            prompt = [*before.prompt[: rng.randrange(1, len(before.prompt))], *tokens(length(300))]
        else:
            prompt = [*before.prompt, *before.decoded, *tokens(length(300))]
        turn = Turn(prompt, tokens(rng.choice((0, 0, 3, 90)))[: rng.choice((0, 90))])
        past.append(turn)
        yield turn


def shared_pages(one: list[int], other: list[int], page_size: int) -> int:
    n = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return n // page_size


def serve(cache: Cache, turn: Turn, chunk: int | None, *, checkpoint: bool) -> int:
    """A whole life; the tokens it resumed at."""
    request = life.admitted(cache, turn.prompt, reserve=len(turn.decoded), chunk=chunk)
    life.prefill(cache, request, each=cache.checkpoint if checkpoint else id)
    life.decode(cache, request, turn.decoded)
    cache.finish(request)
    cache.check_integrity()
    return request.anchor_tokens


@pytest.mark.one_in(12)
@pytest.mark.parametrize("calls", ["finish", "checkpoints"])
@pytest.mark.parametrize("chunk", [None, 192])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_resume_wherever_full_attention_does(
    name: str, page_size: int, chunk: int | None, calls: str
) -> None:
    cache = open_cache(WINDOWS[name], page_size)
    past: list[Turn] = []
    for turn in conversation(page_size + len(name), page_size):
        hit = serve(cache, turn, chunk, checkpoint=calls == "checkpoints")
        limit = (len(turn.prompt) - 1) // page_size
        most, least = 0, 0
        for before in past:
            whole = [*before.prompt, *before.decoded]
            shared = min(shared_pages(turn.prompt, whole, page_size), limit)
            most = max(most, shared)
            # Small pieces that a decode left behind may be gone, but not its end.
            prompt = len(before.prompt) // page_size
            end = len(whole) // page_size
            least = max(least, shared if shared in (end, min(shared, prompt)) else prompt)
        assert least <= hit // page_size <= most, (turn, least, most)
        past.append(turn)
    cache.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("chunk", [None, 192])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", STATES)
def test_states_resume_at_every_point(name: str, page_size: int, chunk: int | None) -> None:
    cache = open_cache(STATES[name], page_size)
    points: set[tuple[int, ...]] = set()
    past: list[list[int]] = []
    for turn in conversation(3 * page_size + len(name), page_size):
        prompt, n_tokens = turn.prompt, len(turn.prompt)
        limit = (n_tokens - 1) // page_size
        hit = serve(cache, turn, chunk, checkpoint=False) // page_size
        on_way = [page for page in range(limit + 1) if tuple(prompt[: page * page_size]) in points]
        assert hit >= max(on_way, default=0), (hit, on_way)
        base = max([shared_pages(prompt, each, page_size) for each in past], default=0)
        whole = [*prompt, *turn.decoded]
        end, rest = divmod(len(whole), page_size)
        if rest:  # the last state that was kept, if one was
            end -= end % DECODE_PAGES
        ahead = [n_tokens // page_size, *([end] if end * page_size > n_tokens else [])]
        if hit < base:
            ahead.append(min(base, limit))
        if limit != n_tokens // page_size and 4 * (limit - max(hit, min(base, limit))) >= limit:
            ahead.append(limit)
        points |= {tuple(whole[: page * page_size]) for page in ahead if page > hit}
        past.append(whole[: max(hit, *ahead) * page_size])  # what lies behind is not cached
    assert sum(cache.points.used.values())
    cache.close()
