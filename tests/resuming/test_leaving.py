"""Data that requests leave behind, and the points they keep (I9 to I12)."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest

from kvgraft import Cache, ConfigError, Outcome, TokenKey
from kvgraft.policies.policy import is_left_behind
from kvgraft.requests.request import Request
from kvgraft.types import PointKind

from ..counting import lines_run
from ..serving import life

SMALL: dict[str, Any] = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 2}
PAGE, WINDOW = 64, 256
LONG = range(100_000, 108_000)
NOTHING = dict.fromkeys(PointKind, 0)


def window_cache(window_tokens: int = 64_000, **settings: Any) -> Cache:
    swa = {**SMALL, "window": WINDOW, "device_tokens": window_tokens}
    return Cache.open({"full": SMALL, "swa": swa}, device_tokens=64_000, page_size=PAGE, **settings)


def prefill(cache: Cache, request: Request, until: int | None = None) -> None:
    life.prefill(cache, request, until, lambda request: cache.check_integrity())


def serve(cache: Cache, tokens: Any, **begin: Any) -> int:
    request = life.admitted(cache, tokens, **begin)
    prefill(cache, request)
    cache.finish(request)
    return request.anchor_tokens


def left_slots(cache: Cache, component: str) -> int:
    index = cache.tree.component(component).index
    cells = [node.cells[index] for node in cache.tree.nodes()]
    return sum(
        len(cell.device) // 4 for cell in cells if cell.device and is_left_behind(cell.stamp)
    )


def test_data_left_behind_costs_no_promise() -> None:
    cache = window_cache()
    request = life.admitted(cache, LONG, reserve=300, chunk=512)
    seen = set()
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request)
        assert cache.allocate(request, n_tokens)
        before = [component.device.headroom for component in cache.tree.components]
        cache.computed(request, n_tokens)
        after = [component.device.headroom for component in cache.tree.components]
        assert all(now >= was for now, was in zip(after, before))
        seen.add(left_slots(cache, "swa"))
    assert max(seen) > 80  # all but the points of 125 pages
    cache.finish(request)
    cache.close()


def test_another_request_resumes_from_data_a_running_one_left_behind() -> None:
    cache = window_cache()
    running = life.admitted(cache, LONG, reserve=64, chunk=1024)
    prefill(cache, running, until=4096)
    other = cache.begin(TokenKey([*LONG[:3000], 1, 2, 3]))
    assert other.anchor_tokens == 3000 // PAGE * PAGE
    cache.abort(other)
    cache.close()


def test_windows_of_finished_conversations_outlive_the_evict_first_data_of_a_long_prompt() -> None:
    cache = window_cache(window_tokens=4096)
    talks = [range(1000 * n, 1000 * n + 384) for n in range(1, 4)]
    for talk in talks:
        serve(cache, talk)
    assert cache.tree.component("swa").device.capacity < len(LONG) // PAGE
    serve(cache, LONG, chunk=512)
    for talk in talks:
        assert serve(cache, [*talk, 7, 8, 9]) == 384
    cache.close()


def test_data_left_behind_goes_first_oldest_first() -> None:
    cache = window_cache()
    serve(cache, range(500))
    serve(cache, LONG)
    left = left_slots(cache, "swa")
    assert cache.evict("swa", left // 2) >= left // 2
    # the end of the long prompt can be left off, its beginning can not
    assert cache.explain(TokenKey([*LONG[:7500], 1])).anchor == 7500 // PAGE * PAGE
    assert cache.explain(TokenKey([*LONG[:700], 1])).anchor == 0
    assert cache.explain(TokenKey([*range(500), 1])).anchor == 500 // PAGE * PAGE
    cache.evict("swa", left_slots(cache, "swa"))
    assert cache.explain(TokenKey([*range(500), 1])).anchor == 500 // PAGE * PAGE
    cache.close()


def test_tables_stay_as_they_are_while_two_requests_compute_the_same() -> None:
    cache = window_cache()
    first, second = (life.admitted(cache, LONG[:3000], reserve=100, chunk=512) for _ in range(2))
    for _ in range(7):
        for request in (first, second):
            n_tokens = cache.next_chunk(request)
            if not n_tokens:
                continue
            assert cache.allocate(request, n_tokens)
            before = cache.table(request, "full").tolist()
            cache.computed(request, n_tokens)
            assert cache.table(request, "full").tolist() == before
            window = cache.table(request, "swa")
            at = request.computed // PAGE
            assert (window[max(0, at - WINDOW // PAGE) : at] >= 0).all()
            cache.check_integrity()
    assert cache.checkpoint(second)
    assert cache.table(second, "full").tolist()[:40] == cache.table(first, "full").tolist()[:40]
    for request in (first, second):
        life.decode(cache, request, range(90))
        cache.finish(request)
        cache.check_integrity()
    cache.close()


def test_a_fork_matches_no_page_that_its_original_computed_after_it() -> None:
    cache = window_cache()
    original = life.admitted(cache, LONG[:300], reserve=2000)
    prefill(cache, original)
    life.decode(cache, original, range(700))
    fork = copy(original.key)
    fork.extend(LONG[:400])
    life.decode(cache, original, range(700))
    assert fork.trail is original.receipt.anchor  # the leaf grew, and is cut behind the fork
    cache.abort(cache.begin(TokenKey([*original.key.tokens(0, 1100), 1])))
    request = cache.begin(fork)
    assert request.anchor_tokens == 1000 // PAGE * PAGE
    cache.abort(request)
    cache.abort(original)
    cache.close()


def test_a_table_names_no_slot_that_others_may_take() -> None:
    cache = window_cache()
    serve(cache, LONG[:3000])
    request = life.admitted(cache, [*LONG[:3000], 1])
    at, first = request.computed // PAGE, request.computed // PAGE - WINDOW // PAGE
    window = cache.table(request, "swa")[:at]
    assert left_slots(cache, "swa") > 0
    assert (window[first:] >= 0).all()
    assert (window[:first] == -1).all()
    assert (cache.table(request, "full")[:at] >= 0).all()
    cache.abort(request)
    cache.close()


@pytest.mark.parametrize("named", [(), 1000, [1000, 1400]])
def test_a_boundary_the_engine_names_outlives_data_left_behind(named: Any) -> None:
    cache = window_cache()
    serve(cache, LONG[:1500], resume_at=named)
    cache.evict("swa", left_slots(cache, "swa"))
    hit = cache.explain(TokenKey([*LONG[:1010], 1])).anchor
    assert hit == (960 if named else 0)
    cache.close()


def test_an_invalid_boundary_is_refused() -> None:
    cache = window_cache()
    for wrong in (-1, 11, "5", [3, None], True):
        with pytest.raises(ConfigError, match=r"resume_at in a prompt of 10 tokens .*; give"):
            cache.begin(TokenKey(range(10)), resume_at=wrong)  # type: ignore[arg-type]
    cache.close()


def test_points_are_named_by_explain_and_counted() -> None:
    cache = window_cache()
    serve(cache, LONG[:3000])
    found = cache.explain(TokenKey([*LONG[:3000], 1]))
    grid = cache.points.spacing * PAGE
    assert grid == 8 * WINDOW  # as many bytes a token as the base: an eighth
    assert found.points == ((grid, PointKind.GRID), (2944, PointKind.REPEAT))
    assert "resume points: 2048 (grid), 2944 (repeat)" in str(found)
    assert cache.points.made[PointKind.GRID] == cache.points.made[PointKind.REPEAT] == 1
    assert serve(cache, LONG[:3000]) == 2944
    assert cache.points.used[PointKind.REPEAT] == 1
    cache.evict("swa", 64_000)
    assert cache.points.lost == {
        **dict.fromkeys(PointKind, 0),
        PointKind.REPEAT: 1,
        PointKind.GRID: 1,
    }
    assert str(cache.points.made) == (
        "{'repeat': 1, 'prompt end': 0, 'branch': 0, 'end': 0, 'asked': 0, 'grid': 1}"
    )
    assert f"{PointKind.PROMPT_END}, {PointKind.PROMPT_END!s}" == "prompt end, prompt end"
    assert repr(cache.points).startswith("<ResumePoints: made 2, used 1, skipped 0, lost 2; ")
    assert cache.explain(TokenKey([*LONG[:3000], 1])).points == ()
    cache.close()


def test_losing_the_points_of_a_long_node_takes_no_step_for_each_page() -> None:
    assert lines_to_lose_points(4_001) == lines_to_lose_points(8_001)


def lines_to_lose_points(n_tokens: int) -> int:
    """Lines of Python run to evict the three states of one node with pages of one token."""
    sizes = {"full": SMALL, "mamba": {"states": 5}}
    cache = Cache.open(sizes, device_tokens=2 * n_tokens, page_size=1)
    serve(cache, range(n_tokens), resume_at=[1000, 2000])

    def evict() -> None:
        assert cache.evict("mamba", 3) == 3

    lines = lines_run(evict)
    assert cache.points.lost[PointKind.ASKED] == 2
    assert sum(cache.points.lost.values()) == 3
    cache.close()
    return lines


def test_a_long_decode_makes_no_deep_tree() -> None:
    cache = window_cache()
    request = life.admitted(cache, LONG[:1000], reserve=3000, chunk=256)
    prefill(cache, request)
    life.decode(cache, request, range(3000))
    cache.check_integrity()
    assert cache.tree.n_nodes <= 4
    cache.finish(request)
    cache.check_integrity()
    assert serve(cache, [*LONG[:1000], *range(2000)]) == 2944
    cache.close()


def state_cache(**options: Any) -> Cache:
    swa = {**SMALL, "window": WINDOW}
    mamba = {"states": 64, **options}
    return Cache.open(
        {"full": SMALL, "swa": swa, "mamba": mamba}, device_tokens=64_000, page_size=PAGE
    )


def test_a_page_aligned_prompt_is_cut_for_its_repetition_where_that_saves_enough() -> None:
    cache = state_cache()
    serve(cache, LONG[:2048])
    assert serve(cache, LONG[:2048]) == 1984
    # two more pages: not worth a cut the first time, but once it was repeated
    longer = LONG[:2176]
    assert serve(cache, longer) == 2048
    assert serve(cache, longer) == 2048
    assert serve(cache, longer) == 2112
    cache.close()


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_window_on_host_has_the_last_page_that_a_repetition_of_an_aligned_prompt_uses(
    page_size: int,
) -> None:
    """HOST gets points only. This one costs no cut, so it need not save a quarter of the prompt."""
    cache = Cache.open(
        {"full": SMALL, "swa": {**SMALL, "window": 128}},
        device_tokens=6_400,
        host_tokens=12_800,
        page_size=page_size,
        load=None,
    )
    prompts = [[*range(1024), *range(start, start + 320)] for start in (2000, 3000, 4000)]
    for prompt in prompts:
        serve(cache, prompt)
    cache.drain()
    cache.evict("full", 6_400 // page_size)
    cache.drain()
    for prompt in prompts:
        found = cache.explain(TokenKey(prompt))
        assert (found.anchor, found.device_anchor) == (1344 - page_size, 0)
    cache.check_integrity()
    cache.close()


def test_a_point_without_a_slot_is_one_for_no_component() -> None:
    cache = state_cache(states=136)
    held = [life.admitted(cache, range(1000 * n, 1000 * n + 100), reserve=64) for n in range(44)]
    for request in held:
        prefill(cache, request)
    long = life.admitted(cache, LONG, reserve=1, chunk=4096)
    assert cache.tree.component("mamba").device.headroom == 0
    books = [
        component.device.promised for component in cache.tree.components if not component.is_state
    ]
    prefill(cache, long, until=4096)
    n_tokens = cache.next_chunk(long)
    assert cache.allocate(long, n_tokens)
    assert cache.points.skipped[PointKind.GRID] == 1
    assert 4096 // PAGE not in long.points
    assert books
    cache.computed(long, n_tokens)
    assert left_slots(cache, "swa") == 0
    assert cache.explain(TokenKey([*LONG[:4097]])).anchor == 0
    for request in (*held, long):
        cache.abort(request)
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize(
    ("states", "kept", "skipped"),
    [
        (1, (), {"repeat": (1, 2), "asked": (2, 2)}),
        (2, (960,), {"asked": (2, 3)}),
        (3, (512, 960), {"asked": (1, 4)}),
        (4, (192, 512, 960), {}),
    ],
)
def test_points_that_could_never_fit_are_skipped_counted_and_explained(
    states: int, kept: tuple[int, ...], skipped: dict[str, tuple[int, int]]
) -> None:
    """No request is rejected for the sake of a point (I11).

    `skipped`: per kind how many, and the states needed with one more than are kept.
    """
    cache = Cache.open({"full": SMALL, "mamba": {"states": states}}, device_tokens=64_000)
    request = life.admitted(cache, LONG[:1000], resume_at=[200, 512])
    prefill(cache, request)
    cache.finish(request)
    found = cache.explain(TokenKey([*LONG[:1000], 1]))
    assert tuple(position for position, _ in found.points) == kept
    assert found.anchor == (960 if kept else 0)
    counts: dict[str, int] = {kind: n for kind, n in cache.points.skipped.items() if n}
    assert counts == {kind: n for kind, (n, _) in skipped.items()}
    assert {each.kind: each.n_points for each in found.skipped} == counts
    for kind, (_, needed) in skipped.items():
        assert (
            f"\n  resume points skipped in this cache: {counts[kind]} ({kind}), the last because "
            f"it could never fit: component 'mamba' needs {needed} states with it, its pool has "
            f"{states}"
        ) in str(found)
    assert ("skipped" in str(found)) == bool(skipped)
    cache.check_integrity()
    cache.close()


def test_a_rejected_request_skips_no_point() -> None:
    """Without its points its states would fit, and its pages would not (A9)."""
    full = {**SMALL, "device_tokens": 640}
    components = {"full": full, "mamba": {"states": 3}}
    with Cache.open(components, device_tokens=640, guard="on") as cache:
        request = cache.begin(TokenKey(LONG[:1000]), resume_at=[200, 512])
        points, checkpoints = dict(request.points), list(request.checkpoints)
        for _ in range(2):
            assert cache.admit(request).outcome is Outcome.NEVER_FITS
            assert (request.points, request.checkpoints) == (points, checkpoints)
        assert not any(cache.points.skipped.values())
        cache.abort(request)


def test_a_request_that_waits_skips_its_points_when_it_is_admitted() -> None:
    with Cache.open({"full": SMALL, "mamba": {"states": 3}}, device_tokens=64_000) as cache:
        other = life.admitted(cache, range(50_000, 50_100))
        request = cache.begin(TokenKey(LONG[:1000]), resume_at=[200, 512])
        for _ in range(2):
            assert cache.admit(request).outcome is Outcome.DEFERRED
            assert len(request.points) == 3
            assert not any(cache.points.skipped.values())
        cache.abort(other)
        assert cache.admit(request).admitted
        assert list(request.points) == [512 // PAGE, 960 // PAGE]
        assert cache.points.skipped[PointKind.ASKED] == 1
        cache.abort(request)


def test_a_skipped_point_is_counted_once_however_often_its_request_restarts() -> None:
    with Cache.open({"full": SMALL, "mamba": {"states": 2}}, device_tokens=64_000) as cache:
        request = life.admitted(cache, LONG[:1000], resume_at=[200, 512])
        assert cache.points.skipped[PointKind.ASKED] == 2
        for _ in range(2):
            cache.restart(request)
            assert cache.admit(request).admitted
            assert list(request.points) == [960 // PAGE]
        assert cache.points.skipped[PointKind.ASKED] == 2
        cache.abort(request)


def test_a_point_of_other_tokens_or_another_kind_is_counted_though_one_was_skipped_there() -> None:
    """A restarted request may have other points at the same pages."""
    with Cache.open({"full": SMALL, "mamba": {"states": 1}}, device_tokens=64_000) as cache:
        request = life.admitted(cache, LONG[:130], resume_at=128)
        assert cache.points.skipped == {**NOTHING, PointKind.REPEAT: 1}
        request.key.truncate(0)
        request.key.extend(range(130))
        cache.restart(request)
        assert cache.admit(request).admitted
        assert cache.points.skipped == {**NOTHING, PointKind.REPEAT: 2}
        request.key.extend(range(200))
        cache.restart(request)
        assert request.points == {2: PointKind.ASKED, 5: PointKind.REPEAT}
        assert cache.admit(request).admitted
        assert cache.points.skipped == {**NOTHING, PointKind.REPEAT: 3, PointKind.ASKED: 1}
        cache.abort(request)


def test_points_stay_where_it_is_pages_that_could_never_fit() -> None:
    """A chunk that could never fit is made smaller; its points are no part of that (A6)."""
    full = {**SMALL, "device_tokens": 64_000}
    swa = {**SMALL, "window": 64, "device_tokens": 640}
    cache = Cache.open({"full": full, "swa": swa, "mamba": {"states": 64}}, device_tokens=64_000)
    request = life.admitted(cache, LONG[:1000], resume_at=[200, 512])
    assert request.chunk < 1000
    prefill(cache, request)
    cache.finish(request)
    found = cache.explain(TokenKey([*LONG[:1000], 1]))
    assert {192, 512, 960} <= {position for position, _ in found.points}
    assert not found.skipped
    cache.close()
