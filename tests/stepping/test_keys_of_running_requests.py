"""Mistakes with keys of running requests are refused: each would store data under wrong tokens."""

from __future__ import annotations

import gc
from copy import copy
from typing import Any
from weakref import ref

import pytest

from kvgraft import Cache, ConfigError, LeaseError, Request, TokenKey

from ..serving import life

COMPONENTS = [{"full": {}}, {"full": {}, "swa": {"window": 8}, "mamba": {"states": 32}}]
BOTH = pytest.mark.parametrize("components", COMPONENTS, ids=["full", "full + swa + mamba"])


def opened(components: dict[str, Any] | None = None, **settings: Any) -> Cache:
    given = {"page_size": 4, "device_tokens": 1024, "guard": "on", **settings}
    return Cache.open(components or {"full": {}}, **given)


def running(cache: Cache, key: TokenKey, *, up_to: int | None = None, reserve: int = 64) -> Request:
    request = cache.begin(key, reserve=reserve)
    assert cache.admit(request).admitted
    life.prefill(cache, request, up_to)
    return request


def refused(cache: Cache, requests: list[Request], tokens: Any, said: str, **named: Any) -> None:
    """The step is refused in a line, and changes nothing."""
    before = cache.stats(), [(each.computed, each.row, bytes(each.key.data)) for each in requests]
    with pytest.raises(LeaseError, match=said) as error:
        cache.step(requests, tokens, **named)
    assert "\n" not in str(error.value)
    after = cache.stats(), [(each.computed, each.row, bytes(each.key.data)) for each in requests]
    assert after == before
    cache.check_integrity()


def test_a_key_is_of_one_running_request() -> None:
    """Samples of one prompt: with one key, each would append its tokens to the others'."""
    with opened() as cache:
        key = TokenKey(range(9))
        first = running(cache, key)
        before = cache.stats()
        with pytest.raises(LeaseError, match=r"^begin: <Request admitted.* runs with this key"):
            cache.begin(key)
        assert cache.stats() == before
        second = running(cache, copy(key))
        for token in range(100, 120):
            cache.step([first, second], [token, token + 50])
        cache.step([first, second], n_tokens=0)
        for request in (first, second):
            probe = TokenKey([*request.key.tokens(), 7])
            assert cache.finish(request) == 28
            found = cache.begin(probe)
            assert found.anchor_tokens == 28
            cache.abort(found)
        cache.begin(key)


def test_a_key_keeps_no_cache_whose_requests_never_ended() -> None:
    """An engine keeps a conversation's key longer than a cache that it dropped."""
    key = TokenKey(range(9))
    dropped = []
    for _ in range(2):
        cache = opened()
        running(cache, key)
        dropped.append(ref(cache.tree.root))
        cache.close()
        del cache
        gc.collect()
        key.truncate(8)
        key.extend([8])
    assert [each() for each in dropped] == [None, None]
    assert len(key.runners) == 1  # the last one's mark: the next request takes it away
    with opened() as cache:
        cache.finish(running(cache, key))
        assert not key.runners


def test_of_two_leases_with_one_key_one_is_admitted() -> None:
    with opened() as cache:
        key = TokenKey(range(9))
        first, second = cache.begin(key), cache.begin(key)
        assert cache.admit(first).admitted
        before = cache.stats()
        with pytest.raises(LeaseError, match=r"^admit: <Request admitted.* runs with this key"):
            cache.admit(second)
        assert cache.stats() == before
        cache.restart(first)  # it runs no more: the other may
        assert cache.admit(second).admitted
        with pytest.raises(LeaseError, match="runs with this key"):
            cache.admit(first)
        cache.abort(first)
        life.prefill(cache, second)
        cache.retract(second)
        assert cache.admit(cache.begin(key)).admitted


def test_two_caches_may_run_with_one_key() -> None:
    """As a draft model's and the model's own: the engine extends it once."""
    with opened() as cache, opened() as drafts:
        key = TokenKey(range(9))
        requests = [(cache, running(cache, key)), (drafts, running(drafts, key))]
        for token in range(4):
            key.extend([token])
            for where, request in requests:
                where.step([request], n_computed=1 if token else 0)
        for where, request in requests:
            where.step([request], n_tokens=0)
            assert where.finish(request) == 12


@pytest.mark.parametrize("at", [0, 3])
def test_tokens_are_given_once(at: int) -> None:
    with opened() as cache:
        requests = [running(cache, TokenKey(range(9 * n, 9 * n + 9))) for n in range(3)]
        for token in range(at):
            cache.step(requests, [token] * 3)
        requests[1].key.extend([5])
        said = f"behind the {9 + at} computed ones, the key holds {10 + at}.*not to both"
        refused(cache, requests, [6, 5, 6], said)
        requests[0].key.extend([5])
        requests[2].key.extend([5])
        assert cache.step(requests).requests == requests
        cache.step(requests, [7, 7, 7])


@pytest.mark.parametrize("up_to", [0, 5])
def test_tokens_go_behind_the_prompt(up_to: int) -> None:
    with opened() as cache:
        request = running(cache, TokenKey(range(9)), up_to=up_to)
        refused(cache, [request], [1], f"behind the {up_to} computed.*compute the prompt first")
        life.prefill(cache, request)
        assert cache.step([request], [1]).requests == [request]


@pytest.mark.parametrize("guard", ["off", "on"])
def test_no_more_tokens_are_computed_than_a_step_gave_slots_for(guard: str) -> None:
    """Their pages have room for more, that nothing was written to."""
    with opened(guard=guard) as cache:
        first = running(cache, TokenKey(range(9)))
        cache.step([first], [1], n_tokens=2)
        refused(cache, [first], None, "more than the last step gave slots for", n_computed=3)
        second = running(cache, TokenKey(range(20, 29)))  # it has had no step yet
        refused(cache, [first, second], None, "more than the last step", n_computed=[2, 1])
        refused(cache, [second], None, "more than the last step gave slots for", n_computed=1)
        first.key.extend([2])
        assert cache.step([first, second], n_computed=[2, 0]).seq_lens.tolist() == [12, 10]


def test_a_key_that_lacks_computed_tokens_takes_those_first() -> None:
    with opened() as cache:
        request = running(cache, TokenKey(range(9)))
        cache.step([request], n_tokens=2)
        refused(cache, [request], [1], "behind the 11 computed ones, the key holds 9.*extend")
        request.key.extend([5])
        assert cache.step([request], [6], n_computed=1).requests == [request]
        assert request.key.tokens(9).tolist() == [5, 6]


# -- fork


@BOTH
@pytest.mark.parametrize("n_prompt", [3, 16, 41])
def test_samples_of_a_prompt_share_what_is_computed(
    components: dict[str, Any], n_prompt: int
) -> None:
    with opened(components, decode_interval_tokens=0) as cache:
        request = running(cache, TokenKey(range(n_prompt)), reserve=40)
        cache.allocate(request, 1)  # states due are kept
        forks = [cache.fork(request, [token]) for token in (101, 102)]
        assert [each.key.tokens()[n_prompt:].tolist() for each in forks] == [[101], [102]]
        assert [each.anchor_tokens for each in forks] == [n_prompt // 4 * 4] * 2
        assert [each.total for each in forks] == [request.total] * 2
        samples = [request, *forks]
        for each in forks:
            assert cache.admit(each).admitted
            life.prefill(cache, each)
        assert len({id(each.key) for each in samples}) == 3
        cache.step([request], [100])
        for token in range(30):
            step = cache.step(samples, [token, token + 40, token + 80])
            assert not step.refused
            if "mamba" in components:
                assert len(set(step.state_slots["mamba"].tolist())) == 3
        cache.step(samples, n_tokens=0)
        for each in samples:
            cache.finish(each)
            again = cache.begin(TokenKey([*each.key.tokens(), 7]))
            assert again.anchor_tokens > n_prompt
            cache.abort(again)


def test_a_fork_asks_for_admission_as_any_other() -> None:
    with opened(device_tokens=64) as cache:
        request = running(cache, TokenKey(range(20)), reserve=20)
        fork = cache.fork(request, [1], reserve=30)
        assert not cache.admit(fork).admitted
        cache.abort(fork)
        assert cache.step([request], [1]).requests == [request]


def test_a_fork_is_treated_as_its_request_is() -> None:
    with opened() as cache:
        request = cache.begin(TokenKey(range(9)), chunk=4, hint="over", priority=3, ttl_s=5)
        assert cache.admit(request).admitted
        fork = cache.fork(request)
        for name in ("chunk", "hint", "requested_retention", "total", "namespace"):
            assert getattr(fork, name) == getattr(request, name)


def test_a_wrong_fork_changes_nothing() -> None:
    with opened() as cache:
        request = running(cache, TokenKey(range(9)))
        leased = cache.begin(TokenKey(range(50, 59)))
        before = cache.stats()
        with pytest.raises(LeaseError, match="admit first"):
            cache.fork(leased)
        with pytest.raises(ConfigError, match="negative"):
            cache.fork(request, [-1])
        with pytest.raises(ConfigError, match="fork: reserve -1"):
            cache.fork(request, reserve=-1)
        assert cache.stats() == before
        cache.finish(request)
        with pytest.raises(LeaseError, match="closed"):
            cache.fork(request)


# -- drafts in the key


@pytest.mark.one_in(3)
@BOTH
@pytest.mark.parametrize("where", ["step", "one by one"])
@pytest.mark.parametrize("wrong", ["all", "some", "none"])
def test_a_key_that_is_cut_to_the_accepted_drafts_goes_on(
    components: dict[str, Any], where: str, wrong: str
) -> None:
    """The engine appends drafts before a pass verifies them, and drops the rejected ones."""
    n_drafts, plain = 3, list(range(9))
    with opened(components) as cache, opened(components) as alone:
        request = running(cache, TokenKey(plain))
        other = running(alone, TokenKey(plain))
        for turn in range(8):
            n_kept = {"all": 0, "some": turn % (n_drafts + 1), "none": n_drafts}[wrong]
            start = request.computed
            request.key.extend([turn, *range(50, 50 + n_drafts)])
            if where == "step":
                cache.step([request], n_tokens=1 + n_drafts, n_computed=0)
            else:
                assert cache.allocate(request, 1 + n_drafts)
            request.key.truncate(start + 1 + n_kept)
            if where == "step":
                cache.step([request], n_tokens=0, n_computed=1 + n_kept)
            else:
                cache.computed(request, 1 + n_kept)
            alone.step([other], n_tokens=1 + n_drafts, n_computed=0)
            other.key.extend([turn, *range(50, 50 + n_kept)])  # only what was accepted
            alone.step([other], n_tokens=0, n_computed=1 + n_kept)
            if turn == 4:
                assert cache.checkpoint(request) == alone.checkpoint(other)
        assert request.key.tokens().tolist() == other.key.tokens().tolist()
        probe = [*request.key.tokens(), 7]
        assert cache.finish(request) == alone.finish(other)
        found = [each.begin(TokenKey(probe)).anchor_tokens for each in (cache, alone)]
        assert found[0] == found[1] > 0


def test_two_caches_notice_that_drafts_were_cut_or_that_they_computed_them() -> None:
    with opened() as cache, opened() as drafts:
        key = TokenKey(range(9))
        verified, drafted = running(cache, key), running(drafts, key)
        for where, request in ((cache, verified), (drafts, drafted)):
            assert where.allocate(request, 8)
        key.extend([1, 2, 3, 4])
        key.truncate(12)
        for where, request in ((cache, verified), (drafts, drafted)):
            where.computed(request, 3)
            assert where.checkpoint(request)
        key.extend([5, 6, 7, 8])
        drafts.computed(drafted, 4)  # the draft model's own data of tokens that are rejected
        key.truncate(13)
        key.extend([20, 21, 22])
        cache.computed(verified, 4)
        assert cache.finish(verified) == 16
        with pytest.raises(LeaseError, match="its key was cut before that, and holds 16 now"):
            drafts.finish(drafted)
        drafts.abort(drafted)


def test_a_prompt_that_is_cut_is_no_rejected_draft() -> None:
    with opened() as cache:
        request = running(cache, TokenKey(range(20)), up_to=8)
        request.key.truncate(14)
        request.key.extend(range(50, 56))
        life.prefill(cache, request)
        with pytest.raises(LeaseError, match="its key was cut before that"):
            cache.finish(request)
        cache.abort(request)


def test_a_cut_behind_the_end_of_a_key_changes_nothing() -> None:
    with opened() as cache:
        request = running(cache, TokenKey(range(9)))
        assert cache.allocate(request, 4)
        cache.computed(request, 4)
        request.key.truncate(9)  # as long as it is; four tokens are known later
        request.key.extend(range(4))
        assert cache.finish(request) == 12


@pytest.mark.parametrize("by", ["step", "extend"])
@pytest.mark.parametrize("tokens", [None, [[9]]])
def test_rejected_drafts_are_cut_from_the_key_before_the_next_pass(by: str, tokens: Any) -> None:
    """Else what the next passes compute is found under tokens that were rejected."""
    with Cache.open(["full"], device_tokens=64, page_size=4, guard="on") as cache:
        request = life.admitted(cache, range(8), reserve=16)
        life.prefill(cache, request)
        if by == "step":
            cache.step([request], [[100, 101, 102, 103]], n_tokens=4)
        else:
            request.key.extend([100, 101, 102, 103])
            cache.step([request], n_tokens=4)
        said = r"2 tokens of the last pass do not count.*key\.truncate\(10\)"
        with pytest.raises(LeaseError, match=said):
            cache.step([request], tokens, n_computed=2)
        assert request.computed == 8
        request.key.truncate(10)
        cache.step([request], [[9]], n_computed=2)
        cache.step([request], n_tokens=0)
        assert request.computed == 11
        cache.finish(request)


def test_a_pass_that_computed_nothing_is_taken_again() -> None:
    with Cache.open(["full"], device_tokens=64, page_size=4, guard="on") as cache:
        request = life.admitted(cache, range(8), reserve=16)
        life.prefill(cache, request)
        cache.step([request], [[100, 101, 102, 103]], n_tokens=4)
        cache.step([request], n_tokens=4, n_computed=0)
        cache.step([request], n_tokens=0)
        assert request.computed == 12
        cache.finish(request)


def test_more_tokens_than_the_next_pass_computes_are_refused() -> None:
    with Cache.open(["full"], device_tokens=64, page_size=4) as cache:
        request = life.admitted(cache, range(8), reserve=16)
        life.prefill(cache, request)
        with pytest.raises(ConfigError, match="3 tokens of each request for n_tokens=2"):
            cache.step([request], [[1, 2, 3]], n_tokens=2)
        assert request.key.n_tokens == 8
        cache.abort(request)


@pytest.mark.parametrize("n_tokens", [1, 4])
@pytest.mark.parametrize("cut", [8, 10])
def test_a_pass_counts_up_to_where_its_key_was_cut_meanwhile(n_tokens: int, cut: int) -> None:
    """The key no longer holds the tokens whose data the pass wrote behind the cut."""
    with Cache.open(["full"], device_tokens=64, page_size=4, guard="on") as cache:
        request = life.admitted(cache, range(8), reserve=16)
        life.prefill(cache, request)
        cache.step([request], [[50, 51, 52, 53]], n_tokens=4)
        request.key.truncate(cut)
        request.key.extend(range(60, 72 - cut))
        with pytest.raises(LeaseError, match="n_computed is more than"):
            cache.step([request], n_computed=cut - 7)
        cache.step([request], n_tokens=n_tokens)
        assert request.computed == cut
        cache.step([request], n_tokens=0)
        assert request.computed == cut + n_tokens
        cache.finish(request)


def test_a_part_of_a_pass_over_the_prompt_counts_as_what_it_is() -> None:
    """Nothing of a prompt is a draft."""
    with Cache.open(["full"], device_tokens=256, page_size=4, guard="on") as cache:
        request = life.admitted(cache, range(40))
        cache.step([request], n_tokens=16, n_computed=0)
        cache.step([request], n_tokens=16, n_computed=10)
        assert request.computed == 10
        cache.abort(request)
