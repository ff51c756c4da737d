"""Write-back and room: demoted with everything they hold, never blocked (E4, E5)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvgraft import Direction, GuardMode, Tier, WritePolicy
from kvgraft.config import parse_config
from kvgraft.transfers import CpuTransferEngine, Ticket
from kvgraft_testing.stepped import SteppedTransferEngine

from ..serving.engines import PromptEngine
from ..serving.server import Server
from ..serving.setups import SETUPS
from .gates import HeldFence, kept_on, pages_on, settle

PROMPT = list(range(100, 116))
WRITE_BACK = WritePolicy.WRITE_BACK
MIRRORED = [name for name in sorted(SETUPS) if name not in ("hisparse", "hisparse+sinks")]


@pytest.mark.parametrize("name", MIRRORED)
def test_eviction_takes_windows_and_states_to_host_as_well(name: str) -> None:
    cache = SETUPS[name].open(device_tokens=128, host_tokens=256, policy=WRITE_BACK)
    server = Server(cache)
    server.serve(PROMPT)
    on_device = {
        component.name: kept_on(cache, PROMPT, component.name)
        for component in cache.tree.components
    }
    assert cache.journal.counters[Direction.BACKUP].started == 0
    server.empty_device()
    for component in cache.tree.components:
        assert component.device.free == component.device.capacity
        assert pages_on(cache, PROMPT, component.name, Tier.HOST) == on_device[component.name] != []
    cache.check_integrity()
    request = server.start([*PROMPT, 1, 2])
    assert request.anchor_tokens == len(PROMPT)
    server.prefill(request)
    cache.abort(request)
    # data with a backup is not copied a second time
    started = cache.journal.counters[Direction.BACKUP].started
    server.empty_device()
    assert cache.journal.counters[Direction.BACKUP].started == started
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("name", MIRRORED)
def test_a_backup_that_fails_does_not_block_the_device(name: str) -> None:
    engine = PromptEngine()
    cache = SETUPS[name].open(device_tokens=32, host_tokens=64, policy=WRITE_BACK, engine=engine)
    server = Server(cache)
    server.serve(PROMPT)
    engine.failing = True
    for number in range(4):
        server.serve(range(1000 * number + 1000, 1000 * number + 1016))
        cache.check_integrity()
    counters = cache.journal.counters[Direction.BACKUP]
    assert counters.failed == counters.started > 0
    server.empty_device()
    for component in cache.tree.components:
        assert component.device.free == component.device.capacity
        assert component.host is not None
        assert component.host.free == component.host.capacity
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("name", MIRRORED)
def test_without_room_on_host_the_victim_is_dropped(name: str) -> None:
    narrow = list(SETUPS[name].options)[-1]
    size = {"host_states": 1} if narrow in ("mamba", "ssm") else {"host_tokens": 2}
    sizes: dict[str, Any] = {narrow: size}
    cache = SETUPS[name].open(device_tokens=128, policy=WRITE_BACK, **sizes)
    server = Server(cache)
    for number in range(3):
        server.serve(range(1000 * number + 1000, 1000 * number + 1016))
    server.empty_device()
    assert all(
        component.device.free == component.device.capacity for component in cache.tree.components
    )
    cache.check_integrity()
    cache.close()


def test_a_backup_that_is_stuck_costs_a_bounded_wait_and_another_victim_instead() -> None:
    engine = CpuTransferEngine()
    cache = SETUPS["full+swa"].open(
        device_tokens=64, policy=WRITE_BACK, timeout_s=0.1, engine=engine
    )
    server = Server(cache)
    older, newer = list(range(500, 520)), list(range(600, 620))
    server.serve(older)
    server.serve(newer)
    # the only worker waits for something else
    fence = HeldFence()
    engine.submit([], fence)
    assert fence.met.wait(60)
    request = server.begin(range(700, 740))
    assert cache.admit(request).admitted
    started = time.monotonic()
    assert cache.allocate(request, 40)
    assert time.monotonic() - started < 30
    cache.check_integrity()
    assert pages_on(cache, older, "full", Tier.DEVICE) == []
    assert pages_on(cache, newer, "full", Tier.DEVICE) == []
    fence.set()
    settle(cache)
    cache.check_integrity()
    assert len(pages_on(cache, older, "full", Tier.HOST)) == 10
    assert pages_on(cache, newer, "full", Tier.HOST) == []
    cache.close()


@pytest.mark.parametrize("ends", ["runs", "fails"])
def test_pages_whose_copy_is_on_its_way_are_demoted_and_lost_only_if_it_fails(ends: str) -> None:
    engine = SteppedTransferEngine()
    cache = SETUPS["full+swa"].open(
        policy=WRITE_BACK, timeout_s=1e-3, engine=engine, guard=GuardMode.ON
    )
    server, swa = Server(cache), cache.tree.component("swa")
    short = PROMPT[:8]
    server.serve(short)
    server.serve(PROMPT)
    cache.evict("swa", 4)  # the window of `short`, on two nodes: their copies stay in flight
    assert len(engine.pending) == 2
    for transfer in cache.journal.queues[Direction.BACKUP]:
        transfer.late = False  # as if nobody had waited for them
    server.serve(short)  # computed again, with the same place in the tree
    dropped = swa.device.evicted["deleted"] + swa.device.evicted["leaf"]
    lost = sum(cache.points.lost.values())
    cache.evict("full", cache.tree.component("full").device.capacity)
    assert pages_on(cache, short, "swa", Tier.DEVICE) == []
    assert swa.device.evicted["deleted"] + swa.device.evicted["leaf"] == dropped
    assert sum(cache.points.lost.values()) == lost
    for _ in range(2 if ends == "fails" else 0):
        engine.fail()
    engine.run_all()
    cache.poll()
    assert pages_on(cache, short, "swa", Tier.HOST) == ([0, 1, 2, 3] if ends == "runs" else [])
    assert (sum(cache.points.lost.values()) > lost) == (ends == "fails")
    cache.check_integrity()
    cache.close()


class Endless(PromptEngine):
    """No copy ends while it `hangs`."""

    hangs = True

    def hurry(self, ticket: Ticket) -> None:
        if not self.hangs:
            super().hurry(ticket)


@pytest.mark.parametrize("name", MIRRORED)
def test_an_admitted_request_gets_its_slots_though_no_copy_ever_ends(name: str) -> None:
    with SETUPS[name].open(
        device_tokens=64, policy=WRITE_BACK, timeout_s=1e-3, engine=Endless(), guard=GuardMode.ON
    ) as cache:
        server = Server(cache)
        for number in range(12):
            server.serve(range(1000 * number + 1000, 1000 * number + 1030))
            cache.poll()
        backups = cache.stats().backups
        assert backups.started > backups.completed == 0


def test_data_is_copied_as_far_as_promises_do_without_it_and_dropped_where_copies_do_not_end() -> (
    None
):
    engine = Endless()
    with SETUPS["full"].open(
        device_tokens=40, policy=WRITE_BACK, timeout_s=1e-3, engine=engine
    ) as cache:
        server, first = Server(cache), list(range(500, 530))
        server.serve(first)
        request = server.begin(range(700, 722))
        assert cache.admit(request).admitted  # 12 of the 20 pages are promised to it
        assert cache.allocate(request, 22)
        assert pages_on(cache, first, "full", Tier.DEVICE) == []
        assert len(engine.pending) == 1
        engine.run_all()
        cache.poll()
        cache.check_integrity()
        assert pages_on(cache, first, "full", Tier.HOST) == list(range(7, 15))


def test_a_state_that_is_promised_is_kept_though_no_copy_ends() -> None:
    with SETUPS["full+mamba"].open(
        device_tokens=128,
        mamba={"states": 3},
        policy=WRITE_BACK,
        timeout_s=1e-3,
        engine=Endless(),
    ) as cache:
        server = Server(cache)
        server.serve(range(500, 512))
        server.serve(range(600, 612))
        request = server.start(range(900, 917))
        boundary = request.checkpoints[0]
        server.step(request, 2 * boundary)
        cache.evict("mamba", 2, Tier.DEVICE)
        assert cache.allocate(request, 1)
        server.prefill(request)
        cache.abort(request)
        assert server.begin(range(900, 917)).anchor_tokens == 2 * boundary
        cache.check_integrity()


@pytest.mark.parametrize("name", MIRRORED)
@pytest.mark.rule("E5")
def test_host_eviction_leaves_the_device_alone(name: str) -> None:
    cache = SETUPS[name].open(device_tokens=128, host_tokens=128)
    server = Server(cache)
    server.serve(PROMPT)
    for component in cache.tree.components:
        assert component.host is not None
        assert pages_on(cache, PROMPT, component.name, Tier.HOST)
    on_device = {
        component.name: pages_on(cache, PROMPT, component.name, Tier.DEVICE)
        for component in cache.tree.components
    }
    for component in cache.tree.components:
        assert component.host is not None
        cache.evict(component.name, component.host.capacity, Tier.HOST)
    for component in cache.tree.components:
        assert pages_on(cache, PROMPT, component.name, Tier.HOST) == []
        assert pages_on(cache, PROMPT, component.name, Tier.DEVICE) == on_device[component.name]
    cache.check_integrity()
    request = server.start([*PROMPT, 1, 2])
    assert request.device_tokens == len(PROMPT)
    server.prefill(request)
    cache.close()


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_asked_for_the_impossible_eviction_returns_short(name: str) -> None:
    cache = SETUPS[name].open(device_tokens=128, host_tokens=128)
    server = Server(cache)
    server.serve(PROMPT)
    holder = server.start([*PROMPT, 1, 2])
    for component in cache.tree.components:
        for tier, ledger in ((Tier.DEVICE, component.device), (Tier.HOST, component.host)):
            assert ledger is not None
            free = ledger.free
            freed = cache.evict(component.name, ledger.capacity + 5, tier)
            assert freed == ledger.free - free
            assert freed < ledger.capacity + 5
    server.prefill(holder)
    cache.abort(holder)
    cache.check_integrity()
    cache.close()


def test_data_on_its_way_to_host_keeps_its_descendants() -> None:
    """A window's page leaves HOST above sequences whose own prefix is being copied."""
    engine = Endless()
    engine.hangs = False
    with SETUPS["full+swa"].open(
        device_tokens=128, host_tokens=256, policy=WRITE_BACK, timeout_s=0.1, engine=engine
    ) as cache:
        server = Server(cache)
        server.serve(PROMPT[:8])
        server.serve(PROMPT)
        cache.evict("swa", 4)
        cache.evict("full", 4)
        cache.drain()
        assert pages_on(cache, PROMPT, "swa", Tier.DEVICE) == []
        assert pages_on(cache, PROMPT, "full", Tier.HOST) == [4, 5, 6, 7]
        engine.hangs = True
        cache.evict("full", 4)
        assert pages_on(cache, PROMPT, "full", Tier.DEVICE) == []
        assert pages_on(cache, PROMPT[:8], "swa", Tier.HOST)
        cache.evict("swa", 1, Tier.HOST)
        engine.hangs = False
        cache.drain()
        assert pages_on(cache, PROMPT, "full", Tier.HOST) == list(range(8))
        cache.check_integrity()


STORED: dict[str, Any] = {"storage": {"model": "m", "weights": "w"}}


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({}, WRITE_BACK),
        ({"write_policy": None}, WRITE_BACK),
        ({"host_tokens": 64, "storage": None, "tenants": {}}, WRITE_BACK),
        (STORED, WritePolicy.WRITE_THROUGH),
        ({"tenants": {"chat": {"namespaces": ["chat"]}}}, WritePolicy.WRITE_THROUGH),
        ({"write_policy": "write-back", **STORED}, WRITE_BACK),
        ({"write_policy": "write-through"}, WritePolicy.WRITE_THROUGH),
    ],
)
def test_write_back_is_the_default_but_with_a_store_or_tenants(
    settings: dict[str, Any], policy: WritePolicy
) -> None:
    config = parse_config({"components": ["full"], "device_tokens": 64, **settings})
    assert config.write_policy is policy
