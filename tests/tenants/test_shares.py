"""Tenants' shares: guarantees, borrowing, weights and limits, and the settings that say so."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import Cache, ConfigError, TokenKey
from kvgraft.admission import Outcome
from kvgraft.errors import ContractViolation
from kvgraft.policies.policy import is_left_behind
from kvgraft.policies.recency import RecencyQueue
from kvgraft.tree import eviction
from kvgraft.types import Tier

from .engine import PAGE, Player, held

Tenants = dict[str, dict[str, Any]]

HALF: Tenants = {"a": {"namespaces": ["a"], "guarantee": 0.5}}


def tokens(number: int, pages: int) -> range:
    """Pages of a sequence of its own, and one token more."""
    return range(1_000 * number, 1_000 * number + pages * PAGE + 1)


def has(player: Player, tenant: int, tier: Tier = Tier.DEVICE, component: str = "full") -> int:
    return held(player.cache).get((component, tier, tenant), 0)


# -- guarantees (K4)


@pytest.mark.parametrize("components", [("full",), ("full", "swa", "mamba")])
def test_a_flood_takes_what_was_borrowed_and_nothing_of_a_guarantee(
    components: tuple[str, ...],
) -> None:
    player = Player(components, HALF)
    for number in range(3):
        player.serve("a", tokens(number, 8))
    before = has(player, 0)
    assert before > 16, "it borrowed"
    for number in range(6):
        player.serve("b", tokens(100 + number, 14))
    assert has(player, 0) == 16, "half of 32 pages, to the page"
    for tier in (Tier.DEVICE, Tier.HOST):
        assert has(player, 0, tier) >= 16
        assert has(player, 1, tier) == 14
    assert player.cache.stats().tenants["a"].device["full"].lost == before - 16


def test_an_unused_guarantee_is_borrowed_and_given_back_on_demand() -> None:
    player = Player(("full",), HALF)
    for number in range(6):
        player.serve("b", tokens(number, 8))
    assert has(player, 1) == 24, "data lies in the idle half"
    player.serve("a", tokens(100, 15), reserve=PAGE - 1)
    assert has(player, 0) == 16
    assert has(player, 1) in (8, 16), "it gave what the request asked for, in nodes of 8 pages"


def test_running_requests_leave_others_guarantees_alone() -> None:
    player = Player(("full",), HALF)
    first, _ = player.begin("b", tokens(1, 12))
    assert first is not None
    second, decision = player.begin("b", tokens(2, 12))
    assert second is None
    assert decision.outcome is Outcome.DEFERRED
    mine, decision = player.begin("a", tokens(3, 14))
    assert mine is not None, str(decision)


def short_of_windows() -> Player:
    """Of `a`, all pages are guaranteed and some windows borrowed; `b` needs windows."""
    tenants: Tenants = {"a": {"namespaces": ["a"], "guarantee": 0.4}, "b": {"namespaces": ["b"]}}
    player = Player(("full", "swa"), tenants, device_tokens=64 * PAGE, host_tokens=0)
    for number in range(7):
        player.serve("a", tokens(number, 2))
    assert (has(player, 0), has(player, 0, component="swa")) == (14, 14)
    return player


def flood_windows(player: Player) -> None:
    for number in range(3):
        player.serve("b", tokens(100 + number, 10))


def test_a_leaf_goes_as_a_whole_only_where_all_of_it_was_borrowed() -> None:
    player = short_of_windows()
    flood_windows(player)
    assert has(player, 0, component="swa") == 8, "windows that were borrowed went"
    assert has(player, 0) == 14, "the wide pool was not short, and all of it is guaranteed"


@pytest.mark.plain_build
def test_with_whole_leaves_pages_are_lost_that_are_guaranteed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    player = short_of_windows()
    monkeypatch.setattr(eviction, "_all_borrowed", lambda *given: True)
    with pytest.raises(ContractViolation, match=r"K4: component 'full': tenant 'a' went from 14"):
        flood_windows(player)


# -- who is first (K5)


def test_the_tenant_that_borrowed_most_for_its_weight_gives_first() -> None:
    tenants: Tenants = {
        "light": {"namespaces": ["light"], "weight": 1},
        "heavy": {"namespaces": ["heavy"], "weight": 3},
    }
    player = Player(("full",), tenants, host_tokens=0)
    for number in range(20):
        player.serve("light", tokens(2 * number, 2))
        player.serve("heavy", tokens(2 * number + 1, 2))
    light, heavy = has(player, 0), has(player, 1)
    assert light + heavy >= 28
    assert 2.4 < heavy / light <= 4, "about a quarter and three"


def test_data_that_a_tenant_left_behind_is_within_its_guarantee_as_well() -> None:
    tenants: Tenants = {"a": {"namespaces": ["a"], "guarantee": 0.5}, "b": {"namespaces": ["b"]}}
    player = Player(("full", "swa"), tenants, host_tokens=0)
    request, _ = player.begin("a", tokens(1, 12), chunk=PAGE)
    assert request is not None
    for _ in range(6):
        player.step(request)

    def behind() -> list[int]:
        queue = player.cache.tree.by_name["swa"].device.queue
        return [node.ident for stamp, node in queue if is_left_behind(stamp) and node.tenant == 0]

    before = behind()
    assert before, "windows were left behind"
    for number in range(8):
        player.serve("b", tokens(100 + number, 5))
    assert behind() == before, "they are within a guarantee"


# -- limits


def test_a_tenant_at_its_limit_evicts_its_own_data() -> None:
    tenants: Tenants = {"a": {"namespaces": ["a"], "limit": 0.25}, "default": {}}
    player = Player(("full",), tenants)
    player.serve("b", tokens(100, 8))
    for number in range(5):
        player.serve("a", tokens(number, 4))
    for tier in (Tier.DEVICE, Tier.HOST):
        assert 4 <= has(player, 0, tier) <= 8
        assert has(player, 1, tier) == 8, "the pool was not short"


def test_a_request_beyond_its_tenants_limit_is_refused_with_the_numbers() -> None:
    player = Player(("full",), {"a": {"namespaces": ["a"], "limit": 0.25}})
    _, decision = player.begin("a", tokens(1, 8))
    assert decision.outcome is Outcome.NEVER_FITS
    assert str(decision) == (
        "never fits; component 'full' device pool: needs 10 slots, the pool has 8 for tenant "
        "'a': its requests have 0, its guarantee is 0, its limit 8; others' guarantees are kept "
        "for them, see the setting tenants"
    )
    held_back, _ = player.begin("a", tokens(2, 5))
    assert held_back is not None
    _, decision = player.begin("a", tokens(3, 5))
    assert decision.outcome is Outcome.DEFERRED
    assert "1 available of 8 for tenant 'a': its requests have 7" in str(decision)


def test_a_request_that_only_others_guarantees_could_hold_never_fits() -> None:
    player = Player(("full",), HALF)
    _, decision = player.begin("b", tokens(1, 20))
    assert decision.outcome is Outcome.NEVER_FITS
    assert "the pool has 16 for tenant 'default'" in str(decision)
    mine, _ = player.begin("a", tokens(1, 20))
    assert mine is not None


def test_a_pinned_prefix_counts_for_its_tenant() -> None:
    player = Player(("full",), {"a": {"namespaces": ["a"], "limit": 0.5}}, pin_share=1)
    player.serve("a", tokens(1, 8))
    assert player.pin("a", tokens(1, 8))
    _, decision = player.begin("a", tokens(2, 8))
    assert decision.outcome is Outcome.DEFERRED
    assert "8 available of 16 for tenant 'a': its requests have 8" in str(decision)
    player.cache.unpin_all("a")
    request, _ = player.begin("a", tokens(2, 8))
    assert request is not None


def test_a_pin_takes_no_slots_of_anothers_guarantee() -> None:
    player = Player(("full",), HALF, host_tokens=0, pin_share=1)
    for number in range(3):
        player.serve("b", tokens(number, 8))
    assert [player.pin("b", tokens(number, 8)) for number in range(3)] == [True, True, False]


# -- one tenant, or none


@pytest.mark.parametrize("policy", ["write-through", "write-back"])
def test_one_tenant_alone_is_served_as_without_tenants(policy: str) -> None:
    told = []
    choices: list[Tenants] = [{}, {"default": {}}]
    for tenants in choices:
        player = Player(("full", "swa", "mamba"), tenants, write_policy=policy)
        for number in range(12):
            player.serve(None, tokens(number % 5, 4 + number % 3))
        stats = player.cache.stats()
        told.append((stats.tokens, stats.components, stats.backups, stats.points))
        assert bool(stats.tenants) is bool(tenants)
    assert told[0] == told[1]


# -- settings and counts


@pytest.mark.parametrize(
    ("tenants", "said"),
    [
        (
            {"a": {"guarantee": 0.7}, "b": {"guarantee": 0.4}},
            "setting tenants: 0.7 + 0.4 of guarantee are more than 1; lower one by 0.1",
        ),
        (
            {"a": {"host_guarantee": 1}, "b": {"guarantee": 0.25}},
            "setting tenants: 1.0 + 0.25 of host_guarantee are more than 1; lower one by 0.25",
        ),
        (
            {"a": {"guarantee": 0.5, "limit": 0.4}},
            "setting tenants: 'a' has guarantee=0.5 above limit=0.4; give limit=0.5 or more",
        ),
        (
            {"a": {"namespaces": ["x"]}, "b": {"namespaces": ["x"]}},
            "setting tenants: 'a' and 'b' have the namespace 'x'; give it to one",
        ),
        (
            {"a": {"namespaces": [{}]}},
            "setting tenants: 'a' has the namespace {}, which is not hashable",
        ),
        (
            {"a": {}, "default": {"limit": 0.5}},
            "setting tenants: 'a' has neither namespaces nor prefixes, so nobody is it; give "
            "'namespaces': ['a'] or others",
        ),
        ({"a": {"guarantee": 2}}, "setting tenants.a.guarantee=2: give 1 or less"),
        ({"a": {"limit": 0}}, "setting tenants.a.limit=0: give more than 0"),
        ({"a": {"weight": 0}}, "setting tenants.a.weight=0: give more than 0"),
        (
            {"a": {"garantee": 1}},
            "no setting 'tenants.a.garantee'; did you mean 'guarantee'? settings: namespaces, "
            "prefixes, guarantee, limit, host_guarantee, host_limit, weight",
        ),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(tenants: Tenants, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Cache.open(["full"], device_tokens=1024, tenants=tenants)
    assert str(refused.value) == said


def test_a_guarantee_that_is_no_slot_of_a_pool_is_refused() -> None:
    components = {"full": {}, "mamba": {"states": 6}}
    tenants = {"a": {"namespaces": ["a"], "guarantee": 0.16}}
    with pytest.raises(ConfigError) as refused:
        Cache.open(components, device_tokens=1024, tenants=tenants)
    assert str(refused.value) == (
        "setting tenants: 'a' has guarantee=0.16 of the device pool of component 'mamba': of 6 "
        "slots that is none; give 0.17 or more, or a larger pool"
    )
    tenants["a"]["guarantee"] = 0.17
    with Cache.open(components, device_tokens=1024, tenants=tenants) as cache:
        assert cache.stats().tenants["a"].device["mamba"].guarantee == 1


def test_shares_of_pools_whose_boundary_moves_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^setting tenants: .* give device_bytes instead of"):
        Cache.open(["full", "swa"], device_memory="1MB", tenants=HALF)


def test_a_namespace_belongs_to_the_tenant_that_names_it_or_its_longest_prefix() -> None:
    tenants: Tenants = {
        "one": {"namespaces": ["team/x", 7, ("salt", 1)], "prefixes": ["team/"]},
        "two": {"prefixes": ["team/b"]},
    }
    cache = Cache.open(["full"], device_tokens=1024, tenants=tenants)
    of = cache.tree.tenant_of
    found = [of(each) for each in ("team/x", "team/a", "team/b", "team/bee", 7, ("salt", 1))]
    assert found == [0, 0, 1, 1, 0, 0]
    assert {of(each) for each in (None, "other", 8, ("salt", 2))} == {2}
    assert list(cache.stats().tenants) == ["one", "two", "default"]


def test_stats_have_each_tenants_hits_and_slots() -> None:
    player = Player(("full",), HALF)
    player.serve("a", tokens(1, 8))
    player.serve("a", tokens(1, 8))
    request, _ = player.begin("b", tokens(2, 4))
    assert request is not None
    stats = player.cache.stats()
    a, others = stats.tenants["a"], stats.tenants["default"]
    assert (a.tokens.admitted, a.tokens.asked, a.tokens.reused) == (2, 66, 32)
    assert (others.tokens.admitted, others.tokens.asked, others.tokens.reused) == (1, 17, 0)
    share = a.device["full"]
    assert (share.guarantee, share.limit, share.used, share.evictable) == (16, 32, 8, 8)
    assert (a.host["full"].used, others.host["full"].used) == (8, 0)
    assert others.device["full"].promised == 6
    pool = stats.components["full"].device
    for name, total in pool.owners.items():
        if name != "free":
            assert total == getattr(share, name) + getattr(others.device["full"], name)


def test_an_order_that_loses_a_tenants_candidate_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    player = Player(("full",), HALF, host_tokens=0, guard="off", policy="lru")
    for number in range(4):
        player.serve("b", tokens(number, 7))
    monkeypatch.setattr(RecencyQueue, "pop", lambda self: None)
    request = player.cache.begin(TokenKey(tokens(9, 8), "b"))
    assert player.cache.admit(request).admitted
    with pytest.raises(ContractViolation, match=r"K2: component 'full'.*gives none while"):
        player.cache.allocate(request, player.cache.next_chunk(request))


def test_data_left_behind_is_evicted_where_only_that_of_a_cleared_tenant_came_before() -> None:
    player = Player(("swa",), {"a": {"namespaces": ["a"], "guarantee": 0.5}}, host_tokens=0)
    player.serve(None, range(100, 100 + 2 * PAGE))
    player.cache.clear(None)
    request, _ = player.begin("a", range(5 * PAGE), chunk=PAGE)
    assert request is not None
    for _ in range(4):
        player.step(request)
    (ledger,) = (component.device for component in player.cache.tree.components)
    assert ledger.evictable
    player.cache.evict("swa", ledger.capacity)
    assert not ledger.evictable
