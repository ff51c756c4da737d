"""DEVICE to HOST: its time and data, and nothing counts before it is acknowledged (B1 to B7)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvgraft import Direction, Tier, TokenKey, WritePolicy
from kvgraft.cache import Cache
from kvgraft.policies.policy import is_left_behind
from kvgraft.transfers import CpuTransferEngine
from kvgraft_testing.stepped import SteppedTransferEngine

from ..serving.server import Server
from ..serving.setups import SETUPS
from .gates import Broken, HeldFence, kept_on, pages_on, settle

PROMPT = list(range(100, 116))
MORE = [*PROMPT, *range(200, 208)]


def computed(server: Server, tokens: list[int], fence: object = None) -> None:
    """A request computes `tokens` and finishes; the copies wait for `fence`."""
    request = server.start(tokens)
    server.prefill(request)
    server.cache.finish(request, fence)  # type: ignore[arg-type]


def resumed(server: Server, tokens: list[int]) -> int:
    """Resume from HOST alone, every byte checked; the tokens found."""
    server.empty_device()
    request = server.start([*tokens, 1, 2])
    found = request.anchor_tokens
    assert request.device_tokens == 0
    server.prefill(request)
    server.cache.abort(request)
    return found


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_nothing_is_published_before_the_copy_is_acknowledged(name: str) -> None:
    cache = SETUPS[name].open(device_tokens=256)
    server, fence = Server(cache), HeldFence()
    mirrored = [component.name for component in cache.tree.components if not component.home_is_host]
    computed(server, PROMPT, fence)
    if not mirrored:
        cache.close()
        return
    assert fence.met.wait(60)
    assert cache.poll() == 0
    assert all(pages_on(cache, PROMPT, each, Tier.HOST) == [] for each in mirrored)
    cache.check_integrity()
    fence.set()
    time.sleep(0.05)
    # the copies are done, but the scheduler has not taken them in
    assert all(pages_on(cache, PROMPT, each, Tier.HOST) == [] for each in mirrored)
    assert cache.drain()
    for each in mirrored:
        kept = kept_on(cache, PROMPT, each)
        assert pages_on(cache, PROMPT, each, Tier.HOST) == kept != []
    cache.check_integrity()
    assert resumed(server, PROMPT) == len(PROMPT)
    cache.close()


def test_copies_a_checkpoint_starts_wait_for_its_fence() -> None:
    cache = SETUPS["full"].open(device_tokens=256)
    server, fence = Server(cache), HeldFence()
    request = server.start([*PROMPT, 1])
    server.prefill(request)
    assert cache.checkpoint(request, fence)
    assert fence.met.wait(60)
    assert cache.poll() == 0
    assert pages_on(cache, PROMPT, "full", Tier.HOST) == []
    fence.set()
    assert cache.drain()
    assert len(pages_on(cache, PROMPT, "full", Tier.HOST)) == len(PROMPT) // 2
    cache.close()


@pytest.mark.parametrize("name", sorted(SETUPS))
@pytest.mark.rule("L5", "L8")
def test_the_source_of_a_copy_is_not_reused_before_its_end(name: str) -> None:
    cache = SETUPS[name].open(device_tokens=128, host_tokens=256)
    server, fence = Server(cache), HeldFence()
    computed(server, PROMPT, fence)
    in_flight = cache.journal.n_in_flight
    server.empty_device()
    if in_flight:
        for component in cache.tree.components:
            assert pages_on(cache, PROMPT, component.name, Tier.DEVICE), "evicted under a copy"
    # others write to every slot that is left
    others = []
    for number in range(50):
        other = server.begin(range(1000 * number + 1000, 1000 * number + 1012))
        if not cache.admit(other).admitted:
            cache.abort(other)
            break
        server.prefill(other)
        others.append(other)
    assert others
    fence.set()
    assert cache.drain()
    for other in others:
        cache.abort(other)
    cache.check_integrity()
    assert resumed(server, PROMPT) == len(PROMPT)
    cache.close()


@pytest.mark.parametrize("name", ["full", "full+swa", "full+swa+mamba", "sinks"])
def test_a_childs_backup_is_not_published_when_its_parents_failed(name: str) -> None:
    engine = SteppedTransferEngine()
    cache = SETUPS[name].open(device_tokens=256, host_tokens=256, engine=engine)
    server = Server(cache)
    for tokens in (PROMPT, MORE):
        request = server.begin(tokens)
        assert cache.admit(request).admitted
        server.prefill(request)
        cache.finish(request)
    n_parents = sum(len(ticket.copies) > 0 for ticket in engine.pending)
    assert n_parents >= 2
    engine.fail(0)
    engine.run_all()
    cache.poll()
    cache.check_integrity()
    base = cache.tree.components[0]
    if base.is_prefix_closed:
        assert pages_on(cache, MORE, base.name, Tier.HOST) == []
        counters = cache.journal.counters[Direction.BACKUP]
        assert counters.completed == 0
        assert counters.failed == counters.started
    # the next insert under the gap backs up parent and child
    request = server.begin([*MORE, 1, 2])
    assert cache.admit(request).admitted
    server.prefill(request)
    cache.finish(request)
    engine.run_all()
    cache.poll()
    cache.check_integrity()
    if base.is_prefix_closed:
        tokens = [*MORE, 1, 2]
        everything = pages_on(cache, tokens, base.name, Tier.DEVICE)
        assert pages_on(cache, tokens, base.name, Tier.HOST) == everything
    cache.close()


@pytest.mark.parametrize(
    ("name", "narrow"),
    [("full+swa", "swa"), ("full+sinks", "sinks"), ("full+quartered+ssm", "quartered")],
)
@pytest.mark.rule("B2")
def test_a_node_is_backed_up_for_all_components_or_not_at_all(name: str, narrow: str) -> None:
    sizes: dict[str, Any] = {narrow: {"host_tokens": 2}}
    cache = SETUPS[name].open(**sizes)
    server = Server(cache)
    computed(server, PROMPT)
    assert cache.drain()
    cache.check_integrity()
    for node in cache.tree.nodes():
        held = [
            cell
            for cell in node.cells
            if cell.device is not None and not is_left_behind(cell.stamp)
        ]
        assert {cell.host is not None for cell in held} in ({True}, {False})
    # a node of one page fits
    assert len(pages_on(cache, PROMPT, narrow, Tier.HOST)) <= 1
    cache.close()


@pytest.mark.parametrize("name", sorted(SETUPS))
@pytest.mark.parametrize("cut", [4, 8, 14])
@pytest.mark.rule("B5")
def test_a_node_split_during_its_copy_gives_each_part_its_share(name: str, cut: int) -> None:
    cache = SETUPS[name].open(device_tokens=256, host_tokens=256)
    server, fence = Server(cache), HeldFence()
    computed(server, PROMPT, fence)
    n_nodes = cache.tree.n_nodes
    # another request leaves the prefix in the middle of the data being copied
    other = server.start([*PROMPT[:cut], 1, 2, 3, 4])
    server.prefill(other)
    cache.finish(other)
    assert cache.tree.n_nodes > n_nodes
    cache.check_integrity()
    fence.set()
    assert cache.drain()
    cache.check_integrity()
    assert resumed(server, PROMPT) == len(PROMPT)
    assert resumed(server, [*PROMPT[:cut], 1, 2, 3, 4]) == cut + 4
    cache.close()


MIRRORED = [name for name in sorted(SETUPS) if name not in ("hisparse", "hisparse+sinks")]


@pytest.mark.parametrize("name", MIRRORED)
@pytest.mark.parametrize("policy", list(WritePolicy))
def test_policies_back_up_at_the_first_touch_the_second_or_at_eviction(
    name: str, policy: WritePolicy
) -> None:
    cache = SETUPS[name].open(device_tokens=256, host_tokens=256, policy=policy)
    server = Server(cache)
    base = cache.tree.components[0].name

    def backed_up() -> bool:
        cache.drain()
        on_host = pages_on(cache, PROMPT, base, Tier.HOST)
        assert on_host in ([], kept_on(cache, PROMPT, base) or on_host)
        return bool(on_host)

    computed(server, PROMPT)
    assert backed_up() is (policy is WritePolicy.WRITE_THROUGH)
    touch = server.begin([*PROMPT, 1])
    assert touch.anchor_tokens == len(PROMPT)
    cache.abort(touch)
    assert backed_up() is (policy is not WritePolicy.WRITE_BACK)
    server.empty_device()
    assert backed_up()
    cache.check_integrity()
    assert resumed(server, PROMPT) == len(PROMPT)
    cache.close()


@pytest.mark.parametrize(
    ("name", "late"),
    [("full+swa", "swa"), ("full+sinks", "sinks"), ("full+mamba", "mamba"), ("swa+ssm", "ssm")],
)
@pytest.mark.rule("B7")
def test_data_that_a_node_gains_after_its_backup_is_backed_up(name: str, late: str) -> None:
    cache = SETUPS[name].open(device_tokens=256, host_tokens=256)
    server = Server(cache)
    short = PROMPT[:10]
    computed(server, PROMPT)
    assert cache.drain()
    before = pages_on(cache, short, late, Tier.HOST)
    # the shorter prompt ends where that component left nothing that lasted
    left = set(pages_on(cache, PROMPT, late, Tier.DEVICE)) - set(kept_on(cache, PROMPT, late))
    cache.evict(late, len(left) * cache.tree.component(late).slots_per_page)
    request = server.start([*short, 1])
    assert request.anchor_tokens < len(short)
    cache.abort(request)
    computed(server, short)
    assert cache.drain()
    after = pages_on(cache, short, late, Tier.HOST)
    assert set(after) > set(before)
    assert 4 in after
    cache.check_integrity()
    assert resumed(server, short) == len(short)
    cache.close()


@pytest.mark.parametrize("name", MIRRORED)
def test_a_failed_backup_leaves_no_trace_and_can_be_made_again(name: str) -> None:
    cache = SETUPS[name].open(device_tokens=256, host_tokens=256)
    server = Server(cache)
    computed(server, PROMPT, Broken())
    assert cache.drain()
    cache.check_integrity()
    counters = cache.journal.counters[Direction.BACKUP]
    assert counters.failed == counters.started > 0
    for component in cache.tree.components:
        assert pages_on(cache, PROMPT, component.name, Tier.HOST) == []
        assert component.host is not None
        assert component.host.free == component.host.capacity
        assert component.device.pinned == component.device.in_flight == 0
    reached = HeldFence()
    reached.set()
    cache.journal.fence = reached
    computed(server, MORE, reached)
    assert cache.drain()
    cache.check_integrity()
    assert resumed(server, MORE) == len(MORE)
    cache.close()


def test_draining_is_bounded_and_says_whether_all_ended() -> None:
    cache = SETUPS["full"].open(timeout_s=0.1, engine=CpuTransferEngine())
    server, fence = Server(cache), HeldFence()
    computed(server, PROMPT, fence)
    started = time.monotonic()
    assert not cache.drain()
    assert time.monotonic() - started < 30
    fence.set()
    settle(cache)
    cache.close()


def test_room_for_a_backup_is_not_made_of_the_backup_above_it() -> None:
    """Its descendants would be of no use, and both copies would be gone."""
    sizes: dict[str, Any] = {"page_size": 1, "device_tokens": 64, "host_tokens": 16}
    with Cache.open(
        {"full": {"n_layers": 1}}, write_policy="write-through", load=None, **sizes
    ) as cache:
        for n_tokens in (15, 18):
            request = cache.begin(TokenKey(range(n_tokens)))
            assert cache.admit(request).admitted
            n_new = n_tokens - request.computed
            assert cache.allocate(request, n_new)
            cache.computed(request, n_new)
            cache.finish(request)
            assert cache.drain()
        cache.evict("full", 64)
        found = cache.begin(TokenKey(range(30)))
        assert (found.anchor_tokens, found.device_tokens) == (15, 0)
        cache.abort(found)
        cache.check_integrity()


@pytest.mark.parametrize("turns", [2, 3])
def test_a_conversations_gap_on_host_is_closed_by_its_next_turn(turns: int) -> None:
    """HOST evicted data that DEVICE has: the next turn copies it again, from the root down."""
    with SETUPS["full"].open(device_tokens=256, host_tokens=256) as cache:
        server = Server(cache)
        tokens = [number + 300 for number in range(8 * turns)]
        for turn in range(1, turns):
            computed(server, tokens[: 8 * turn])
            assert cache.drain()
        cache.evict("full", 128, Tier.HOST)
        assert pages_on(cache, tokens, "full", Tier.HOST) == []
        computed(server, tokens)
        assert cache.drain()
        assert pages_on(cache, tokens, "full", Tier.HOST) == list(range(len(tokens) // 2))
        assert resumed(server, tokens) == len(tokens)


@pytest.mark.parametrize("name", ["full+swa", "full+swa+mamba"])
def test_slots_a_request_never_took_do_not_stand_in_the_way_of_its_own_backups(name: str) -> None:
    """Its window's pool has the slots that it is promised, and no more."""
    setup, sizes = SETUPS[name], {"device_tokens": 10}
    with setup.open(device_tokens=256, host_tokens=256, swa=sizes) as cache:
        server = Server(cache)
        request = server.start(PROMPT, reserve=100, chunk=4)
        server.prefill(request)
        cache.finish(request)
        assert cache.drain()
        assert resumed(server, PROMPT) == len(PROMPT)
