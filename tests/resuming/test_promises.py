"""Promises and pins hold while requests share their data and leave it behind."""

from __future__ import annotations

from typing import Any

from kvgraft import Cache, TokenKey
from kvgraft.types import PointKind

from ..serving.server import Server

SMALL: dict[str, Any] = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 2}
PAGE = 64


def test_a_checkpoint_at_a_state_above_the_anchor_keeps_the_pages_behind_it() -> None:
    components = {
        "full": SMALL,
        "swa@near": {**SMALL, "window": PAGE},
        "swa@far": {**SMALL, "window": 7 * PAGE},
        "mamba": {"states": 8},
    }
    with Cache.open(components, device_tokens=64 * PAGE, page_size=PAGE) as cache:
        server = Server(cache)
        request = cache.begin(TokenKey(range(1000)), chunk=5 * PAGE, resume_at=2 * PAGE)
        assert cache.admit(request).admitted
        for n_tokens in (2 * PAGE, 4 * PAGE + 10):
            server.step(request, n_tokens)
        anchor = request.receipt.anchor.end
        assert cache.checkpoint(request)
        assert request.receipt.anchor.end == anchor > 2
        cache.check_integrity()
        server.read(request)
        server.prefill(request)
        cache.finish(request)
        cache.check_integrity()


def test_a_checkpoint_pins_no_state_that_others_promises_count_on() -> None:
    components = {"full": SMALL, "swa": {**SMALL, "window": PAGE}, "mamba": {"states": 8}}
    with Cache.open(components, device_tokens=64 * PAGE, page_size=PAGE) as cache:
        server = Server(cache)
        request = server.start(range(PAGE), reserve=PAGE)
        server.prefill(request)
        server.decode(request, 3)
        states = cache.tree.component("mamba").device
        first = 1000
        while states.headroom:
            server.start(range(first, first + 10))
            first += 1000
        assert cache.checkpoint(request)
        cache.check_integrity()
        server.decode(request, 3)


def test_a_decode_of_two_tokens_a_step_gets_its_promised_page() -> None:
    window = {**SMALL, "window": 14, "device_tokens": 24}
    components = {"full": SMALL, "swa": window}
    with Cache.open(components, device_tokens=200, page_size=2, guard="on") as cache:
        server = Server(cache)
        request = server.start(range(13), reserve=14)
        server.prefill(request)
        pool = cache.tree.component("swa").device
        other = server.start(range(100, 100 + 2 * pool.headroom - 3))
        assert not pool.headroom
        server.decode(request, 8)
        request.key.extend([7, 7])
        server.step(request, 2)
        cache.check_integrity()
        server.prefill(other)


def test_the_grid_goes_on_from_a_checkpoint() -> None:
    components = {"full": SMALL, "swa": {**SMALL, "window": 4 * PAGE}, "mamba": {"states": 200}}
    with Cache.open(components, device_tokens=400 * PAGE, page_size=PAGE) as cache:
        left, grid = cache.points.state_spacing, cache.points.spacing
        assert left < grid
        server = Server(cache)
        request = server.start(range(3 * grid * PAGE), chunk=left * PAGE)
        server.step(request, left * PAGE)
        assert cache.checkpoint(request)
        while request.computed < (grid + left) * PAGE:
            assert not list(request.points.values()).count(PointKind.GRID)
            server.step(request, PAGE)
        server.step(request, PAGE)
        assert request.points[grid + left] is PointKind.GRID
        cache.finish(request)


def test_the_guard_records_the_bytes_of_a_leaf_that_grew() -> None:
    components = {"full": SMALL, "swa": {**SMALL, "window": PAGE}}
    with Cache.open(components, device_tokens=16 * PAGE, page_size=PAGE, guard="on") as cache:
        server = Server(cache)
        for first in range(0, 16_000, 1000):
            server.serve(range(first, first + PAGE))
        server.empty_device()
        long = range(50_000, 50_000 + 12 * PAGE)
        server.serve(long, chunk=PAGE)
        for page in range(1, 12):
            request = server.begin([*long[: page * PAGE], 1])
            assert request.anchor_tokens == page * PAGE
            cache.abort(request)


def test_a_key_that_trails_costs_no_point_of_the_prompt() -> None:
    components = {"full": SMALL, "swa": {**SMALL, "window": 16}}
    with Cache.open(components, device_tokens=1024, page_size=16, guard="on") as cache:
        server = Server(cache)
        request = server.start(range(5 * 16), reserve=4 * 16, chunk=16)
        server.prefill(request)
        for _ in range(4 * 16):
            assert cache.allocate(request, 1)
            cache.computed(request, 1)
        cache.check_integrity()
        assert cache.explain(TokenKey(range(6 * 16))).anchor == 5 * 16
        cache.abort(request)


def test_a_state_overwritten_before_it_is_kept_is_skipped_and_gives_its_promise_back() -> None:
    """The engine allocates once for two steps: the state at the end of the first is gone."""
    components = {"full": SMALL, "mamba": {"states": 8}}
    with Cache.open(components, device_tokens=640, page_size=16, guard="on") as cache:
        request = cache.begin(TokenKey(range(40)), resume_at=16)
        assert cache.admit(request).admitted
        part = request.state_components[0]
        assert cache.allocate(request, 40)
        cache.computed(request, 16)
        promised = part.account.promised
        cache.computed(request, 4)
        assert (part.due, part.account.promised) == (0, promised - 1)
        assert 1 not in request.points
        assert cache.points.skipped[PointKind.ASKED] == 1
        cache.abort(request)


def test_a_step_of_no_tokens_leaves_a_state_due_as_it_was() -> None:
    components = {"full": SMALL, "mamba": {"states": 8}}
    with Cache.open(components, device_tokens=640, page_size=16, guard="on") as cache:
        request = cache.begin(TokenKey(range(40)), resume_at=16)
        assert cache.admit(request).admitted
        for n_tokens in (16, 0, 24):
            assert cache.allocate(request, n_tokens)
            cache.computed(request, n_tokens)
            cache.computed(request, 0)
        cache.finish(request)
        assert cache.points.skipped[PointKind.ASKED] == 0
        assert cache.explain(TokenKey(range(20))).anchor == 16


def test_the_guard_knows_points_that_were_counted_before_a_restart() -> None:
    components = {"full": SMALL, "mamba": {"states": 8}}
    with Cache.open(components, device_tokens=640, page_size=16, guard="on") as cache:
        request = cache.begin(TokenKey(range(40)), resume_at=16)
        for _ in range(2):
            assert cache.admit(request).admitted
            assert cache.allocate(request, 40)
            cache.computed(request, 16)
            cache.computed(request, 16)
            cache.restart(request)
        assert cache.points.skipped[PointKind.ASKED] == 1
        cache.abort(request)
