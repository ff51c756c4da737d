"""Sessions append and rewind, keep their tails within a bound, and give way to others."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from kvgraft import Cache, ConfigError, GuardMode, LeaseError, TokenKey, WritePolicy
from kvgraft_scheduling import KeptSession, KeptSessions

from ..serving import life
from ..serving.setups import Setup, one_of_each_kind

LIMIT_TOKENS, LIMIT_SESSIONS = 24, 2


def compute(sessions: KeptSessions, session: KeptSession) -> bool:
    """Compute what the turn lacks; False if it was retracted for want of room."""
    request = session.request
    assert request is not None
    while n_tokens := session.next_chunk(5):
        if not sessions.allocate(request, n_tokens):
            session.retract()
            return False
        sessions.cache.computed(request, n_tokens)
    return True


def run_turn(sessions: KeptSessions, session: KeptSession, tokens: list[int]) -> int | None:
    """A turn up to its last pass; the tokens that it did not compute, None if there is no room."""
    cache = sessions.cache
    session.begin(tokens, reserve=2)
    while True:
        request = session.request
        assert request is not None
        if not session.goes_on:
            decision = sessions.admit(request)
            for _ in range(3):  # copies of those released may hold the room
                if not decision.admitted:
                    cache.drain()
                    cache.poll()
                    decision = sessions.admit(request)
            if not decision.admitted:
                session.retract()
                return None
            cache.load_back(request)
            assert cache.drain()
        known = request.computed
        if compute(sessions, session):
            return known
        session.begin(reserve=2)


class Conversations:
    """Three sessions, the tokens that each should have, and calls drawn at random.

    Attributes:
        counts: turns that were kept, rewinds that ended a request, sessions that gave way.
    """

    def __init__(self, cache: Cache, rng: Random, counts: Counter[str]) -> None:
        self.cache, self.rng, self.counts = cache, rng, counts
        self.sessions = KeptSessions(
            cache, limit_tokens=LIMIT_TOKENS, limit_sessions=LIMIT_SESSIONS
        )
        self.open = [self.sessions.open(TokenKey([each + 1])) for each in range(3)]
        self.tokens = {each: [n + 1] for n, each in enumerate(self.open)}

    def draw(self) -> None:
        """One call, and the claims that hold after every one."""
        session, act = self.rng.choice(self.open), self.rng.random()
        if act < 0.5 and len(self.tokens[session]) < 30:
            self.turn(session)
        elif act < 0.7:
            self.rewind(session)
        elif act < 0.85:
            self.other_request()
        elif act < 0.95:
            component = self.rng.choice(self.cache.tree.components)
            self.cache.evict(component.name, self.rng.randrange(1, 9))
        else:
            self.clear(session)
        self.cache.poll()
        for each in self.open:
            assert each.key.tokens().tolist() == self.tokens[each]
        assert len(self.sessions.idle) <= LIMIT_SESSIONS
        assert self.sessions.idle_tokens <= LIMIT_TOKENS
        held = {each for each in self.open if each.request is not None}
        assert held == set(self.sessions.idle)
        self.cache.check_integrity()

    def turn(self, session: KeptSession) -> None:
        """A turn, which is aborted at times; a kept one computes nothing again.

        Unless it had to make room: then it resumes where the tree has data.
        """
        new = [self.rng.randrange(1, 4) for _ in range(self.rng.randrange(1, 7))]
        kept = session.kept_tokens
        known = run_turn(self.sessions, session, new)
        if known is None:
            self.tokens[session] += new
            return
        assert session.request is not None
        assert known in {kept or -1, session.request.anchor_tokens}
        self.counts["kept"] += known == kept > 0
        if self.rng.random() < 0.25:
            session.abort()
            return
        sampled = self.rng.randrange(1, 4)  # its data is not computed yet
        session.key.extend([sampled])
        self.tokens[session] += [*new, sampled]
        session.end()

    def rewind(self, session: KeptSession) -> None:
        """Behind it the request goes on, or the next turn begins at the last kept boundary."""
        tokens, kept = self.tokens[session], session.kept_tokens
        n_tokens = self.rng.randrange(1, len(tokens) + 1)
        session.rewind(n_tokens)
        del tokens[n_tokens:]
        if session.request is not None:
            assert n_tokens >= session.kept_tokens == kept
            return
        self.counts["rewound"] += kept > 0
        expected = self.cache.explain(TokenKey([*tokens, 9])).anchor
        request = session.begin([9])
        assert request.limited or request.anchor_tokens == expected
        assert request.anchor_tokens <= expected
        session.abort()

    def other_request(self) -> None:
        """While no turn runs a request that fits is admitted: idle sessions give way."""
        before = self.sessions.released
        tokens = [7, *[self.rng.randrange(1, 9) for _ in range(27)]]
        request = self.cache.begin(TokenKey(tokens))
        decision = self.sessions.admit(request)
        if not decision.admitted:  # copies of data that was released hold the room
            self.cache.drain()
            self.cache.poll()
            decision = self.sessions.admit(request)
        assert decision.admitted, decision
        self.counts["gave way"] += self.sessions.released - before
        self.cache.load_back(request)
        assert self.cache.drain()
        life.prefill(self.cache, request)
        self.cache.finish(request)

    def clear(self, session: KeptSession) -> None:
        """A kept session does not go on with data of before a clear."""
        self.cache.clear()
        if session.kept_tokens:
            assert run_turn(self.sessions, session, [5]) == 0
            self.tokens[session].append(5)
            session.end()

    def close(self) -> None:
        for session in self.open:
            session.close()
        assert not self.cache.requests
        assert not self.sessions.idle
        assert self.cache.drain()
        self.cache.check_integrity()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
@pytest.mark.parametrize("setup", one_of_each_kind())
def test_turns_append_rewind_and_end_as_a_model_of_tokens_says(
    setup: Setup, policy: WritePolicy
) -> None:
    counts = Counter[str]()
    for seed in range(4):
        sizes: dict[str, Any] = {"device_tokens": 48, "host_tokens": 96}
        with setup.open(policy=policy, guard=GuardMode.ON, **sizes) as cache:
            talk = Conversations(cache, Random(seed), counts)
            for _ in range(40):
                talk.draw()
            talk.close()
    assert counts["kept"]
    assert counts["rewound"]
    assert counts["gave way"]


@pytest.mark.parametrize("setup", one_of_each_kind())
def test_a_turn_goes_on_behind_its_tail(setup: Setup) -> None:
    """Tails are no whole pages; without the session the next turn would compute them again."""
    with setup.open() as cache:
        sessions = KeptSessions(cache, limit_tokens=64)
        session = sessions.open(TokenKey([1]))
        assert run_turn(sessions, session, [2] * 10) == 0
        session.end()
        assert session.kept_tokens == 11
        assert run_turn(sessions, session, [3] * 4) == 11
        session.end()
        same = cache.begin(TokenKey([1, *[2] * 10, *[3] * 4, 4]))
        assert same.anchor_tokens <= 14  # others have whole pages
        cache.abort(same)
        session.close()


def open_sessions_on(
    cache: Cache, limit_tokens: int, n: int
) -> tuple[KeptSessions, list[KeptSession]]:
    sessions = KeptSessions(cache, limit_tokens=limit_tokens)
    opened = [sessions.open(TokenKey([each + 1])) for each in range(n)]
    for each in opened:
        run_turn(sessions, each, [5] * 20)
        each.end()
    return sessions, opened


def test_the_bound_releases_the_longest_idle_first() -> None:
    with Cache.open(["full"], page_size=4, device_tokens=256) as cache:
        sessions, (first, second, third) = open_sessions_on(cache, 50, 3)
        assert sessions.idle == [second, third]
        assert sessions.released == 1
        assert repr(sessions) == ("<KeptSessions: 2 of 64 idle, with 42 of 50 tokens; 1 gave way>")
        assert first.request is None
        assert run_turn(sessions, first, [6]) == 20  # the tree has its whole pages
        first.end()
        assert sessions.idle == [third, first]
        none = KeptSessions(cache, limit_tokens=0)
        alone = none.open(TokenKey([9]))
        run_turn(none, alone, [1, 2])
        alone.end()
        assert not none.idle


def test_a_session_says_in_one_line_why_a_call_is_wrong() -> None:
    with Cache.open(["full"], page_size=4, device_tokens=256) as cache:
        with pytest.raises(ConfigError, match="limit_tokens"):
            KeptSessions(cache, limit_tokens=-1)
        sessions = KeptSessions(cache, limit_tokens=64)
        session = sessions.open(TokenKey([1, 2]))
        for call in (session.end, session.retract, session.abort, session.next_chunk):
            with pytest.raises(LeaseError, match="no turn of the session runs; begin one"):
                call()
        with pytest.raises(ConfigError, match="rewind: n_tokens=3; give at most the sequence's 2"):
            session.rewind(3)
        with pytest.raises(ConfigError):
            session.begin([4], reserve=-1)
        assert session.key.n_tokens == 2
        session.begin([3])
        for name in ("begin", "release"):
            with pytest.raises(LeaseError, match=f"{name}: a turn of the session runs; end, retr"):
                getattr(session, name)()
        session.close()
        assert session.key.n_tokens == 2
        with pytest.raises(LeaseError, match="begin: the session is closed; open another"):
            session.begin([3])


@pytest.mark.parametrize("ends", ["finish", "abort"])
def test_a_session_outlives_its_request_that_was_ended_by_the_cache(ends: str) -> None:
    with Cache.open(["full"], page_size=4, device_tokens=256) as cache:
        sessions, (session, other) = open_sessions_on(cache, 256, 2)
        getattr(cache, ends)(session.request)  # while it is idle
        assert run_turn(sessions, session, [6]) == 20
        getattr(cache, ends)(session.request)  # while its turn runs
        with pytest.raises(LeaseError, match="end: the cache's finish or abort ended the turn"):
            session.end()
        with pytest.raises(LeaseError, match="no turn of the session runs; begin one"):
            session.abort()
        assert run_turn(sessions, session, [7]) == 20
        session.end()
        getattr(cache, ends)(session.request)
        assert sessions.idle == [other, session]
        assert sessions.give_way()
        assert sessions.give_way()
        assert not sessions.idle
        run_turn(sessions, session, [8])
        getattr(cache, ends)(session.request)
        session.close()
        assert not cache.requests
        cache.check_integrity()


def test_only_a_cache_and_its_sessions_are_taken() -> None:
    with Cache.open(["full"], page_size=4, device_tokens=256) as cache:
        sessions, (session,) = open_sessions_on(cache, 256, 1)
        for given in ("x", session):
            with pytest.raises(ConfigError, match="keep: end a session's turn"):
                sessions.keep(given)  # type: ignore[arg-type]
        assert sessions.idle == [session]
        with pytest.raises(ConfigError, match=r"KeptSessions: .* is no Cache"):
            KeptSessions("x", limit_tokens=1)  # type: ignore[arg-type]
        session.close()
    with pytest.raises(LeaseError, match="closed"):
        KeptSessions(cache, limit_tokens=1)


def test_a_turn_that_goes_on_takes_the_room_of_idle_sessions() -> None:
    with Cache.open(["full"], page_size=4, device_tokens=64) as cache:
        sessions, (first, second) = open_sessions_on(cache, 64, 2)
        assert run_turn(sessions, second, [6] * 40) == 21  # 61 tokens of 64
        assert second.goes_on
        assert first.request is None
        second.end()
        second.close()


def test_a_retracted_turn_leaves_its_data() -> None:
    with Cache.open(["full"], page_size=4, device_tokens=64) as cache:
        sessions = KeptSessions(cache, limit_tokens=64)
        session = sessions.open(TokenKey([1]))
        run_turn(sessions, session, [2] * 20)
        session.retract()
        assert session.begin().anchor_tokens == 20
        session.retract()
        assert session.key.n_tokens == 21
        session.begin()
        session.abort()
        assert session.key.n_tokens == 1  # the turn's tokens, too
        session.begin([2] * 20)
        session.retract()
        session.begin([3])
        session.abort()
        assert session.key.n_tokens == 21  # a turn of its own


def test_a_turn_does_not_end_while_its_key_lacks_tokens_that_are_computed() -> None:
    """The next turn's tokens would get the data of a token that was sampled."""
    with Cache.open(["full"], page_size=4, device_tokens=64) as cache:
        sessions = KeptSessions(cache, limit_tokens=64)
        session = sessions.open(TokenKey([1]))
        run_turn(sessions, session, [2] * 20)
        assert session.request is not None
        assert sessions.allocate(session.request, 1)
        cache.computed(session.request, 1)
        with pytest.raises(LeaseError, match="end: 22 tokens are computed, the sequence has 21; e"):
            session.end()
        session.key.extend([7])
        session.end()
        assert run_turn(sessions, session, [3]) == 22
        session.end()
        session.close()


def test_a_turn_that_goes_on_keeps_its_last_state_for_others() -> None:
    components = {"full": {}, "mamba": {"states": 16}}
    sizes: dict[str, Any] = {"page_size": 4, "device_tokens": 128, "decode_interval_tokens": 8}
    with Cache.open(components, **sizes) as cache:
        sessions = KeptSessions(cache, limit_tokens=64)
        session = sessions.open(TokenKey([1]))
        run_turn(sessions, session, [2] * 10)
        session.end()
        request = session.begin([3] * 12)
        for n_tokens in (5, 7):  # a state at 16
            assert session.next_chunk() == n_tokens
            assert sessions.allocate(request, n_tokens)
            cache.computed(request, n_tokens)
        session.end()
        session.close()
        assert cache.explain(TokenKey([1, *[2] * 10, *[3] * 12, 4])).anchor == 16
