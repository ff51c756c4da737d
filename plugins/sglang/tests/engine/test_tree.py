"""kvgraft's tree inside SGLang's own scheduling, with its rows and its memory checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from plugins.sglang.tests.engine.lives import Lives

from kvgraft import ConfigError
from kvgraft_sglang.tree_settings import VARIABLE, TreeSettings

SEEDS = list(range(8))
MORE_SEEDS = list(range(8, 20))
KINDS = ("full", "tokens", "windows", "window tokens")
WIDE: dict[str, dict[str, Any]] = {
    "full": {"tokens": 1 << 16},
    "tokens": {"tokens": 1 << 16},
    "windows": {"tokens": 1 << 16, "window_tokens": 1 << 16},
    "window tokens": {"tokens": 1 << 16, "window_tokens": 1 << 16},
}

needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="SGLang's files are not at hand: make test-engine-files",
)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    lives = Lives(tmp_path_factory.mktemp("scenes") / "errors", "scenes")
    yield lives
    lives.close()


@needs_sglang
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(SEEDS[:4], id="4 seeds"),
        pytest.param([*SEEDS[4:], *MORE_SEEDS], id="16 more", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_each_token_is_in_its_own_slot_and_no_page_is_lost(
    scenes: Lives, kind: str, seeds: list[int]
) -> None:
    found = scenes.ask({"scene": "random", "kind": kind, "seeds": seeds})
    total = {name: sum(each[name] for each in found) for name in found[0]}
    assert min(total.values()) > 0, total  # also hits, chunks, retractions and aborts
    assert total["ended"] + total["aborted"] == 24 * len(seeds)


@pytest.mark.one_in(2)
@needs_sglang
@pytest.mark.parametrize("kind", KINDS)
def test_the_guard_is_silent_with_any_policy(scenes: Lives, kind: str) -> None:
    given = {"scene": "random", "kind": kind, "seeds": SEEDS[:3], "guard": "on"}
    for tree in ("lru", "density"):
        assert sum(each["hits"] for each in scenes.ask({**given, "tree": tree}))


@pytest.mark.one_in(2)
@needs_sglang
@pytest.mark.parametrize("kind", ["full", "tokens"])
def test_hits_equal_those_of_sglang_where_nothing_is_evicted(scenes: Lives, kind: str) -> None:
    given = {"scene": "random", "kind": kind, "seeds": SEEDS[:5], **WIDE[kind]}
    hits = {
        tree: [each["hits"] for each in scenes.ask({**given, "tree": tree})]
        for tree in (None, "lru", "density")
    }
    assert hits["lru"] == hits["density"] == hits[None]


@pytest.mark.one_in(2)
@needs_sglang
@pytest.mark.parametrize("kind", ["windows", "window tokens"])
def test_models_with_windows_hit_at_least_as_much_as_in_sglang(scenes: Lives, kind: str) -> None:
    given = {"scene": "random", "kind": kind, "seeds": SEEDS}
    own, ours = (
        sum(each["hits"] for each in scenes.ask({**given, "tree": tree})) for tree in (None, "lru")
    )
    assert ours >= own


@needs_sglang
@pytest.mark.parametrize("kind", ["full", "windows"])
def test_a_flush_forgets_everything_and_the_server_goes_on(scenes: Lives, kind: str) -> None:
    assert scenes.ask({"scene": "flushed", "kind": kind}) == [96, 0, 96]


@needs_sglang
@pytest.mark.parametrize(
    ("defect", "said"),
    [
        ("rows are not repointed", "hold other tokens"),
        ("windows are not mapped", "hold other tokens"),
        ("the next slots", "hold other tokens"),
        ("a page is lost", "Mem Leak Detected"),
    ],
)
def test_the_checks_of_these_scenes_find(scenes: Lives, defect: str, said: str) -> None:
    found = scenes.ask({"scene": "broken", "kind": "windows", "defect": defect})
    assert said in found[1]


@needs_sglang
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"states": True}, "states (Mamba, linear attention)"),
        ({"enable_hierarchical_cache": True}, "HiCache (--enable-hierarchical-cache)"),
        ({"disaggregation_mode": "prefill"}, "prefill and decode apart"),
        ({"radix_eviction_policy": "lfu"}, "SGLang's eviction policies (set KVGRAFT_SGLANG)"),
        ({"schedule_policy": "dfs-weight"}, "the schedule policy dfs-weight"),
        ({"speculative_algorithm": "NGRAM"}, "speculative decoding"),
    ],
)
def test_a_server_does_not_start_with(scenes: Lives, options: dict[str, Any], said: str) -> None:
    (error,) = scenes.ask({"scene": "refused", **options})
    assert error == (
        f"--radix-cache-backend kvgraft does not support {said}; leave that out, or the option"
    )


@needs_sglang
def test_an_unknown_policy_is_named_when_the_server_starts(scenes: Lives) -> None:
    (error,) = scenes.ask({"scene": "refused", "tree": "oldest"})
    assert "oldest" in error


@needs_sglang
def test_the_names_and_signatures_of_sglang_are_those_relied_on(scenes: Lives) -> None:
    assert scenes.ask({"scene": "drift"}) == []


def test_settings_are_an_object_of_known_names() -> None:
    assert TreeSettings.from_environment({}).policy == "density"
    assert TreeSettings.from_environment({VARIABLE: '{"policy": "lru"}'}).policy == "lru"
    for text, said in (
        ("lru", "give settings such as"),
        ("[1]", "give settings such as"),
        ('{"polcy": "lru"}', "no setting 'polcy'"),
    ):
        with pytest.raises(ConfigError, match=said):
            TreeSettings.from_environment({VARIABLE: text})
