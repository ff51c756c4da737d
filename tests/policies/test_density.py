"""`density` counts each sample once, tells the time by slots, and forgets in order of use."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft import Cache, TokenKey
from kvgraft.policies.density import Clock, Density
from kvgraft.policies.policy import Hint, class_of
from kvgraft.policies.prefixes import PIECE_TOKENS, Prefixes

SAMPLED_SUM = 8
"""A checksum that is learnt from."""


def test_uses_at_one_time_are_one_sample_that_grows_old_once() -> None:
    prefixes = Prefixes(64 * 16, 1 << 20)
    for its_class in (0, 0, 1, 2):
        prefixes.used([SAMPLED_SUM], its_class, 0)
    prefixes.ended([SAMPLED_SUM], 3, 0)
    prefixes.used([], 0, 16)
    assert {its_class: row[1] for its_class, row in prefixes.reached.items()} == {
        0: 0,
        1: 0,
        2: 0,
        3: 1,
    }
    assert {its_class: row[0] for its_class, row in prefixes.reused.items()} == {0: 2, 1: 1}


def test_a_prefix_that_was_used_again_grows_old_from_then_on() -> None:
    prefixes = Prefixes(64 * 16, 1 << 20)
    for clock in (0, 16, 40):
        prefixes.used([SAMPLED_SUM] if clock < 40 else [], 0, clock)
    assert prefixes.reached == {0: [2, 2, *[0] * 12]}
    prefixes.used([], 0, 48)
    assert prefixes.reached == {0: [2, 2, 1, *[0] * 11]}


def test_samples_do_not_pile_up_while_nothing_is_given_out() -> None:
    prefixes = Prefixes(64, 1 << 20)
    for _ in range(100):
        prefixes.used([SAMPLED_SUM], 0, 5)
        prefixes.ended([SAMPLED_SUM], 0, 5)
    assert sum(map(len, prefixes._ageing)) == 1


def test_a_prefix_that_is_used_again_and_again_is_not_forgotten() -> None:
    prefixes = Prefixes(64, 1)  # the directory holds 64
    for number in range(200):
        prefixes.used([1, 3], 0, number)
        prefixes.used([1001 + 2 * number], 0, number)
    assert prefixes.remembered([1, 3]) == (2, 200)
    assert prefixes.remembered([1001]) == (0, 0)
    assert prefixes.remembered([1399]) == (1, 1)


def test_the_longest_prefix_of_a_request_is_forgotten_first() -> None:
    prefixes = Prefixes(64, 1)
    prefixes.used(range(1, 80, 2), 0, 0)
    prefixes.used(range(101, 171, 2), 0, 1)
    assert prefixes.remembered(range(101, 171, 2))[0] == 35
    assert prefixes.remembered(range(1, 80, 2))[0] == 64 - 35


@pytest.mark.parametrize(
    ("one", "other"), [("a", "b"), (("t", 1), ("t", 2)), (None, "None"), ((), ((),))]
)
def test_namespaces_share_nothing(one: object, other: object) -> None:
    tokens = bytearray(4 * PIECE_TOKENS)
    assert Prefixes.sums(one, tokens, PIECE_TOKENS) != Prefixes.sums(other, tokens, PIECE_TOKENS)


def test_a_use_before_all_others_was_made_at_the_start() -> None:
    clock = Clock()
    clock.note(512, 1000)
    assert [clock.at(stamp) for stamp in (-5, 0, 511, 512, 9999)] == [0, 0, 0, 1000, 1000]


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
        assert policy.clock.at(stamp) == policy.clock.now == n_slots
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


def test_data_stays_as_long_as_its_tier_is_large() -> None:
    with Cache.open(
        ["full"], device_tokens=4096, host_tokens=65536, page_size=64, policy="density"
    ) as cache:
        policy = cache.tree.policy
        assert isinstance(policy, Density)
        assert [order.tau for order in policy.orders] == [4096 // 64, 65536 // 64]
