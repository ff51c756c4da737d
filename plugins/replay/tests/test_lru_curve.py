"""The exact curve against an LRU cache that is simulated page by page, at every size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft_replay.planning.lru_curve import lru_curve
from kvgraft_replay.workload import Span, TraceRequest, join_spans

PAGE = 2


def request(index: int, spans: tuple[Span, ...], output_tokens: int) -> TraceRequest:
    tokens = sum(span.length for span in spans)
    output_tokens = min(output_tokens, tokens - 1)
    return TraceRequest(
        index=index,
        session=index,
        arrival_s=float(index),
        think_s=0.0,
        prompt_tokens=tokens - output_tokens,
        output_tokens=output_tokens,
        content=join_spans(spans),
    )


def prefixes(request: TraceRequest) -> Iterator[tuple[int, ...]]:
    """Each page as all the tokens up to its end."""
    tokens = request.token_ids().tolist()
    for end in range(PAGE, len(tokens) + 1, PAGE):
        yield tuple(tokens[:end])


def simulated(requests: list[TraceRequest], capacity: int) -> int:
    """Tokens that an LRU cache of `capacity` pages saves."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    saved = 0
    for each in requests:
        pages = list(prefixes(each))
        for page in pages[: (each.prompt_tokens - 1) // PAGE]:
            if page not in cache:
                break
            saved += PAGE
        for page in reversed(pages):
            cache[page] = None
            cache.move_to_end(page)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return saved


@st.composite
def workloads(draw: st.DrawFn) -> list[TraceRequest]:
    """Requests that share prefixes and part anywhere, also within pages and spans."""
    prompts = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=14))
    return [
        request(index, tuple(Span(token, 1) for token in tokens), draw(st.integers(0, 4)))
        for index, tokens in enumerate(prompts)
    ]


@given(workloads())
def test_every_size_saves_as_much_as_a_simulated_lru_cache(requests: list[TraceRequest]) -> None:
    curve = lru_curve(requests, PAGE)
    assert curve.n_pages == len({page for each in requests for page in prefixes(each)})
    for capacity in range(1, curve.n_pages + 2):
        assert curve.saved_tokens(capacity) == simulated(requests, capacity)
    assert curve.saved_tokens(0) == 0
    if curve.needed_pages:
        assert curve.saved_tokens(curve.needed_pages - 1) < curve.saved_tokens(curve.n_pages)
    assert curve.saved_tokens(curve.needed_pages) == curve.saved_tokens(curve.n_pages)


@pytest.mark.parametrize("seed", [0, 3])
def test_many_requests_that_part_everywhere_are_followed_too(seed: int) -> None:
    random = Random(seed)
    requests = [
        request(
            index,
            tuple(Span(random.randrange(2), 1) for _ in range(random.randint(1, 14))),
            random.randint(0, 4),
        )
        for index in range(300)
    ]
    curve = lru_curve(requests, PAGE)
    capacities = range(1, curve.n_pages + 2, 9)
    saved = [curve.saved_tokens(capacity) for capacity in capacities]
    assert saved == [simulated(requests, capacity) for capacity in capacities]


def conversation() -> list[TraceRequest]:
    """A prompt of 4 pages, another one of 2, and the first once more, longer."""
    first, other = Span(0, 4 * PAGE), Span(1000, 2 * PAGE)
    return [
        request(0, (first,), 0),
        request(1, (other,), 0),
        request(2, (first, Span(500, PAGE)), 0),
    ]


def test_a_page_is_hit_from_the_size_on_at_which_nothing_pushed_it_out() -> None:
    curve = lru_curve(conversation(), PAGE)
    assert [curve.saved_tokens(n) // PAGE for n in range(9)] == [0, 0, 0, 1, 2, 3, 4, 4, 4]
    assert (curve.n_pages, curve.needed_pages) == (7, 6)
    assert curve.hit_rate(6) == pytest.approx(4 * PAGE / (11 * PAGE))


def test_the_fewest_pages_for_a_hit_rate_are_found_or_said_to_be_none() -> None:
    curve = lru_curve(conversation(), PAGE)
    assert curve.pages_for(2 / 11) == 4
    assert curve.pages_for(2.1 / 11) == 5
    assert curve.pages_for(4 / 11) == 6
    assert curve.pages_for(0.5) is None
