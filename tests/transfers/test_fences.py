"""A copy to HOST waits for the computation that produced its data, for every caller (B4)."""

from __future__ import annotations

import threading

from kvgraft import Cache, Tier, TokenKey, WritePolicy

PROMPT = list(range(8))


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
