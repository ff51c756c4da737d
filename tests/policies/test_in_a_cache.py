"""A cache tells its policy of every request, and names a policy that breaks a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvgraft import Cache, ContractViolation, LeaseError, TokenKey
from kvgraft.optional import Published
from kvgraft.policies import Hint, Pool, Use
from kvgraft.policies.policy import class_of
from kvgraft.policies.recency import LeastRecentlyUsed, RecencyQueue
from kvgraft_storage.tier.fetching import Phase

from ..serving import life
from ..serving.setups import installed
from ..storage_tier.shelf import AT_ONCE, open_cache, step_by_step, stocked, tier_of, until
from .publishing import publish


def mine(policy: type[LeastRecentlyUsed]) -> Published:
    """The policy as an installed package offers it, by the name "mine"."""
    named = type(policy.__name__, (policy,), {"name": "mine"})
    return Published("mine", "mine-dist", "1.0", ("mine-dist",), lambda: named)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cache]:
    """Opens a cache of 16 pages with a policy."""

    def open_with(policy: type[LeastRecentlyUsed], **options: Any) -> Cache:
        publish(monkeypatch, mine(policy))
        given = {"device_tokens": 256, "page_size": 16, "policy": "mine", **options}
        return Cache.open(["full"], **given)

    return open_with


class Classifying(LeastRecentlyUsed):
    """Classes by namespace; keeps what it is told."""

    classifies = True
    told: list[tuple[str, object]]

    def __init__(self) -> None:
        self.told = []

    def classify(self, use: Use) -> tuple[int, Any]:
        its_class = use.namespace if isinstance(use.namespace, int) else 7
        self.told.append(("classify", its_class))
        return its_class, None

    def admitted(self, use: Use, stamp: int) -> None:
        self.told.append(("admitted", use.namespace))

    def finished(self, use: Use, stamp: int, hint: Hint | None) -> int:
        self.told.append(("finished", hint))
        return use.namespace if isinstance(use.namespace, int) else 7


def classes(cache: Cache) -> set[int]:
    """The classes of all data in the tree."""
    return {class_of(node.cells[0].stamp) for node in cache.tree.nodes()}


def test_a_restart_is_a_use_of_the_request_that_restarts_and_counted_once(
    opened: Callable[..., Cache],
) -> None:
    with opened(Classifying) as cache:
        first = life.admitted(cache, TokenKey(range(64), namespace=3))
        cache.allocate(first, 64)
        cache.computed(first, 64)
        cache.checkpoint(first)
        other = life.admitted(cache, TokenKey(range(16), namespace=5))
        cache.restart(first)
        assert classes(cache) == {3}
        assert cache.admit(first).admitted
        policy = cache.tree.policy
        assert isinstance(policy, Classifying)
        assert policy.told.count(("admitted", 3)) == 1
        cache.abort(first)
        cache.abort(other)


def test_data_that_arrives_at_begin_does_not_change_the_class_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(monkeypatch, mine(Classifying))
    prompt = list(range(100, 133))
    shelf = stocked(installed("full"), prompt, synchronous=True)
    cache = open_cache(
        installed("full"),
        shelf,
        pace=step_by_step(),
        device_tokens=256,
        host_tokens=512,
        eviction="mine",
    )
    key, tier = TokenKey(prompt), tier_of(cache)
    prefetch = tier.prefetch(key)
    fetch = prefetch.fetch
    assert fetch is not None
    until(lambda: fetch.phase is Phase.HANGING, cache)
    tier.pace = AT_ONCE
    request = cache.begin(key, prefetch=prefetch)
    assert request.storage_tokens == 32
    assert classes(cache) == {7}
    cache.abort(request)
    cache.close()


@pytest.mark.parametrize("given", [None, 2.5, True, -1000, 256, "hot"])
@pytest.mark.parametrize("call", ["classify", "finished"])
def test_an_answer_that_is_no_class_is_refused_and_the_books_stay_right(
    opened: Callable[..., Cache], given: Any, call: str
) -> None:
    class Bad(Classifying):
        def classify(self, use: Use) -> tuple[int, Any]:
            return given if call == "classify" else 0, None

        def finished(self, use: Use, stamp: int, hint: Hint | None) -> Any:
            return given

    with opened(Bad) as cache:
        refused = pytest.raises(ContractViolation, match=f"K1: .*policy 'mine': `{call}` gives")
        if call == "classify":
            with refused:
                cache.begin(TokenKey(range(64)))
        else:
            request = life.admitted(cache, range(64))
            with refused:
                cache.finish(request)
            cache.abort(request)
        cache.check_integrity()
        assert cache.tree.n_nodes == 0
        assert not cache.requests


def test_a_policy_that_fails_at_admission_leaves_the_request_as_it_was(
    opened: Callable[..., Cache],
) -> None:
    class Bad(Classifying):
        def admitted(self, use: Use, stamp: int) -> None:
            raise KeyError("lost")

    with opened(Bad) as cache:
        request = cache.begin(TokenKey(range(64)))
        with pytest.raises(ContractViolation, match=r"P5.*'mine': `admitted` raised KeyError: 'lo"):
            cache.admit(request)
        assert cache.tree.components[0].device.promised == 0
        with pytest.raises(LeaseError, match="request is leased"):
            cache.allocate(request, 16)
        cache.abort(request)
        cache.check_integrity()


@pytest.mark.parametrize(
    ("answer", "said"),
    [("raise", "KeyError: 'lost'"), (None, "words None, score None; give a str, and a number")],
)
def test_an_explanation_names_a_policy_that_cannot_say_how_it_ranks(
    opened: Callable[..., Cache], answer: Any, said: str
) -> None:
    class Bad(LeastRecentlyUsed):
        def describe(self, use_class: int) -> Any:
            if answer == "raise":
                raise KeyError("lost")
            return answer

    with opened(Bad) as cache:
        request = life.admitted(cache, range(64))
        assert cache.allocate(request, 64)
        cache.computed(request, 64)
        cache.finish(request)
        with pytest.raises(
            ContractViolation, match=f"K1: .*policy 'mine' cannot rank data: {said}"
        ):
            cache.explain(TokenKey(range(64)))


def started(cache: Cache, number: int, n_tokens: int) -> Any:
    """A request that computed its prompt, another for each number."""
    return life.prefilled(cache, [number] * n_tokens)


def serve(cache: Cache) -> None:
    for number in range(40):
        cache.finish(started(cache, number, 64))


class Doubling(RecencyQueue):
    def push(self, stamp: int, node: Any) -> None:
        super().push(stamp, node)
        super().push(stamp, node)


class Standing(RecencyQueue):
    """Gives its first entry for ever."""

    def pop(self) -> tuple[int, Any] | None:
        entry = super().pop()
        if entry is not None:
            super().push(*entry)
        return entry


class Dating(RecencyQueue):
    """Gives entries with a stamp that is not theirs."""

    def pop(self) -> tuple[int, Any] | None:
        entry = super().pop()
        return None if entry is None else (entry[0] + 256, entry[1])


class Losing(RecencyQueue):
    """Keeps its entries for itself."""

    def pop(self) -> tuple[int, Any] | None:
        return None


class Failing(RecencyQueue):
    def pop(self) -> tuple[int, Any] | None:
        raise KeyError("order")


class Junk(RecencyQueue):
    def pop(self) -> Any:
        return 3


class Forgetting(RecencyQueue):
    """Drops the next victim as well where it is to drop what is no candidate any more."""

    def withdraw(self, stamp: int, node: Any) -> None:
        super().withdraw(stamp, node)
        super().pop()


def test_an_order_that_drops_more_than_it_is_to_drop_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Bad(LeastRecentlyUsed):
        def order(self, pool: Pool) -> RecencyQueue:
            return Forgetting()

    publish(monkeypatch, mine(Bad))

    def serve(cache: Cache) -> None:
        for number in range(800):
            cache.finish(started(cache, number, 48))
            if number % 3 == 0:
                cache.evict("full", 3)
        cache.evict("swa", 4096)

    components: dict[str, dict[str, Any]] = {"full": {}, "swa": {"window": 64}}
    with (
        Cache.open(components, device_tokens=4096, page_size=16, policy="mine") as cache,
        pytest.raises(ContractViolation, match=r"K2.*'swa'.*not take or drop .*LookupError"),
    ):
        serve(cache)


class Stumbling(RecencyQueue):
    """Fails now and then as something is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.n_pushed = 0

    def push(self, stamp: int, node: Any) -> None:
        self.n_pushed += 1
        if self.n_pushed == 3:
            raise KeyError("full")
        super().push(stamp, node)


def test_an_order_that_takes_no_candidate_breaks_no_books_and_is_named_when_room_is_made(
    opened: Callable[..., Cache],
) -> None:
    class Bad(LeastRecentlyUsed):
        def order(self, pool: Pool) -> RecencyQueue:
            return Stumbling()

    with opened(Bad) as cache:
        component = cache.tree.components[0]
        for number in range(4):
            cache.finish(started(cache, number, 16))
        assert len(component.device.queue) == len(list(component.device.queue)) == 3
        ledger = component.device
        assert (ledger.evictable, ledger.pinned, ledger.private) == (4, 0, 0)
        for _ in range(2):
            with pytest.raises(
                ContractViolation, match=r"K2.*not take or drop a candidate: KeyError: 'full"
            ):
                cache.evict("full", 16)
        ledger.check()


class Latest(RecencyQueue):
    """Gives what was used latest first."""

    def push(self, stamp: int, node: Any) -> None:
        super().push(-stamp, node)

    def pop(self) -> tuple[int, Any] | None:
        entry = super().pop()
        return None if entry is None else (-entry[0], entry[1])

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((-stamp, node) for stamp, node in super().__iter__())


class LatestByScore(Latest):
    def score(self, stamp: int) -> float:
        return -stamp


class Untrue(Latest):
    """Scores that its victims do not follow."""

    def score(self, stamp: int) -> float:
        return stamp


@pytest.mark.parametrize("order", [Latest, LatestByScore, Untrue])
def test_a_guard_expects_victims_in_the_order_of_the_scores_if_there_are_any(
    opened: Callable[..., Cache], order: type[RecencyQueue]
) -> None:
    class Mine(LeastRecentlyUsed):
        def order(self, pool: Pool) -> RecencyQueue:
            return order()

    with opened(Mine, guard="on") as cache:
        if order is Untrue:
            with pytest.raises(ContractViolation, match=r"T7.*'full'.*under the policy 'mine'"):
                serve(cache)
        else:
            serve(cache)
            assert cache.explain(TokenKey([0] * 64)).anchor == 48


class ByClass(RecencyQueue):
    """The lowest class first, and in it the oldest."""

    def pop(self) -> tuple[int, Any] | None:
        if not len(self):
            return None
        entry: tuple[int, Any] = min(self, key=lambda entry: (class_of(entry[0]), entry[0]))
        self.withdraw(*entry)
        return entry

    def score(self, stamp: int) -> float:
        return class_of(stamp)


class ByRecency(RecencyQueue):
    """Has no scores, so a later use counts whatever its class."""


@pytest.mark.parametrize("guard", ["off", "on"])
@pytest.mark.parametrize(("order", "kept"), [(ByClass, 64), (ByRecency, 0)])
def test_a_prefix_keeps_its_own_use_where_the_policy_thinks_more_of_it(
    opened: Callable[..., Cache], order: type[RecencyQueue], kept: int, guard: str
) -> None:
    class Mine(Classifying):
        """Prompts are of class 2, and of class 1 when their request has ended."""

        def order(self, pool: Pool) -> RecencyQueue:
            return order()

        def classify(self, use: Use) -> tuple[int, Any]:
            return 2, None

        def finished(self, use: Use, stamp: int, hint: Hint | None) -> int:
            return 1

    prefix, longer, other = [0] * 64, [0] * 64 + [1] * 32, [2] * 64
    with opened(Mine, guard=guard) as cache:
        for prompt in (prefix, longer, other):
            request = cache.begin(TokenKey(prompt))
            assert cache.admit(request).admitted
            n_tokens = cache.next_chunk(request)
            assert cache.allocate(request, n_tokens)
            cache.computed(request, n_tokens)
            cache.finish(request)
        assert cache.evict("full", 2) == 2  # pages: what the longer prompt has beyond the prefix
        assert cache.explain(TokenKey([*prefix, 9])).anchor == 64
        assert cache.evict("full", 4) == 4
        assert cache.explain(TokenKey([*prefix, 9])).anchor == kept
        assert cache.explain(TokenKey([*other, 9])).anchor == 64 - kept


@pytest.mark.parametrize(
    ("order", "what"),
    [
        (Doubling, "gives .* again"),
        (Standing, "gives .* again"),
        (Dating, "gives .* again"),
        (Losing, "gives none while .* candidates wait"),
        (Failing, "gives no pair of stamp and node: KeyError: 'order'"),
        (Junk, "gives no pair of stamp and node: TypeError"),
    ],
)
def test_a_bad_order_is_refused_where_it_does_harm(
    opened: Callable[..., Cache], order: type[RecencyQueue], what: str
) -> None:
    class Bad(LeastRecentlyUsed):
        def order(self, pool: Pool) -> RecencyQueue:
            return order()

    with opened(Bad) as cache:
        with pytest.raises(ContractViolation, match=f"K2: .*'full'.*{what}"):
            serve(cache)
        assert len(cache.tree.components[0].device.queue) >= 0
