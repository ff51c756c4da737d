"""One sequence in a model, with everything that it holds in the cache.

    with memory.session(input_ids, max_new_tokens=64) as session:
        model.generate(input_ids, **session.cache.arguments, max_new_tokens=64)

Leaving the block finishes the session, so that others can reuse its data. An exception, or a failed
forward pass in it, aborts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from kvgraft import Decision, KvgraftError, LeaseError, Outcome, TokenKey
from kvgraft_hisparse.hot_buffer import HotBuffer, SwapStatistics
from kvgraft_transformers.errors import AdmissionRefusedError, SessionError

if TYPE_CHECKING:
    from kvgraft import Prefetch
    from kvgraft_transformers.memory import ModelMemory
    from kvgraft_transformers.session_cache import SessionCache

__all__ = ["Session", "positions"]


class Session:
    """A sequence: its tokens, its lease, its slots. Made by `ModelMemory`.

    Args:
        memory: the pools.
        key: the prompt; it grows by tokens computed beyond it.
        reserve: tokens to keep slots for behind the prompt.
        chunk: most tokens a prefill pass computes; the whole prompt by default.
        prefetch: its prefetch from storage; pages that have not arrived are given up.
        resume_at: tokens of the prompt after which other prompts will differ: one position, several
            or None.
        limit_tokens: its greatest length; by default only memory limits it.
        max_deferrals: how many calls of `admit` may defer it while another session computes its
            prefix.
        hints: the arguments `hint`, `priority` and `ttl_s` of `Cache.begin`.

    Attributes:
        request: the core's request.
        key: its tokens, computed or not.
        error: why the cache could not take its last tokens; then it can only be aborted.
        rows_dense: of a sparse model, rows that attention over all tokens would have fetched from
            the host, over all layers and passes; compare with `swapped.rows_moved`.
    """

    def __init__(  # noqa: PLR0913 - by name, as those of `Cache.begin`
        self,
        memory: ModelMemory,
        key: TokenKey,
        *,
        reserve: int = 0,
        chunk: int | None = None,
        prefetch: Prefetch | None = None,
        resume_at: int | Sequence[int] | None = (),
        limit_tokens: int | None = None,
        max_deferrals: int = 0,
        hints: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.memory = memory
        self.key = key
        self.limit_tokens = limit_tokens
        last = key.n_tokens - memory.page_size
        # for other prompts the core keeps the last boundary by itself, if a cut pays
        repeat = [last] if key.n_tokens % memory.page_size == 0 else []
        self.request = memory.cache.begin(
            key,
            reserve=reserve,
            chunk=chunk,
            prefetch=prefetch,
            resume_at=[*repeat, *positions(resume_at)],
            max_deferrals=max_deferrals,
            **hints,
        )
        self._hot: list[HotBuffer] = []
        self._cache: SessionCache | None = None
        self._swapped = SwapStatistics(0, 0)
        self._in_pieces = False
        self._told_at: object = None
        self.error: KvgraftError | None = None
        self.rows_dense = 0

    def __repr__(self) -> str:
        ended = ", ended" if self.ended else ""
        return (
            f"<Session {self.computed} of {self.key.n_tokens} tokens computed, "
            f"{self.cached_tokens} cached{ended}>"
        )

    # -- getting ready

    def admit(self) -> Decision:
        """Admit it; a session that is not admitted can be aborted and begun again."""
        return self.memory.cache.admit(self.request)

    def load_back(self) -> None:
        """Start to load back host data; `ready` says when it has arrived."""
        self.memory.cache.load_back(self.request)

    @property
    def ready(self) -> bool:
        """Whether its load-back has ended; it may have failed, see `load_failed`."""
        return self.request.ready

    @property
    def load_failed(self) -> bool:
        """Whether its load-back failed; `restart` it and admit it again."""
        return self.request.load_failed

    def restart(self) -> None:
        """Match again after a failed load-back; it must be admitted again."""
        self._close()
        self._cache = None
        self.memory.cache.restart(self.request)

    def open(self) -> None:
        """Admit it, fetch its host data, and wait for that.

        Raises:
            AdmissionRefusedError: it does not fit, now or ever; it is aborted.
            TransferError: nothing arrived within the cache's `transfer_timeout_s`.
        """
        while True:
            decision = self.admit()
            if decision.outcome is Outcome.DEFERRED:
                # copies in flight hold their source
                self.memory.cache.drain()
                decision = self.admit()
            if not decision.admitted:
                self.abort()
                raise AdmissionRefusedError(decision, len(self.memory.cache.requests))
            self.load_back()
            if not self.memory.wait_for(self):
                self.abort()
                raise LeaseError("a load-back did not end in time; raise transfer_timeout_s")
            if not self.load_failed:
                return
            self.restart()

    # -- its identity

    @property
    def computed(self) -> int:
        """Tokens whose data exists, the reused prefix included."""
        return self.request.computed

    @property
    def cached_tokens(self) -> int:
        """Tokens that it did not have to compute."""
        return self.request.anchor_tokens

    @property
    def storage_tokens(self) -> int:
        """Cached tokens that were prefetched from storage for it."""
        return self.request.storage_tokens

    @property
    def cache(self) -> SessionCache:
        """The model's cache for this session alone; `arguments` has it under the model's name.

        Raises:
            SessionError: the session has ended.
        """
        self.expect_open()
        if self._cache is None:
            self._cache = self.memory.session_cache([self])
        return self._cache

    @property
    def hot_buffer(self) -> HotBuffer:
        """The rows of a sparse model that are on the device (H1 to H8)."""
        if not self._hot:
            component = self.memory.sparse_component
            self._hot.append(component.open_buffer(self.memory.cache, self.request))
        return self._hot[0]

    @property
    def swapped(self) -> SwapStatistics:
        """Selected rows of a sparse model: resident ones, and those moved to the device."""
        if not self._hot:
            return self._swapped
        return self._hot[0].statistics

    # -- checks of arguments

    def expect_open(self) -> None:
        """Refuse a session that has ended.

        Raises:
            SessionError: it has ended.
        """
        if self.ended:
            raise SessionError("the session has ended; begin another with the same tokens")

    def expect_tokens(self, tokens: Sequence[int], start: int) -> None:
        """Refuse other tokens than the session's.

        Args:
            tokens: tokens from position `start` on; those beyond the session's are not checked.
            start: a position of the sequence.

        Raises:
            SessionError: it names the first that differs.
        """
        known = self.key.tokens(start, start + len(tokens)).tolist()
        if list(tokens[: len(known)]) != known:
            at = next(i for i, (a, b) in enumerate(zip(tokens, known)) if a != b)
            raise SessionError(
                f"token {start + at} is {tokens[at]}, the session was begun with {known[at]}; "
                "begin a session with the tokens you run"
            )

    def expect_length(self, n_tokens: int) -> None:
        """Refuse a sequence that becomes longer than was reserved.

        Raises:
            SessionError: it names both lengths.
        """
        if self.limit_tokens is not None and n_tokens > self.limit_tokens:
            prompt = self.request.prompt
            raise SessionError(
                f"{n_tokens} tokens in a session that was begun for {self.limit_tokens}: a prompt "
                f"of {prompt} and max_new_tokens {self.limit_tokens - prompt}; begin it with "
                f"max_new_tokens={n_tokens - prompt}"
            )

    # -- around a forward pass; called by `SessionCache`

    def before_cut(self, n_tokens: int) -> int:
        """How many of the next `n_tokens` tokens come before a boundary that keeps a state."""
        size, start = self.memory.page_size, self.computed
        cuts = [page * size - start for page in self.request.checkpoints]
        return min([cut for cut in cuts if 0 < cut < n_tokens], default=n_tokens)

    def expect_next(self, tokens: Sequence[int]) -> None:
        """Refuse `tokens` that cannot continue the sequence.

        Raises:
            SessionError: an earlier pass failed, tokens differ from the session's, or they are too
                many.
        """
        self._require_whole()
        start = self.computed
        self.expect_tokens(tokens, start)
        self.expect_length(start + len(tokens))

    def begin_step(self, tokens: Sequence[int]) -> None:
        """The model is about to compute `tokens`, whose slots are allocated.

        Until `end_step` the session is inconsistent: layers write their states in place.
        """
        self._in_pieces = True
        start = self.computed
        if unknown := tokens[self.key.n_tokens - start :]:
            self.key.extend(unknown)
        if self.memory.sparse is not None:
            self._read_host_pages(self.memory.sparse)
            self.rows_dense += self.memory.n_sparse_layers * start

    def end_step(self, n_tokens: int) -> None:
        """The tokens are computed and noted: publish data up to the last passed boundary.

        An error of the cache is this session's from now on.
        """
        try:
            if self.error is None and self.computed % self.memory.page_size < n_tokens:
                self.memory.cache.checkpoint(self.request)
        except KvgraftError as error:
            self.error = error
        self._in_pieces = self.error is not None

    def _read_host_pages(self, sparse: str) -> None:
        """Give the hot buffer the host pages of the sequence.

        Pages that were shared meanwhile may be another request's, with the same bytes.
        """
        table = self.memory.cache.host_table(self.request, sparse)
        buffer, anchor = self.hot_buffer, self.request.receipt.anchor
        n_known = buffer.n_host_pages
        if anchor is not self._told_at:
            buffer.replace_host_pages(0, table[:n_known].tobytes())
            self._told_at = anchor
        buffer.add_host_pages(table[n_known:].tobytes())

    def _require_whole(self) -> None:
        if self.error is not None:
            raise SessionError(f"the cache could not take its last tokens: {self.error}; abort it")
        if self._in_pieces:
            raise SessionError(
                "a forward pass of this session failed and left its states incomplete; abort it "
                "and begin another, which resumes from the last shared boundary"
            )

    # -- the end

    def finish(self) -> int:
        """End it and leave its data in the cache; returns the number of cached tokens.

        Raises:
            SessionError: a forward pass failed; only `abort` is left.
        """
        self._require_whole()
        self._close()
        return self.memory.cache.finish(self.request)

    def retract(self) -> int:
        """Like `finish`, but it will be begun again with the same key."""
        return self.finish()

    def abort(self) -> None:
        """End it and drop the data computed since the last shared boundary."""
        self._close()
        self.memory.cache.abort(self.request)

    @property
    def ended(self) -> bool:
        """Whether it was finished or aborted."""
        return self.request.stage.value == "closed"

    def _close(self) -> None:
        self.memory.working.leave(self)
        if self._hot:
            buffer = self._hot.pop()
            self._swapped = buffer.statistics
            buffer.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.ended:
            return
        if error is None and not self._in_pieces:
            self.finish()
        else:
            self.abort()


def positions(resume_at: int | Sequence[int] | None) -> list[int]:
    """One position, several or None, as a list; the cache checks them."""
    if resume_at is None:
        return []
    return list(resume_at) if isinstance(resume_at, Iterable) else [resume_at]
