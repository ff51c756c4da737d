"""SGLang's own factory, host pools and `HiCacheController` with its threads, over kvgraft's stores.

A test is one or more processes: pages that one stored are fetched by the next.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plugins.sglang.tests.engine.lives import Lives, damage_a_page
from plugins.valkey.tests.servers import HOST, Server, needs_server

N = 20
PAGE_TOKENS = 16
SAVE, FETCH, COUNTS = ["save", 1, N], ["fetch", 1, N + 4], ["counts"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="SGLang's files are not at hand: make test-engine-files",
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    lives = Lives(tmp_path_factory.mktemp("lives") / "errors")
    yield lives
    lives.close()


@pytest.fixture
def store(tmp_path: Path) -> dict[str, Any]:
    return {"path": str(tmp_path), "capacity": "1MiB", "shutdown_s": 1}


def segments(store: dict[str, Any]) -> list[Path]:
    return sorted(Path(store["path"]).glob("*.kvseg"))


@pytest.mark.parametrize(("layout", "interface"), [("page_first", 1), ("layer_first", 0)])
def test_pages_are_fetched_after_a_restart(
    live: Lives, store: dict[str, Any], layout: str, interface: int
) -> None:
    store["interface_v1"] = interface
    assert live(store, SAVE, ["drift"], layout=layout) == [N * PAGE_TOKENS, []]
    found, counts, told = live(store, FETCH, COUNTS, ["metrics"], layout=layout)
    assert found == [N, N, 0]
    assert counts["get.ok"] == N
    assert (told["prefetch_pgs"], told["backup_pgs"]) == ([N], [])
    assert told["prefetch_bandwidth"][0] > 0
    assert live({**store, "weights": "two"}, FETCH, layout=layout) == [[0, 0, 0]]


def test_states_of_a_hybrid_model_are_fetched_after_a_restart(
    live: Lives, store: dict[str, Any]
) -> None:
    states = ["save_states", 1, [4, 12, N + 2]]
    assert live(store, SAVE, states) == [N * PAGE_TOKENS, [True] * 3]
    assert live(store, ["fetch_state", 1, N + 4]) == [[[4, 12], True, True]]


def test_a_rank_reads_its_own_part_where_heads_are_divided(
    live: Lives, store: dict[str, Any]
) -> None:
    assert live(store, SAVE, tp=(0, 2)) == [N * PAGE_TOKENS]
    assert live(store, FETCH, tp=(1, 2)) == [[0, 0, 0]]
    assert live(store, SAVE, tp=(1, 2)) == [N * PAGE_TOKENS]
    for tp in ((0, 2), (1, 2)):
        assert live(store, FETCH, tp=tp) == [[N, N, 0]]
    assert live(store, FETCH, tp=(0, 4)) == [[0, 0, 0]]


@pytest.mark.parametrize(("layout", "interface"), [("page_first", 1), ("layer_first", 0)])
def test_ranks_of_an_mla_model_share_data_that_one_of_them_stored(
    live: Lives, store: dict[str, Any], layout: str, interface: int
) -> None:
    store["interface_v1"] = interface
    states = ["save_states", 1, [4]]
    saved = live(store, SAVE, states, layout=layout, pool="mla", tp=(0, 2))
    assert saved == [N * PAGE_TOKENS, [True]]
    assert live(store, ["save", 2, N], layout=layout, pool="mla", tp=(1, 2)) == [0]
    for tp in ((0, 2), (1, 2), (3, 4)):
        assert live(store, FETCH, layout=layout, pool="mla", tp=tp) == [[N, N, 0]]
    for tp, lengths in (((0, 2), [4]), ((1, 2), [])):  # states are divided all the same
        asked = live(store, ["restorable", 1, N], layout=layout, pool="mla", tp=tp)
        assert asked == [lengths]
    assert live(store, FETCH) == [[0, 0, 0]]


@pytest.mark.parametrize("interface", [0, 1])
def test_pages_of_deepseek_v4_are_in_pools_beside_one_without_data(
    live: Lives, store: dict[str, Any], interface: int
) -> None:
    store["interface_v1"] = interface
    saved = live(store, SAVE, ["save_blocks", 1, 12], pool="deepseek_v4")
    assert saved == [N * PAGE_TOKENS, 12]
    found = live(store, FETCH, ["fetch_blocks", 1, N], pool="deepseek_v4")
    assert found == [[N, N, 0], [list(range(1, 13)), 12, 0]]
    # this version of SGLang does not ask so: a pool that does gets no verdict, and holds nothing up
    groups = ["ask_groups", 1, N]
    before = live.said.count("block_groups")
    assert live(store, groups, groups, pool="deepseek_v4") == [list(range(1, N + 1))] * 2
    assert live.said.count("pool deepseek_v4_c4 asks by block_groups") == before + 1


def test_damaged_pages_are_not_used(live: Lives, store: dict[str, Any]) -> None:
    assert live(store, SAVE) == [N * PAGE_TOKENS]
    damage_a_page(segments(store))
    (found, before, wrong), again, counts = live(store, FETCH, FETCH, COUNTS)
    assert (found, wrong) == (N, 0)
    assert before < N
    assert again == [before, before, 0]
    assert counts["get.corrupt"] == 1


def test_a_full_store_keeps_its_size_and_right_pages(live: Lives, store: dict[str, Any]) -> None:
    n = 50  # of 8 KiB; four times as many do not fit
    saves = [["save", first, n] for first in range(4)]
    assert live(store, *saves) == [n * PAGE_TOKENS] * 4
    assert sum(each.stat().st_size for each in segments(store)) <= 1 << 20
    found = live(store, *(["fetch", first, n] for first in range(4)))
    assert found[-1] == [n, n, 0]
    assert sum(fetched for _, fetched, _ in found) < 4 * n
    assert [wrong for _, _, wrong in found] == [0] * 4


def test_threads_do_not_hang_with_a_store_that_hangs(live: Lives, store: dict[str, Any]) -> None:
    assert live(store, SAVE) == [N * PAGE_TOKENS]
    bounds = {"deadline_s": 0.5, "lookup_timeout_s": 0.5, "call_timeout_s": 1}
    steps: list[list[Any]] = [FETCH, FETCH, ["save", 2, N]]
    hangs = [["hang", verb] for verb in ("get_into", "exists", "set_from")]
    both = [step for pair in zip(hangs, steps) for step in pair]
    results = live({**store, **bounds}, *both, COUNTS)
    assert results[1:6:2] == [[N, 0, 0], [0, 0, 0], 0]
    assert results[-1]["get.timeout"] == N


def test_a_store_that_is_taken_away_is_misses(live: Lives, store: dict[str, Any]) -> None:
    saved, _, found, later = live(store, SAVE, ["remove", store["path"]], FETCH, ["save", 2, N])
    assert (saved, later) == (N * PAGE_TOKENS, 0)
    n_found, *fetched = found
    assert n_found in (0, N)  # the store looks at its directory now and then
    assert fetched == [0, 0]
    Path(store["path"]).mkdir(exist_ok=True)
    assert live(store, FETCH) == [[0, 0, 0]]


@needs_server
def test_valkey_outlives_the_engine_and_its_own_end_is_misses(live: Lives) -> None:
    server = Server()
    try:
        store = {"backend": "valkey", "path": f"{HOST}:{server.port}", "deadline_s": 1}
        assert live(store, SAVE) == [N * PAGE_TOKENS]
        killed = ["kill", server.pid]
        found, _, gone, saved = live(store, FETCH, killed, FETCH, ["save", 2, N])
        assert (found, gone, saved) == ([N, N, 0], [0, 0, 0], 0)
    finally:
        server.close()
