"""`density` counts each prefix once, tells the time by tokens, and forgets in order of use."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

import numpy as np
import pytest

from kvgraft import Cache, TokenKey
from kvgraft.policies.policy import (
    CLASS_BITS,
    MAX_CLASSES,
    PIECE_TOKENS,
    Hint,
    Use,
    class_of,
    prefix_sums,
)
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.tree.ledger import Ledger
from kvgraft.types import Tier
from kvgraft_density.learning import N_BINS, UNITS, Prefixes, Rates, Trail, Visit
from kvgraft_density.policy import MOST_RANKED, Clock, Density, DensityOrder

from ..counting import lines_run

SUM = 16
"""A checksum."""


def counts(*youngest: int) -> list[int]:
    """Counts by bin: those of the youngest bins, and 0 in all others."""
    return [*youngest, *[0] * (N_BINS - len(youngest))]


def use(prefixes: Prefixes, sums: Iterable[int], clock: int) -> Visit:
    visit = prefixes.visit(list(sums))
    prefixes.used(visit, clock)
    return visit


def remembered(prefixes: Prefixes, sums: Iterable[int]) -> tuple[int, Trail | None]:
    visit = prefixes.visit(list(sums))
    return visit.n_seen, visit.trail


def named(prefixes: Prefixes) -> set[int]:
    found = {each for part in prefixes._parts for each in part}
    assert len(found) == prefixes._n_prefixes
    return found


def away(prefixes: Prefixes) -> set[int]:
    trails = {each: prefixes._trails[of] for part in prefixes._parts for each, of in part.items()}
    own: dict[int, set[int]] = {}
    for each, trail in trails.items():
        own.setdefault(id(trail), set()).add(each)
    listed = list({id(each): each for each in trails.values()}.values())
    assert [prefixes._trails[trail.ident] for trail in listed] == listed
    assert own == {id(trail): set(trail.sums) for trail in listed}
    queued = [id(trail) for _, trail in prefixes._uses]
    assert sorted(queued) == sorted(id(trail) for trail in listed if trail.is_queued)
    assert all(trail.is_queued or trail.n_children for trail in listed)
    for trail in listed:
        below = [each for each in listed if each.parent is trail]
        assert trail.n_children == len(below)
        assert all(each.end - len(each.sums) == trail.end for each in below)
    uses = {id(trail.away): trail.away for trail in listed if trail.away is not None}
    assert prefixes._n_away == len(uses)
    for which, use in uses.items():
        assert use.n == sum(len(trail.sums) for trail in listed if id(trail.away) == which)
    return {each for each, trail in trails.items() if trail.away is not None}


def test_a_prefix_is_away_from_its_last_end_to_its_next_use() -> None:
    prefixes = Prefixes(UNITS * 16, 1 << 20)
    visits = [use(prefixes, [SUM], 0) for _ in range(3)]
    prefixes.ended(visits[0], [SUM], 5, 10)
    prefixes.ended(visits[1], [SUM], 6, 20)  # the others ran meanwhile
    prefixes.age(20 + 15)
    prefixes.ended(visits[2], [SUM], 7, 40)
    assert (prefixes.reached[5][0], prefixes.reached[6][0]) == (0, 0)
    assert not prefixes.n_reuses
    use(prefixes, [SUM], 40 + 5 * 16)
    assert prefixes.reached[7] == counts(1, 1, 1, 1)
    assert prefixes.reused[7] == counts(0, 0, 0, 1)
    assert (prefixes.n_reuses, prefixes.n_returns) == (1, 1)


def test_prefixes_that_stay_away_count_in_each_bin_they_reach() -> None:
    prefixes = Prefixes(UNITS * 16, 1 << 20)
    for each in (SUM, 2 * SUM):
        prefixes.ended(use(prefixes, [each], 0), [each], 0, 0)
    prefixes.age(15)
    assert prefixes.reached == {0: counts(2)}
    use(prefixes, [SUM], 17)
    prefixes.age(33)
    assert prefixes.reached == {0: counts(2, 2, 1)}
    prefixes.age(1 << 40)
    assert prefixes.reached == {0: [2, 2, *[1] * (N_BINS - 2)]}


def test_uses_do_not_pile_up_while_nothing_is_given_out() -> None:
    prefixes = Prefixes(64, 1 << 20)
    for _ in range(300):
        prefixes.ended(use(prefixes, [SUM], 5), [SUM], 0, 5)
        prefixes.age(5)
    assert sum(map(len, prefixes._ageing + prefixes._swept)) <= 67


def test_no_request_sweeps_all_uses_that_were_gone_on_with() -> None:
    """Of 2,048 uses 1,948 were gone on with, 100 between them not: these stay, in their order."""
    prefixes = Prefixes(64, 1 << 30)
    uses = []
    for number in range(2048):
        sums = [SUM * (number + 1)]
        uses.append((number % 20 == 10, sums))
        prefixes.ended(use(prefixes, sums, 5), sums, 0, 5)
    for stays, sums in uses:
        if not stays:
            use(prefixes, sums, 5)
    first = [each for each in prefixes._ageing[0] if each.n]
    before, n_calls = 2048, 0
    while n_calls == 0 or prefixes._swept[0]:
        assert prefixes.age(5)
        left = len(prefixes._ageing[0]) + len(prefixes._swept[0])
        assert before - left <= 512
        before, n_calls = left, n_calls + 1
    assert n_calls == 4
    assert list(prefixes._ageing[0]) == first
    assert len(first) == 102


def test_no_request_counts_all_uses_that_grew_older() -> None:
    prefixes = Prefixes(UNITS, 1 << 30)
    for number in range(2048):
        sums = [SUM * (number + 1)]
        prefixes.ended(use(prefixes, sums, 0), sums, 0, 0)
    n_counted, n_calls, is_done = 2048, 0, False
    while not is_done:
        is_done = prefixes.age(4)
        n_counted, before = sum(prefixes.reached[0]), n_counted
        assert n_counted - before <= 512
        n_calls += 1
    assert n_calls >= 3 * 2048 // 512
    assert prefixes.reached[0] == counts(2048, 2048, 2048, 2048)


def test_a_prefix_that_is_used_again_and_again_is_not_forgotten() -> None:
    prefixes = Prefixes(64, 1)  # the directory holds 64
    for number in range(200):
        kept = use(prefixes, [1, 3], number)
        last = use(prefixes, [1001 + 2 * number], number)
    assert remembered(prefixes, [1, 3]) == (2, kept.trail)
    assert remembered(prefixes, [1001]) == (0, None)
    assert remembered(prefixes, [1399]) == (1, last.trail)


def test_the_prefixes_of_the_oldest_use_are_forgotten_but_not_those_used_since() -> None:
    prefixes = Prefixes(64, 1)
    use(prefixes, range(1, 80, 2), 0)
    use(prefixes, [1, 3, 5], 1)
    use(prefixes, range(101, 171, 2), 2)
    assert remembered(prefixes, range(101, 171, 2))[0] == 35
    assert remembered(prefixes, range(1, 80, 2))[0] == 3


def test_a_use_that_is_forgotten_while_its_request_runs_is_remembered_from_its_end() -> None:
    prefixes = Prefixes(64, 1)
    running = use(prefixes, [1, 3], 0)
    for number in range(40):
        use(prefixes, [1001 + 4 * number, 1003 + 4 * number], 1)
    prefixes.ended(running, [1, 3, 5, SUM], 0, 2)
    assert remembered(prefixes, [1, 3, 5, SUM])[0] == 4
    assert away(prefixes) == {1, 3, 5, SUM}


def test_no_request_waits_for_the_whole_directory_to_be_made_larger() -> None:
    """A dictionary of n entries is copied at once when it grows; those of checksums are parts."""
    prefixes = Prefixes(64, 1 << 24)
    for number in range(40):
        tokens = bytearray(np.full(512 * PIECE_TOKENS, number, np.int32).data)
        use(prefixes, prefix_sums(Use("tenant", tokens, 0, 0, []), 512 * PIECE_TOKENS), number)
    assert len(named(prefixes)) == 40 * 512
    assert max(map(len, prefixes._parts)) <= 40 * 512 // 100


def test_a_sequence_used_for_ever_takes_no_more_memory() -> None:
    prefixes = Prefixes(64, 1)
    for clock in range(2000):
        prefixes.ended(use(prefixes, range(1, 30), clock), list(range(1, 32)), 0, clock)
        prefixes.ended(use(prefixes, [], clock), [], 0, clock)
    assert named(prefixes) == away(prefixes) == set(range(1, 32))
    assert len(prefixes._uses) == 2


def test_short_prompts_that_grow_long_are_forgotten_in_their_turn() -> None:
    prefixes = Prefixes(64, 1)  # the directory holds 64
    for number in range(200):
        prefixes.ended(use(prefixes, [], number), [1001 + 2 * number], 0, number)
    assert remembered(prefixes, [1001]) == (0, None)
    assert remembered(prefixes, [1399])[0] == 1
    assert len(away(prefixes)) == prefixes._n_prefixes <= 64 + 4


def test_a_request_that_goes_on_otherwise_leaves_the_prefixes_of_its_beginning() -> None:
    prefixes = Prefixes(64, 1)
    visit = use(prefixes, [1, 3], 0)
    prefixes.ended(visit, [1, 5, 7], 0, 0)  # its key was cut and extended meanwhile
    assert remembered(prefixes, [1, 3]) == (2, visit.trail)
    assert named(prefixes) == {each for _, trail in prefixes._uses for each in trail.sums}


def test_long_sequences_that_others_left_are_forgotten_as_fast_as_new_ones_come() -> None:
    """Conversations of 200 turns, each turn with a side question, one after the other."""
    prefixes = Prefixes(64, 1 << 17)  # the directory holds 1,024
    for number in range(40):
        sums: list[int] = []
        for turn in range(1, 201):
            sums = [*sums, number << 32 | turn << 8]
            for each in (sums, [*sums, sums[-1] + 1]):
                prefixes.ended(use(prefixes, each, number), each, 0, number)
    assert len(away(prefixes)) == prefixes._n_prefixes <= 1100


def test_sequences_that_share_a_beginning_are_forgotten_whole() -> None:
    prefixes = Prefixes(64, 1)
    for clock in range(0, 400, 2):
        sums = [16, 32, 1001 + clock, 16 * clock + 48]
        for _ in range(2):
            prefixes.ended(use(prefixes, sums, clock), sums, 0, clock)
    assert len(named(prefixes)) <= 64
    assert away(prefixes) <= named(prefixes)
    assert len(away(prefixes)) == prefixes._n_prefixes <= 64 + 4


@pytest.mark.parametrize(
    ("one", "other"), [("a", "b"), (("t", 1), ("t", 2)), (None, "None"), ((), ((),))]
)
def test_namespaces_share_nothing(one: object, other: object) -> None:
    tokens = bytearray(4 * PIECE_TOKENS)
    uses = [Use(each, tokens, PIECE_TOKENS, 0, []) for each in (one, other)]
    assert prefix_sums(uses[0], PIECE_TOKENS) != prefix_sums(uses[1], PIECE_TOKENS)


def test_checksums_stay_with_a_key_as_far_as_it_is_not_cut() -> None:
    key = TokenKey(range(3 * PIECE_TOKENS + 5), "tenant")

    def sums(of: TokenKey) -> list[int]:
        return prefix_sums(Use(of.namespace, of.data, of.n_tokens, 0, of.sums), of.n_tokens)

    before = sums(key)
    assert len(before) == 3
    fork = copy(key)
    fork.truncate(2 * PIECE_TOKENS + 7)
    fork.extend([7] * PIECE_TOKENS)
    assert sums(fork)[:2] == before[:2]
    assert sums(fork) == sums(TokenKey(fork.tokens(), "tenant"))
    assert sums(key) == before


def test_a_use_before_all_others_was_made_at_the_start() -> None:
    clock = Clock()
    clock.unit = 10
    clock.note(512, 1000)
    clock.note(768, 1009)
    assert [clock.at(stamp) for stamp in (-5, 0, 512, 513, 9999)] == [0, 0, 0, 100, 100]


def test_data_is_of_age_0_when_its_request_ends_however_long_it_ran() -> None:
    with Cache.open(["full"], device_tokens=4096, page_size=64, policy="density") as cache:
        policy = cache.tree.policy
        assert isinstance(policy, Density)
        first = cache.begin(TokenKey(range(256)))
        assert cache.admit(first).admitted
        assert cache.allocate(first, 256)
        cache.computed(first, 256)
        second = cache.begin(TokenKey(np.arange(2048) + 1000))
        assert cache.admit(second).admitted
        assert cache.allocate(second, 2048)
        cache.finish(first, hint="over")
        stamp = next(cache.tree.nodes()).cells[0].stamp
        n_slots = (256 + 2048) // 64
        assert policy.clock.at(stamp) == policy.clock.now == n_slots // policy.clock.unit
        assert class_of(stamp) == 12
        cache.abort(second)


def test_hints_are_classes_of_their_own() -> None:
    with Cache.open(["full"], device_tokens=8192, page_size=64, policy="density") as cache:
        for number, hint in enumerate([None, *Hint]):
            request = cache.begin(TokenKey([number] * 128))
            assert cache.admit(request).admitted
            assert cache.allocate(request, 128)
            cache.computed(request, 128)
            cache.finish(request, hint=hint)
        assert {class_of(node.cells[0].stamp) for node in cache.tree.nodes()} == {0, 4, 8, 12}


def test_a_hint_at_the_beginning_holds_unless_the_end_gives_another() -> None:
    with Cache.open(["full"], device_tokens=8192, page_size=64, policy="density") as cache:
        for number, (first, last) in enumerate([("over", None), ("over", "continues")]):
            request = cache.begin(TokenKey([number] * 128), hint=first)
            assert cache.admit(request).admitted
            assert cache.allocate(request, 128)
            cache.computed(request, 128)
            cache.finish(request, hint=last)
        assert {class_of(node.cells[0].stamp) for node in cache.tree.nodes()} == {12, 4}


def test_an_explanation_says_how_data_is_ranked() -> None:
    with Cache.open(["full"], device_tokens=8192, page_size=64, policy="density") as cache:
        key = TokenKey(range(256))
        request = cache.begin(key)
        assert cache.admit(request).admitted
        assert cache.allocate(request, 256)
        cache.computed(request, 256)
        cache.finish(request, hint="continues")
        explained = cache.explain(TokenKey(range(300)))
        assert "kept by density: full on DEVICE, class 4 (mostly new, continues)" in str(explained)
        (kept,) = explained.kept
        assert (kept.pinned, kept.score) == (False, 0.0)
        again = cache.begin(TokenKey(range(300)))
        assert cache.explain(TokenKey(range(300))).kept[0].pinned
        cache.abort(again)


def test_a_sequence_that_goes_on_fast_is_of_another_class_than_a_slow_one() -> None:
    policy = Density()
    policy.order(Ledger("full", Tier.DEVICE, SlotAllocator(UNITS * 16)))
    policy.opened(UNITS * 16 * 1024)
    fast, slow = TokenKey([1] * 4096), TokenKey([2] * 4096)
    classes: dict[TokenKey, int] = {}
    for number in range(64):
        for key, every in ((fast, 1), (slow, 8)):
            if number % every == 0:
                use = Use(None, key.data, 4096, 0, key.sums)  # all is reused: no slot is given out
                classes[key], use.memo = policy.classify(use)
                policy.admitted(use, number)
                policy.finished(use, number, None)
    words = "half of it seen before, used more than once, every"
    assert policy.describe(classes[fast]) == f"{words} 16384 tokens used or so"
    assert policy.describe(classes[slow]) == f"{words} 65536 tokens used or so"


def test_data_stays_as_long_as_its_tier_is_large() -> None:
    with Cache.open(
        ["full"], device_tokens=4096, host_tokens=65536, page_size=64, policy="density"
    ) as cache:
        policy = cache.tree.policy
        assert isinstance(policy, Density)
        assert [order.tau for order in policy.orders] == [4096 // 64, 65536 // 64]


def test_a_pool_whose_boundary_moved_is_as_large_as_it_was_when_scores_were_learnt() -> None:
    policy, pool = Density(), Ledger("full", Tier.DEVICE, SlotAllocator(64 * 16))
    order = policy.order(pool)
    policy.opened(1 << 20)
    pool.allocator.capacity *= 2
    rates = Rates(sampled({0: [100] * N_BINS}, {0: [50] * N_BINS}), ())
    assert isinstance(order, DensityOrder)
    assert order.tau == 64 * 16
    order.learn(rates)
    assert order.tau == 64 * 32


@pytest.mark.parametrize("n_known", [0, 1, 7, 8, 63, 64, 99, 100])
def test_the_longest_prefix_that_was_seen_is_found(n_known: int) -> None:
    prefixes = Prefixes(64 * 16, 1 << 24)
    if n_known:
        use(prefixes, range(n_known), 1)
    for n_more in (0, 1, 2, 3, 50, 300):
        sums = [*range(n_known), *range(1000, 1000 + n_more)]
        n_seen, trail = remembered(prefixes, sums)
        assert n_seen == n_known
        assert (trail is None) == (not n_known)


@pytest.mark.plain_build
def test_a_new_long_prompt_is_not_looked_up_piece_by_piece() -> None:
    prefixes = Prefixes(64 * 16, 1 << 24)
    use(prefixes, range(1000), 1)
    few, many = ([*range(10), *range(5000, 5000 + n)] for n in (10, 1000))
    assert lines_run(lambda: prefixes.visit(many)) < 4 * lines_run(lambda: prefixes.visit(few))


@pytest.mark.plain_build
def test_no_request_sorts_all_places_when_a_generation_begins() -> None:
    """A place is listed when a candidate comes to it: nothing is sorted anew."""
    clock = Clock()
    order = DensityOrder(Ledger("full", Tier.DEVICE, SlotAllocator(64)), clock)
    for number in range(1, 129):
        for its_class in range(32):
            order.push(number * 32 + its_class << CLASS_BITS | its_class, number)
        clock.note((number + 1) * 32 << CLASS_BITS, number)
    assert lines_run(order.pop) < 9000  # most of it was done before
    for _ in range(128):
        assert order.pop() is not None
    uses = {number: [9999 - number - each for each in range(N_BINS)] for number in range(32)}
    order.learn(Rates(sampled(dict.fromkeys(uses, [9999] * N_BINS), uses), ()))
    assert order.pop() is not None
    n_places = len(order._listed)
    assert n_places > 32 * 6
    clock.note(130 * 32 << CLASS_BITS, 129)
    assert lines_run(order.pop) < 12 * n_places


@pytest.mark.plain_build
def test_a_generation_takes_no_step_for_each_place_that_is_listed() -> None:
    """Candidates of a kind in all bins: more places, and as many kinds."""

    def places_and_lines(n_generations: int) -> tuple[int, int]:
        clock = Clock()
        order = DensityOrder(Ledger("full", Tier.DEVICE, SlotAllocator(64)), clock)
        for number in range(1, n_generations + 1):
            for its_class in range(8):
                order.push(number * 8 + its_class << CLASS_BITS | its_class, number)
            clock.note((number + 1) * 8 << CLASS_BITS, number)
        clock.note((n_generations + 9) * 8 << CLASS_BITS, n_generations + 1)
        return len(order._listed), lines_run(order._grow_older)

    few, least = places_and_lines(8)
    many, most = places_and_lines(128)
    assert many > 1.8 * few
    assert most < 1.3 * least


def test_orders_with_many_places_learn_one_after_the_other() -> None:
    policy = Density()
    for name in "abcdef":
        policy.order(Ledger(name, Tier.DEVICE, SlotAllocator(64)))
    policy.opened(1 << 16)
    orders = policy.orders
    for order in orders:
        for number in range(MAX_CLASSES):
            order.push(number << CLASS_BITS | number, number)
    policy.prefixes.reached, policy.prefixes.reused = {0: [9] * N_BINS}, {0: [1] * N_BINS}
    policy.prefixes.n_reuses = 1
    learnt: list[int] = []
    for n in range(1, 60):
        request = Use(None, bytearray(400), 100, 0, [])
        _, request.memo = policy.classify(request)
        before = [order._rates for order in orders]
        policy.admitted(request, n + 512 << CLASS_BITS)
        learnt.append(sum(order._rates is not was for order, was in zip(orders, before)))
    assert max(learnt) == MOST_RANKED // MAX_CLASSES
    assert sum(learnt) == 2 * len(orders)


def sampled(reached: dict[int, list[int]], reused: dict[int, list[int]]) -> Prefixes:
    prefixes = Prefixes(UNITS * 16, 1 << 20)
    prefixes.reached, prefixes.reused = reached, reused
    return prefixes


def test_a_class_with_few_samples_is_taken_to_be_as_the_coarser_one() -> None:
    many = [10_000] * N_BINS
    rates = Rates(
        sampled(
            {2: many, 6: [10, *[0] * 13], 0: many},
            {2: [5000] * N_BINS, 6: [0] * N_BINS, 0: [1000] * N_BINS},
        ),
        (2,),
    )
    assert rates.of(2)[0] == pytest.approx(0.5, abs=0.01)
    assert rates.of(0)[0] == pytest.approx(0.1, abs=0.01)
    assert rates.of(6)[0] == pytest.approx(0.4, abs=0.01)  # 40 as of class 2, 10 stayed away
    assert rates.of(6)[1] == pytest.approx(0.5, abs=0.01)


def test_ages_that_nothing_reached_are_taken_to_be_as_those_before() -> None:
    young = [1000, 1000, 1000, *[0] * 11]
    rates = Rates(sampled({0: young}, {0: [0, 0, 900, *[0] * 11]}), ())
    assert rates.of(0)[1] < 0.05
    assert all(rate > 0.8 for rate in rates.of(0)[2:])


def test_scores_stay_as_they_were_learnt_whenever_they_are_asked_for() -> None:
    prefixes = sampled({2: [100] * N_BINS}, {2: [50] * N_BINS})
    early, late = (Rates(prefixes, (2,)) for _ in range(2))
    before = early.scores(2, 64)
    prefixes.reached[2][0] += 10_000
    prefixes.reused[2][1] += 100
    assert late.scores(2, 64) == before


def test_a_score_is_the_reuses_to_expect_per_stay() -> None:
    late = [0, 0, 0, 9_000, *[0] * 10]
    rates = Rates(sampled({0: [10_000] * N_BINS}, {0: late}), ())
    scores = rates.scores(0, 8.0)
    assert scores[3] == pytest.approx(0.9 / (4 * 0.55 + 4 * 0.1), rel=0.02)
    assert scores[0] == pytest.approx(0.9 / (4 + 4 * 0.55), rel=0.02)
    assert scores[4] < 0.01


@pytest.mark.parametrize("n_classes", [10, 40])
def test_many_classes_are_learnt_at_first_as_few_are(n_classes: int) -> None:
    """Their scores may take more requests than there are between two looks at the prefixes."""
    policy, learnt = Density(), []
    order = policy.order(Ledger("full", Tier.DEVICE, SlotAllocator(1 << 16)))
    assert isinstance(order, DensityOrder)
    policy.opened(1 << 16)
    policy.prefixes.reached = {each: [9] * N_BINS for each in range(n_classes)}
    policy.prefixes.reused = {0: [1] * N_BINS}
    policy.prefixes.n_reuses = 1
    for n in range(1, 200):
        before = order._rates
        request = Use(None, bytearray(400), 100, 0, [])
        _, request.memo = policy.classify(request)
        policy.admitted(request, n << CLASS_BITS)
        if order._rates is not before:
            learnt.append(n)
    assert len(learnt) >= 2
