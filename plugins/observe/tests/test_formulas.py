"""The documented PromQL says of a real cache what its text says."""

from __future__ import annotations

import re

import pytest

from kvgraft import Cache, Request, TokenKey
from kvgraft_observe.prometheus import CacheCollector
from tests.commands import ROOT
from tests.serving import life

from .promql import Labels, Series, evaluate, scrape
from .test_dashboard import expressions

README = (ROOT / "plugins" / "observe" / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```promql\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
FORMULAS = [each for block in BLOCKS for each in re.split(r"\n(?=\S)", block.strip())]
ALL: Labels = frozenset()
PROMPT = 160


@pytest.fixture(name="cache")
def _cache() -> Cache:
    return Cache.open(["full", "mamba"], page_size=16, device_tokens=1024, cut_tokens=0)


def formula(first: str, series: Series) -> dict[Labels, float]:
    """The value of the documented formula that begins so."""
    (found,) = (each for each in FORMULAS if each.startswith(first))
    value = evaluate(found, series)
    assert isinstance(value, dict)
    return value


def prefilled(cache: Cache, key: TokenKey, *, until: int | None = None) -> Request:
    request = life.admitted(cache, key)
    life.prefill(cache, request, until)
    return request


def served(cache: Cache, first: int, retractions: int, *, lost: bool = False) -> None:
    """A request of one user; it makes room for others so many times, and is begun again."""
    key = TokenKey(range(first, first + PROMPT))
    for _ in range(retractions):
        request = prefilled(cache, key)
        for token in range(16):
            key.extend([token])
            assert cache.allocate(request, 1)
            cache.computed(request, 1)
        cache.retract(request)
        if lost:
            cache.clear()
    cache.finish(prefilled(cache, key))


def shown(cache: Cache, *, shared: bool, retractions: int, lost: bool = False) -> Series:
    """Four requests, seen from outside."""
    collector = CacheCollector(cache, explain_every=1)
    before = scrape(collector)
    for user in range(4):
        served(cache, 0 if shared else user * PROMPT, retractions, lost=lost)
    return Series(before, scrape(collector))


@pytest.mark.parametrize("retractions", [0, 1, 3])
def test_nothing_is_reused_where_nothing_is_shared(cache: Cache, retractions: int) -> None:
    series = shown(cache, shared=False, retractions=retractions)
    assert formula("1 - sum(rate(kvgraft_tokens_total{", series) == {ALL: 0}
    page = 16 * retractions  # a request computes at least its last token, and with it its page
    assert formula("sum(rate(kvgraft_recomputed", series) == {ALL: page / (PROMPT + 2 * page)}
    reasons = formula("sum by (outcome, component)", series)
    assert {dict(labels)["outcome"] for labels, value in reasons.items() if value} == {"unknown"}


@pytest.mark.parametrize("retractions", [0, 1, 3])
def test_shared_tokens_are_reused_however_often_requests_make_room(
    cache: Cache, retractions: int
) -> None:
    series = shown(cache, shared=True, retractions=retractions)
    reused = 3 * (PROMPT - 16)
    assert formula("1 - sum(rate(kvgraft_tokens_total{", series) == {ALL: reused / (4 * PROMPT)}


def test_tokens_that_a_retraction_loses_are_counted_apart(cache: Cache) -> None:
    series = shown(cache, shared=False, retractions=2, lost=True)
    assert formula("1 - sum(rate(kvgraft_tokens_total{", series) == {ALL: 0}
    again = (PROMPT + 16) + (PROMPT + 32)
    computed = PROMPT + 2 * 16 + again
    assert formula("sum(rate(kvgraft_recomputed", series) == {ALL: pytest.approx(again / computed)}


def test_slots_that_may_be_given_away_are_those_that_admission_counts_on(cache: Cache) -> None:
    served(cache, 0, 1)
    running = prefilled(cache, TokenKey(range(5000, 5100)), until=48)
    series = Series({}, scrape(CacheCollector(cache)))
    components = cache.stats().components
    assert formula("sum by (component) (kvgraft_slots", series) == {
        frozenset({("component", name)}): each.device.headroom for name, each in components.items()
    }
    assert running.computed == 48


def test_the_dashboard_asks_for_the_share_as_documented() -> None:
    asked = [each.replace("$__rate_interval", "5m") for each in expressions()]
    asked = [re.sub(r'instance=~"\$instance"(, )?', "", each).replace("{}", "") for each in asked]
    assert asked[0] == FORMULAS[0]


def test_every_documented_formula_is_tried() -> None:
    assert [each.partition("{")[0].partition("[")[0] for each in FORMULAS] == [
        "1 - sum(rate(kvgraft_tokens_total",
        "sum(rate(kvgraft_recomputed_tokens_total",
        "sum by (component) (kvgraft_slots",
        "sum by (outcome, component) (rate(kvgraft_explained_tokens_total",
    ]
