"""A copy to HOST waits for the computation that produced its data, for every caller (B4)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvgraft import Cache, Tier, TokenKey, WritePolicy
from kvgraft.types import Direction

from ..serving.life import prefilled

PROMPT = list(range(8))

SIZES: dict[str, Any] = {
    "page_size": 4,
    "device_tokens": 64,
    "host_tokens": 64,
    "write_policy": "write-through",
}


def test_a_backup_started_by_a_later_hit_still_waits_for_the_producers_fence() -> None:
    cache = Cache.open(
        ["full"],
        page_size=4,
        device_tokens=64,
        host_tokens=64,
        write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE,
    )
    produced = threading.Event()
    request = cache.begin(TokenKey(PROMPT))
    assert cache.admit(request).admitted
    cache.allocate(request, 8)
    cache.computed(request, 8)
    slots = cache.table(request, "full").tolist()
    cache.finish(request, fence=produced)

    again = cache.begin(TokenKey([*PROMPT, 99]))
    assert again.anchor_tokens == 8
    (node,) = cache.tree.nodes()
    assert node.operations is not None
    ticket = cache.journal.find(node.operations[0]).ticket
    assert not ticket.wait(0.3)
    for lanes in cache.mounted[0].component.device.lanes:
        lanes[slots] = 7
    produced.set()
    assert cache.drain()
    mirror = cache.mounted[0].component.host
    assert mirror is not None
    stored = memoryview(node.cells[0].host or b"").cast("i").tolist()
    assert all(bool((lanes[stored] == 7).all()) for lanes in mirror.lanes)
    cache.abort(again)
    assert cache.evict("full", 2) == 2
    assert cache.evict("full", 2, Tier.HOST) == 2
    cache.close()


@pytest.mark.parametrize("call", ["finish", "checkpoint", "a declined checkpoint"])
def test_a_backup_waits_for_the_latest_fence_that_was_named(call: str) -> None:
    cache = Cache.open(
        ["full"],
        page_size=4,
        device_tokens=64,
        host_tokens=64,
        write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE,
    )
    first, latest = threading.Event(), threading.Event()
    cache.finish(prefilled(cache, PROMPT), first)
    if call == "finish":
        cache.finish(prefilled(cache, [7, *PROMPT]), latest)
    else:
        tokens = [7, *PROMPT] if call == "checkpoint" else [7]
        request = prefilled(cache, tokens)
        assert cache.checkpoint(request, latest) == (call == "checkpoint")
        cache.abort(request)
    first.set()

    again = cache.begin(TokenKey([*PROMPT, 99]))
    (transfer,) = [
        cache.journal.find(operation)
        for node in cache.tree.nodes()
        for operation in node.operations or ()
    ]
    assert not transfer.ticket.wait(0.2)
    latest.set()
    assert cache.drain()
    cache.abort(again)
    cache.close()


@pytest.mark.parametrize("last", ["named first", "named second"])
def test_a_fence_that_is_named_again_does_not_undo_a_newer_one(last: str) -> None:
    """It is the old point, or the engine uses the object for a newer one, reached last."""
    cache = Cache.open(["full"], **SIZES)
    first, second = threading.Event(), threading.Event()
    early, late = prefilled(cache, PROMPT), prefilled(cache, [7, *PROMPT])
    cache.computed(early, 0, first)
    cache.computed(late, 0, second)
    assert cache.checkpoint(early, first)
    earlier, later = (second, first) if last == "named first" else (first, second)
    earlier.set()
    (transfer,) = cache.journal.queues[Direction.BACKUP]
    assert not transfer.ticket.wait(0.2)
    later.set()
    assert cache.drain()
    assert not transfer.failed
    cache.abort(early)
    cache.abort(late)
    cache.close()


def test_a_newer_fence_covers_those_before_it() -> None:
    """Of a step that the engine gave up, say: its fence is never reached."""
    cache = Cache.open(["full"], **SIZES)
    given_up, also_given_up, newest = (threading.Event() for _ in range(3))
    request = prefilled(cache, PROMPT)
    for fence in (given_up, also_given_up, given_up, newest):
        cache.computed(request, 0, fence)
    newest.set()
    assert cache.checkpoint(request)
    assert cache.drain()
    cache.abort(request)
    cache.close()


@pytest.mark.parametrize("call", ["finish", "checkpoint"])
def test_a_fence_named_by_a_request_of_a_cleared_namespace_covers_others_data(call: str) -> None:
    cache = Cache.open(["full"], **SIZES)
    other = prefilled(cache, PROMPT)
    cleared = cache.begin(TokenKey(PROMPT, "gone"))
    assert cache.admit(cleared).admitted
    assert cache.allocate(cleared, 8)
    cache.computed(cleared, 8)
    cache.clear("gone")
    produced = threading.Event()
    getattr(cache, call)(cleared, produced)
    assert cache.checkpoint(other)
    (transfer,) = cache.journal.queues[Direction.BACKUP]
    assert not transfer.ticket.wait(0.2)
    produced.set()
    assert cache.drain()
    assert not transfer.failed
    cache.close()
