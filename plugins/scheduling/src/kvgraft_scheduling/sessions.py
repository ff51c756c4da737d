"""Conversations whose requests stay open between turns, within a bound.

A request that ends leaves whole pages, and states at the boundaries where copies were kept. The
tokens behind, its tail, are computed again by the next turn: up to a page, with recurrent states up
to `decode_interval_tokens`. A kept session's request does not end with its turn. The next turn
appends its tokens to the same key and computes nothing again.

    begin ─► [admit ─ load_back] ─► next_chunk, allocate, computed ─► end ─► begin ...
                                                                       │
              its request is kept: it goes on with the next turn ◄─────┤
              released: the next turn matches what the tree has  ◄─────┘  bound, room, rewind

An idle request pins its whole sequence on DEVICE. So idle sessions have a bound, and they give way,
the longest idle first, to requests that are short of room. Releasing one loses its tail alone.
"""

from __future__ import annotations

from typing import Any

from kvgraft import Cache
from kvgraft.admission.decision import Decision, Outcome
from kvgraft.errors import ConfigError, LeaseError
from kvgraft.refusals import of_type
from kvgraft.requests.request import Request, Stage, expect_key
from kvgraft.sizes import expect_count
from kvgraft.tree.keys import TokenKey, Tokens

__all__ = ["KeptSession", "KeptSessions"]


class KeptSessions:
    """The sessions of one cache. Its methods are called on the cache's thread.

    Args:
        cache: the cache.
        limit_tokens: most tokens that idle sessions hold on DEVICE together.
        limit_sessions: most idle sessions; each also holds a state slot of every state component.

    Attributes:
        idle: sessions that keep their request between turns, the longest idle first.
        released: idle sessions that gave way, for the bound or for room.

    Raises:
        ConfigError: no cache, a closed one, or a limit that is no number of 0 or more.
    """

    def __init__(self, cache: Cache, *, limit_tokens: int, limit_sessions: int = 64) -> None:
        given: object = cache
        if not isinstance(given, Cache):
            raise ConfigError(f"KeptSessions: {of_type(given)} is no Cache")
        cache.expect_open()
        self.cache = cache
        self.limit_tokens = expect_count("KeptSessions: limit_tokens", limit_tokens)
        self.limit_sessions = expect_count("KeptSessions: limit_sessions", limit_sessions)
        self.idle: list[KeptSession] = []
        self.released = 0

    def __repr__(self) -> str:
        return (
            f"<KeptSessions: {len(self.idle)} of {self.limit_sessions} idle, with "
            f"{self.idle_tokens} of {self.limit_tokens} tokens; {self.released} gave way>"
        )

    @property
    def idle_tokens(self) -> int:
        """Tokens that idle sessions hold on DEVICE."""
        return sum([each.kept_tokens for each in self.idle])

    def open(self, key: TokenKey) -> KeptSession:
        """A session whose sequence so far is a key, maybe an empty one; the key is its own.

        Raises:
            ConfigError: it is no `TokenKey`.
        """
        return KeptSession(self, expect_key(key))

    def give_way(self) -> bool:
        """Release the session that is idle for longest; False if none is."""
        if not self.idle:
            return False
        self.released += 1
        self.idle[0].release()
        return True

    def admit(self, request: Request) -> Decision:
        """`Cache.admit`; idle sessions are released for a request that does not fit."""
        decision = self.cache.admit(request)
        while decision.outcome is Outcome.DEFERRED and decision.pending is None and self.give_way():
            decision = self.cache.admit(request)
        return decision

    def allocate(self, request: Request, n_tokens: int) -> bool:
        """`Cache.allocate`; idle sessions are released where there is no room."""
        given = self.cache.allocate(request, n_tokens)
        while not given and self.give_way():
            given = self.cache.allocate(request, n_tokens)
        return given

    def keep(self, session: KeptSession) -> None:
        """A session is idle from now on; the longest idle ones are released above the bound.

        `KeptSession.end` calls it. Raises `ConfigError` for something else or an idle session.
        """
        given: object = session
        if not isinstance(given, KeptSession) or given in self.idle:
            raise ConfigError("KeptSessions: keep: end a session's turn, which keeps it")
        self.idle.append(session)
        while len(self.idle) > self.limit_sessions or self.idle_tokens > self.limit_tokens:
            self.give_way()


class KeptSession:
    """A conversation; made by `KeptSessions.open`.

    Attributes:
        key: its tokens, those of the running turn included.
        request: the request of its turn, or the one kept since; None if there is none.
        closed: whether `close` was called.
    """

    def __init__(self, sessions: KeptSessions, key: TokenKey) -> None:
        self._sessions = sessions
        self._cache = sessions.cache
        self.key = key
        self.request: Request | None = None
        self.closed = False
        self._runs = False
        self._retracted = False
        self._n_before = 0

    def __repr__(self) -> str:
        stage = "running" if self._runs else "closed" if self.closed else "idle"
        return f"<KeptSession {stage}: {self.key.n_tokens} tokens, {self.kept_tokens} kept>"

    @property
    def kept_tokens(self) -> int:
        """Tokens that its request holds on DEVICE; 0 without one."""
        return 0 if self.request is None else self.request.computed

    @property
    def goes_on(self) -> bool:
        """Whether its request is admitted: a turn that found it kept need not be admitted."""
        return self.request is not None and self.request.stage is Stage.ADMITTED

    def begin(self, tokens: Tokens = (), **asked: Any) -> Request:
        """Begin a turn: append tokens, and go on with the kept request or with a new one.

        Where `goes_on` is true afterwards, all tokens before are computed: compute the new ones,
        chunk by chunk, by `next_chunk` and `KeptSessions.allocate`. They are beyond what the
        request was promised, so `allocate` may return False: then `retract`, and begin again
        without tokens. Otherwise the request is a new one, to be admitted by `KeptSessions.admit`.
        If that defers it, `retract` it and begin again later.

        Args:
            tokens: the turn's own.
            asked: arguments of `Cache.begin` for a new request, such as `reserve`.

        Raises:
            LeaseError: a turn runs, or the session is closed.
            ConfigError: tokens that a key refuses, no token at all, or values that `Cache.begin`
                refuses; the sequence is as before.
        """
        self._expect_idle("begin")
        if self.request is not None and (
            self.request.stage is Stage.CLOSED or self._cache.tree.is_cleared(self.request.root)
        ):
            self.release()  # its data is of before the clear, which no request may hit any more
        n_before, n_first = self.key.n_tokens, self._n_before
        if self.request is not None:
            self.key.extend(tokens)
            self._sessions.idle.remove(self)
        else:
            self.key.extend(tokens)
            try:
                self.request = self._cache.begin(self.key, **asked)
            except BaseException:
                self.key.truncate(n_before)
                raise
        goes_on = self._retracted and self.key.n_tokens == n_before
        self._n_before, self._runs = n_first if goes_on else n_before, True
        self._retracted = False
        return self.request

    def next_chunk(self, limit: int | None = None) -> int:
        """Tokens of the sequence that the next pass computes; 0 where all are computed.

        Behind the prompt of its request it ends at the last boundary where a state is kept.

        Raises:
            LeaseError: no turn runs, or its request is not admitted.
        """
        request = self._expect_turn("next_chunk")
        if request.computed < request.prompt:
            return self._cache.next_chunk(request, limit)
        self._cache.expect(request, Stage.ADMITTED)
        end = self.key.n_tokens
        if limit is not None:
            end = min(end, request.computed + expect_count("next_chunk: limit", limit))
        if self._cache.tree.has_state:
            config = self._cache.config
            apart = config.decode_interval_tokens or config.page_size
            kept = end // apart * apart
            end = kept if kept > request.computed else end
        return end - request.computed

    def end(self) -> None:
        """End the turn: share its data, and keep its request within the bound.

        Raises:
            LeaseError: no turn runs, its request is not admitted, or more tokens are computed than
                the sequence has: the next turn's tokens would get their data.
        """
        request = self._expect_turn("end")
        if request.computed > self.key.n_tokens:
            raise LeaseError(
                f"end: {request.computed} tokens are computed, the sequence has "
                f"{self.key.n_tokens}; extend its key by the others first"
            )
        self._cache.checkpoint(request)
        self._runs = False
        self._sessions.keep(self)

    def retract(self) -> None:
        """The turn makes room, or cannot be admitted: its data goes to the tree, begin it again.

        Raises:
            LeaseError: no turn runs.
        """
        request = self._expect_turn("retract")
        if request.stage is Stage.ADMITTED:
            self._cache.retract(request)
        else:
            self._cache.abort(request)
        self.request, self._runs, self._retracted = None, False, True

    def abort(self) -> None:
        """Drop the turn, and with it all tokens since its `begin`; the first, if it was retracted.

        Raises:
            LeaseError: no turn runs.
        """
        self._cache.abort(self._expect_turn("abort"))
        self.request, self._runs = None, False
        self.key.truncate(self._n_before)

    def rewind(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens of the sequence.

        If that cuts computed tokens, the kept request ends, and the next turn resumes at the last
        boundary at which every component has data (M1).

        Raises:
            LeaseError: a turn runs, or the session is closed.
            ConfigError: not a number from 0 to the sequence's.
        """
        self._expect_idle("rewind")
        n_tokens = expect_count("rewind: n_tokens", n_tokens)
        if n_tokens > self.key.n_tokens:
            raise ConfigError(
                f"rewind: n_tokens={n_tokens}; give at most the sequence's {self.key.n_tokens}"
            )
        if self.request is not None and n_tokens < max(self.request.computed, self.request.prompt):
            self.release()
        self.key.truncate(n_tokens)
        self._retracted = False

    def release(self) -> None:
        """End the kept request: its data stays in the tree, its tail does not. None: nothing.

        Raises:
            LeaseError: a turn runs.
        """
        self._expect_idle("release")
        request, self.request = self.request, None
        if request is not None:
            self._sessions.idle.remove(self)
            if request.stage is not Stage.CLOSED:  # the engine ended it
                self._cache.finish(request, hint="turn-ended")

    def close(self) -> None:
        """Release it; it begins no turn any more. A turn that runs is dropped."""
        if self.request is not None and self.request.stage is Stage.CLOSED and self._runs:
            self.request, self._runs = None, False
        elif self._runs:
            self.abort()
        elif not self.closed:
            self.release()
        self.closed = True

    def _expect_idle(self, call: str) -> None:
        if self.closed:
            raise LeaseError(f"{call}: the session is closed; open another")
        if self._runs:
            raise LeaseError(f"{call}: a turn of the session runs; end, retract or abort it first")

    def _expect_turn(self, call: str) -> Request:
        if not self._runs or self.request is None:
            raise LeaseError(f"{call}: no turn of the session runs; begin one")
        if self.request.stage is Stage.CLOSED:
            self.request, self._runs = None, False
            raise LeaseError(
                f"{call}: the cache's finish or abort ended the turn's request, and the turn with "
                "it; end turns by the session's calls, and begin the next one"
            )
        return self.request
