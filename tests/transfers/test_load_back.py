"""HOST to DEVICE: shared, readable layer by layer, all or nothing (R1 to R8, L8, I8)."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kvgraft import (
    Direction,
    Everything,
    LeaseError,
    LoadModel,
    PluginHookError,
    Reach,
    Tier,
    TransferQuery,
    hookimpl,
)
from kvgraft.cache import Cache
from kvgraft.pools import Component
from kvgraft.transfers import CpuTransferEngine, PlaneCopy, pair_planes
from kvgraft_testing.stepped import SteppedTransferEngine

from ..serving.components import PagedPackage
from ..serving.engines import PromptEngine
from ..serving.server import Server, ledgers, tree_dump
from ..serving.setups import SETUPS, Setup, mixed
from .gates import Broken, GatedRows, HeldFence, pages_on

PROMPT = list(range(100, 116))


def on_host(setup: Setup, **settings: object) -> tuple[Cache, Server]:
    """A cache that holds the prompt on HOST and nothing on DEVICE."""
    cache = setup.open(device_tokens=256, host_tokens=256, **settings)  # type: ignore[arg-type]
    server = Server(cache)
    server.serve(PROMPT)
    server.empty_device()
    return cache, server


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_starting_a_load_waits_for_nothing_and_publishes_nothing(name: str) -> None:
    cache, server = on_host(SETUPS[name])
    fence = HeldFence()
    request = server.begin([*PROMPT, 1, 2])
    assert cache.admit(request).admitted
    waits = cache.load_back(request, fence)
    assert len(waits) == 1
    assert fence.met.wait(60)
    assert cache.poll() == 0
    assert not bool(request.ready)  # mypy would hold the property for constant
    for part in request.components:
        component, load = part.component, part.host_slots
        assert pages_on(cache, PROMPT, component.name, Tier.DEVICE) == []
        assert component.device.in_flight == load
    with pytest.raises(LeaseError, match="before the load-back has ended"):
        cache.allocate(request, 1)
    cache.check_integrity()
    fence.set()
    assert cache.drain()
    assert request.ready
    assert not request.load_failed
    server.prefill(request)
    cache.finish(request)
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_the_host_copy_stays_until_the_load_is_acknowledged(name: str) -> None:
    cache, server = on_host(SETUPS[name])
    fence = HeldFence()
    request = server.begin([*PROMPT, 1, 2])
    assert cache.admit(request).admitted
    cache.load_back(request, fence)
    held = {
        component.name: pages_on(cache, PROMPT, component.name, Tier.HOST)
        for component in cache.tree.components
    }
    for part in request.components:
        component, load = part.component, part.host_slots
        assert component.host is not None
        cache.evict(component.name, component.host.capacity, Tier.HOST)
        left = pages_on(cache, PROMPT, component.name, Tier.HOST)
        assert len(left) * component.slots_per_page >= load
        assert set(left) <= set(held[component.name])
    cache.check_integrity()
    fence.set()
    assert cache.drain()
    server.prefill(request)
    cache.abort(request)
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_two_requests_share_one_transfer_and_both_are_ready(name: str) -> None:
    cache, server = on_host(SETUPS[name])
    fence = HeldFence()
    first, second = (server.begin([*PROMPT, n, n]) for n in (1, 2))
    assert cache.admit(first).admitted
    assert cache.admit(second).admitted
    mine = cache.load_back(first, fence)
    theirs = cache.load_back(second)
    late = server.begin([*PROMPT, 3, 3])
    assert not late.needs_load_back
    assert cache.admit(late).admitted
    assert mine == theirs == cache.load_back(late)
    counters = cache.journal.counters[Direction.LOAD_BACK]
    assert counters.started == 1
    for part in first.components:
        assert counters.slots[part.component.name] == part.host_slots
    fence.set()
    assert cache.drain()
    for request in (first, second, late):
        assert request.ready
        server.prefill(request)
        cache.finish(request)
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("last", [0, 1])
def test_a_request_that_shares_two_transfers_waits_for_both(last: int) -> None:
    engine = SteppedTransferEngine()
    cache = SETUPS["full"].open(device_tokens=256, host_tokens=256, engine=engine)
    server = Server(cache)
    finished = server.begin(PROMPT)
    assert cache.admit(finished).admitted
    server.prefill(finished)
    cache.finish(finished)
    engine.run_all()
    cache.poll()
    server.empty_device()
    requests = [server.begin([*tokens, 1]) for tokens in (PROMPT[:8], PROMPT, PROMPT)]
    for request in requests:
        assert cache.admit(request).admitted
        cache.load_back(request)
    assert len(engine.pending) == 2
    part, whole, both = requests
    engine.step(1 - last)
    cache.poll()
    assert (part.ready, whole.ready, both.ready) == (last == 1, False, False)
    with pytest.raises(LeaseError, match="before the load-back has ended"):
        cache.allocate(both, 1)
    engine.step()
    cache.poll()
    for request in requests:
        server.prefill(request)
        cache.abort(request)
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("name", sorted(SETUPS))
@pytest.mark.parametrize("when", ["before it asked", "while it waited"])
def test_a_failed_shared_transfer_fails_all_requests_that_rely_on_it(name: str, when: str) -> None:
    cache, server = on_host(SETUPS[name])
    empty = ledgers(cache), tree_dump(cache)
    first = server.begin([*PROMPT, 1, 1])
    assert cache.admit(first).admitted
    cache.load_back(first, Broken())
    second = server.begin([*PROMPT, 2, 2])
    assert cache.admit(second).admitted
    if when == "while it waited":
        cache.load_back(second)
    assert cache.drain()
    if when == "before it asked":
        # pages not promised to it, because another was bringing them, did not come
        cache.load_back(second)
    cache.check_integrity()
    for request in (first, second):
        assert request.ready
        assert request.load_failed
        with pytest.raises(LeaseError, match="restart"):
            cache.allocate(request, 1)
    cache.abort(second)
    for component in cache.tree.components:
        assert pages_on(cache, PROMPT, component.name, Tier.DEVICE) == []
        assert component.device.in_flight == 0
        assert component.device.free == component.device.capacity
    # admitted again as a miss: a failed transfer is not relied on a second time
    cache.restart(first)
    assert first.anchor_tokens == 0
    assert not first.load_failed
    assert cache.admit(first).admitted
    assert cache.load_back(first) == []
    server.prefill(first)
    cache.abort(first)
    # data left behind before the abort is evictable
    server.empty_device()
    assert (ledgers(cache), tree_dump(cache)) == empty
    third = server.start([*PROMPT, 3, 3])
    assert third.anchor_tokens == len(PROMPT)
    server.prefill(third)
    cache.finish(third)
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("name", ["full", "full+swa", "full+swa+mamba", "hisparse"])
def test_pages_below_a_failed_load_are_not_published(name: str) -> None:
    """One request loads the first part, another the rest; the first part never arrives."""
    engine = PromptEngine()
    with SETUPS[name].open(device_tokens=256, host_tokens=256, engine=engine) as cache:
        server = Server(cache)
        server.serve(PROMPT[:8])
        server.serve(PROMPT)
        server.empty_device()
        short, long = server.begin([*PROMPT[:8], 1, 2]), server.begin([*PROMPT, 1, 2])
        assert (short.anchor_tokens, long.anchor_tokens) == (8, 16)
        for request in (short, long):
            assert cache.admit(request).admitted
            cache.load_back(request)
        assert len(engine.pending) == 2
        engine.fail()
        engine.run_all()
        cache.poll()
        cache.check_integrity()
        for component in cache.tree.components:
            if component.is_prefix_closed:
                assert pages_on(cache, PROMPT, component.name, Tier.DEVICE) == []
        for request in (short, long):
            assert request.load_failed
            cache.restart(request)
            assert request.anchor_tokens == 0
            assert cache.admit(request).admitted
            server.prefill(request)
            cache.finish(request)
            cache.check_integrity()


@pytest.mark.parametrize("name", sorted(SETUPS))
@pytest.mark.rule("L8")
def test_aborting_while_the_transfer_flies_leaves_it_to_end_by_itself(name: str) -> None:
    cache, server = on_host(SETUPS[name])
    fence = HeldFence()
    request = server.begin([*PROMPT, 1, 2])
    assert cache.admit(request).admitted
    cache.load_back(request, fence)
    cache.abort(request)
    cache.check_integrity()
    server.empty_device()
    for component in cache.tree.components:
        assert component.device.promised == 0
        assert component.host is not None
        cache.evict(component.name, component.host.capacity, Tier.HOST)
        left = pages_on(cache, PROMPT, component.name, Tier.HOST)
        assert len(left) * component.slots_per_page >= component.device.in_flight, "the source went"
    cache.check_integrity()
    assert cache.journal.n_in_flight == 1
    fence.set()
    assert cache.drain()
    cache.check_integrity()
    again = server.begin([*PROMPT, 1, 2])
    assert again.device_tokens == len(PROMPT), "its data is cache like any other"
    assert cache.admit(again).admitted
    server.prefill(again)
    cache.abort(again)
    cache.check_integrity()
    assert all(component.device.pinned == 0 for component in cache.tree.components)
    cache.close()


@pytest.mark.parametrize("name", sorted(SETUPS))
@pytest.mark.parametrize("cut", [4, 10])
@pytest.mark.rule("B5")
def test_a_node_split_while_it_is_loaded_gets_both_parts(name: str, cut: int) -> None:
    cache, server = on_host(SETUPS[name])
    fence = HeldFence()
    request = server.begin([*PROMPT, 1, 2])
    assert cache.admit(request).admitted
    cache.load_back(request, fence)
    other = server.begin([*PROMPT[:cut], 7, 8])
    cache.check_integrity()
    fence.set()
    assert cache.drain()
    cache.check_integrity()
    server.prefill(request)
    cache.abort(other)
    cache.finish(request)
    cache.check_integrity()
    cache.close()


class TendedPackage(PagedPackage):
    """A component that builds its own copies, and counts how they ended."""

    def __init__(self, name: str) -> None:
        super().__init__(name, Reach(Everything()))
        self.gate: threading.Event | None = None
        self.fails = False
        self.ended: list[tuple[str, Direction]] = []

    @hookimpl
    def build_hicache_transfers(
        self, component: Component, query: TransferQuery
    ) -> Sequence[PlaneCopy]:
        if self.fails:
            raise RuntimeError("no staging memory")
        copies = pair_planes(component, query)
        if self.gate is None or query.direction is Direction.BACKUP:
            return copies
        return [
            each._replace(source=cast(torch.Tensor, GatedRows(each.source, self.gate)))
            if each.layer
            else each
            for each in copies
        ]

    @hookimpl
    def commit_hicache_transfers(self, component: Component, query: TransferQuery) -> None:
        self.ended.append(("commit", query.direction))

    @hookimpl
    def abort_hicache_transfers(self, component: Component, query: TransferQuery) -> None:
        self.ended.append(("abort", query.direction))


def test_the_first_layer_can_be_read_while_the_second_is_on_its_way() -> None:
    package = TendedPackage("tended")
    cache, server = on_host(mixed((), package))
    component = cache.mounted[0].component
    for rows in component.device.lanes:
        rows.zero_()
    package.gate = threading.Event()
    request = server.begin([*PROMPT, 1, 2])
    assert cache.admit(request).admitted
    (transfer,) = cache.load_back(request)
    transfer.ticket.wait_layer(0, 5)
    assert transfer.ticket.layer_ready(0)
    assert not transfer.ticket.layer_ready(1)
    assert not request.ready
    planes = {
        spec[:2]: plane for spec, plane in zip(component.device.specs, component.device.planes)
    }
    assert planes[0, "a"].count_nonzero() > 0
    assert planes[1, "a"].count_nonzero() == 0
    package.gate.set()
    transfer.ticket.wait_layer(1, 5)
    assert cache.drain()
    server.prefill(request)
    assert package.ended[-1] == ("commit", Direction.LOAD_BACK)
    cache.close()


@pytest.mark.parametrize("beside", [(), ("full",), ("full", "swa", "mamba")])
def test_copies_that_cannot_be_built_leave_everything_as_it_was(beside: tuple[str, ...]) -> None:
    package = TendedPackage("tended")
    cache, server = on_host(mixed(beside, package))
    request = server.begin([*PROMPT, 1, 2])
    assert cache.admit(request).admitted
    before = ledgers(cache), tree_dump(cache)
    package.fails = True
    with pytest.raises(PluginHookError, match="'tended': hook build_hicache_transfers raised"):
        cache.load_back(request)
    assert (ledgers(cache), tree_dump(cache)) == before
    cache.check_integrity()
    package.fails = False
    server.load_back(request)
    server.prefill(request)
    # a backup that cannot be built is one that failed; the checkpoint stands
    package.fails = True
    assert cache.checkpoint(request)
    cache.check_integrity()
    cache.abort(request)
    cache.drain()
    cache.check_integrity()
    assert all(
        component.device.pinned == component.device.private == 0
        for component in cache.tree.components
    )
    package.fails = False
    cache.close()


class LostEngine(CpuTransferEngine):
    """An engine that refuses new work."""

    lost = False

    def submit(self, copies, fence=None):  # type: ignore[no-untyped-def]
        if self.lost:
            raise OSError("the device was lost")
        return super().submit(copies, fence)


@pytest.mark.parametrize("name", sorted(SETUPS))
@pytest.mark.rule("R4")
def test_an_engine_that_refuses_a_load_leaves_everything_as_it_was(name: str) -> None:
    engine = LostEngine()
    cache, server = on_host(SETUPS[name], engine=engine)
    request = server.begin([*PROMPT, 1, 2])
    assert cache.admit(request).admitted
    before = ledgers(cache), tree_dump(cache)
    engine.lost = True
    with pytest.raises(OSError, match="the device was lost"):
        cache.load_back(request)
    assert (ledgers(cache), tree_dump(cache)) == before
    engine.lost = False
    server.load_back(request)
    server.prefill(request)
    cache.check_integrity()
    cache.close()


def test_a_refused_load_leaves_no_trace_of_the_transfer_it_would_have_shared() -> None:
    engine = LostEngine()
    cache, server = on_host(SETUPS["full"], engine=engine)
    fence = HeldFence()
    part, whole = (server.begin([*tokens, 1]) for tokens in (PROMPT[:8], PROMPT))
    assert cache.admit(part).admitted
    shared = cache.load_back(part, fence)
    assert cache.admit(whole).admitted
    waited, engine.lost = whole.waits, True
    with pytest.raises(OSError, match="the device was lost"):
        cache.load_back(whole)
    assert whole.waits is waited
    assert cache.leases.shared_loads == 0
    engine.lost = False
    assert cache.load_back(whole)[:-1] == shared
    assert cache.leases.shared_loads == 1
    fence.set()
    for request in (part, whole):
        server.load_back(request)
        server.prefill(request)
        cache.finish(request)
    cache.check_integrity()
    cache.close()


SLOW_LINK = LoadModel(bandwidth_bytes_s=1.0, latency_s=0.0, prefill_tokens_s=1e9)
FAST_LINK = LoadModel(bandwidth_bytes_s=1e15, latency_s=0.0, prefill_tokens_s=1.0)


@pytest.mark.parametrize("name", ["full", "swa", "full+swa", "sinks", "full+chunked"])
def test_a_load_that_costs_more_than_computing_again_is_skipped_and_counted(name: str) -> None:
    cache, server = on_host(SETUPS[name], load=SLOW_LINK)
    request = server.begin([*PROMPT, 1, 2])
    assert request.anchor_tokens == 0
    assert not request.needs_load_back
    assert request.limited is not None
    assert "R8" in request.limited
    assert cache.leases.skipped_loads == 1
    assert cache.admit(request).admitted
    assert cache.load_back(request) == []
    server.prefill(request)
    cache.abort(request)
    cache.check_integrity()
    cache.close()
    cache, server = on_host(SETUPS[name], load=FAST_LINK)
    request = server.begin([*PROMPT, 1, 2])
    assert request.anchor_tokens == len(PROMPT)
    assert cache.leases.skipped_loads == 0
    cache.close()


@pytest.mark.parametrize("name", ["full+mamba", "swa+ssm", "full+swa+mamba"])
def test_a_load_that_brings_a_state_is_never_skipped(name: str) -> None:
    cache, server = on_host(SETUPS[name], load=SLOW_LINK)
    request = server.begin([*PROMPT, 1, 2])
    assert request.anchor_tokens == len(PROMPT)
    assert cache.leases.skipped_loads == 0
    assert cache.admit(request).admitted
    server.load_back(request)
    server.prefill(request)
    cache.close()


LAUNCHES = LoadModel(prefill_tokens_s=124_000, latency_s=4e-3, pass_s=18e-3, pass_tokens=4096)
"""As measured where the launches of a pass take longer than its tokens."""


@pytest.mark.parametrize(
    ("load", "chosen"),
    [
        (LAUNCHES, 0),  # its 18 tokens are free: their pass takes as long with two
        (LAUNCHES.model_copy(update={"pass_tokens": 16}), len(PROMPT)),  # one more pass
        (LAUNCHES.model_copy(update={"prefill_tokens_s": 700.0}), len(PROMPT)),  # 26 ms, not 18
        (LAUNCHES.model_copy(update={"prefill_tokens_s": 850.0}), 0),  # 21 ms, not 18
    ],
)
def test_a_prefix_that_fits_into_the_pass_that_must_run_is_computed(
    load: LoadModel, chosen: int
) -> None:
    cache, server = on_host(SETUPS["full"], load=load, guard="on")
    assert server.begin([*PROMPT, 1, 2]).anchor_tokens == chosen
    cache.close()


def passes_s(load: LoadModel, n_tokens: int) -> float:
    """Seconds of the passes over so many tokens."""
    took = 0.0
    while n_tokens > 0:
        size = min(n_tokens, load.pass_tokens)
        took += max(load.pass_s, size / load.prefill_tokens_s)
        n_tokens -= size
    return took


@settings(max_examples=50)
@given(
    st.builds(
        LoadModel,
        bandwidth_bytes_s=st.floats(1e4, 1e9),
        latency_s=st.floats(0, 0.05),
        prefill_tokens_s=st.floats(100, 1e5),
        pass_s=st.floats(0, 0.05),
        pass_tokens=st.integers(1, 24),
    ),
    st.integers(1, 40),
)
def test_the_cheaper_of_loading_and_computing_is_done(load: LoadModel, rest: int) -> None:
    cache, server = on_host(SETUPS["full"], load=load, guard="on")
    (mounted,) = cache.mounted
    nbytes = len(PROMPT) // cache.config.page_size * mounted.component.device.slot_nbytes
    computed_s = passes_s(load, len(PROMPT) + rest) - passes_s(load, rest)
    loaded_s = load.latency_s + nbytes / load.bandwidth_bytes_s
    anchor = server.begin([*PROMPT, *range(rest)]).anchor_tokens
    if not math.isclose(computed_s, loaded_s, abs_tol=1e-9):
        assert anchor == (len(PROMPT) if loaded_s < computed_s else 0)
    cache.close()


def test_nothing_in_the_life_of_a_request_waits_for_a_stuck_transfer() -> None:
    cache, server = on_host(
        SETUPS["full+swa+mamba"],
        timeout_s=0.1,
        mamba={"states": 64},
        engine=CpuTransferEngine(),
    )
    fence = HeldFence()
    started = time.monotonic()
    stuck = server.begin([*PROMPT, 1, 2])
    assert cache.admit(stuck).admitted
    cache.load_back(stuck, fence)
    for number in range(10):
        other = server.begin(range(1000 * number + 1000, 1000 * number + 1012), reserve=2)
        assert cache.admit(other).admitted
        server.prefill(other)
        cache.checkpoint(other)
        server.decode(other, 2)
        cache.finish(other)
        cache.poll()
    assert not stuck.ready
    assert not cache.drain()
    assert time.monotonic() - started < 30
    fence.set()
    stuck.waits[0].ticket.wait(60)
    cache.poll()
    server.prefill(stuck)
    cache.check_integrity()
    cache.close()
