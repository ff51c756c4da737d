"""Prefetches of queued requests: shared, bounded, ended by policy (S1 to S7)."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator

from kvgraft.config import PrefetchPolicy, StorageSettings
from kvgraft.errors import LeaseError
from kvgraft.request import expect_key
from kvgraft.storage_tier.fetching import Fetch, Phase
from kvgraft.storage_tier.inventory import ShortOf
from kvgraft.storage_tier.scene import Scene
from kvgraft.storage_tier.slabs import Draining
from kvgraft.tree import matching
from kvgraft.tree.keys import TokenKey, common_prefix_pages
from kvgraft.tree.ledger import Ledger

__all__ = ["Prefetch", "Prefetching"]


AGAIN_AT_A_TIME = 16
"""Prefetches that look again in one poll, after what they shared has ended; a millisecond each."""


class Prefetch:
    """What a queued request may expect from STORAGE; made by `StorageTier.prefetch`.

    Give it to `Cache.begin` when the request is to run, or cancel it. Token counts.

    Attributes:
        key: the request's.
        anchor_tokens: what could be resumed from when it was queued.
        tokens: what can be resumed from since, thanks to STORAGE; no less.
        planned_tokens: how far the store's data would have gone, had HOST memory been no matter.
        limit: the deepest boundary of use, in pages.
        fetch: what brings it; None once it has ended.
        shared, joined: whether it waited, or waits now, for what another request started.
        spare: whether it takes only what is free on HOST, and every page counts.
        reason: how it ended, for people; empty while it has not.
        short_of: what kept it from getting more than nothing; None otherwise.
    """

    __slots__ = (
        "_clock",
        "_deadline",
        "_owner",
        "_policy",
        "anchor_tokens",
        "cancelled",
        "fetch",
        "joined",
        "key",
        "limit",
        "planned_tokens",
        "reason",
        "shared",
        "short_of",
        "spare",
        "tokens",
    )

    def __init__(
        self,
        key: TokenKey,
        limit: int,
        settings: StorageSettings,
        clock: Callable[[], float],
        *,
        owner: object,
        spare: bool,
    ) -> None:
        self.key = key
        self._owner = owner
        self.limit = limit
        self.spare = spare
        self._clock = clock
        self._policy = settings.prefetch
        self._deadline = clock() + settings.prefetch_timeout_s
        self.anchor_tokens = self.tokens = self.planned_tokens = 0
        self.shared = self.joined = False
        self.cancelled = False
        self.reason = ""
        self.short_of: ShortOf | None = None
        self.fetch: Fetch | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.fetch is None

    @property
    def ready(self) -> bool:
        """Whether the policy lets the request begin; never blocks (S6)."""
        if self._policy is PrefetchPolicy.BEST_EFFORT or self.ended:
            return True
        return self._policy is PrefetchPolicy.TIMEOUT and self._clock() >= self._deadline

    @property
    def gained_tokens(self) -> int:
        """Tokens that STORAGE made resumable."""
        return self.tokens - self.anchor_tokens

    def gained_of(self, anchor_tokens: int) -> int:
        """The part of that inside a prefix."""
        return max(0, min(anchor_tokens, self.tokens) - self.anchor_tokens)

    def __str__(self) -> str:
        """One line: what it gained beyond what, and how it ended."""
        reason = self.reason or "under way"
        if self.planned_tokens > self.tokens:
            reason += f"; storage has {self.planned_tokens}"
        return f"{self.gained_tokens} tokens beyond {self.anchor_tokens}: {reason}"

    def __repr__(self) -> str:
        return f"<Prefetch {self}>"


class Prefetching:
    """Starts fetches, shares them, bounds them and takes in what they bring.

    Attributes:
        counts: how prefetches went, by name.
        in_vain: why they gained nothing, numbers left out, and how often.
    """

    def __init__(self, scene: Scene, settings: StorageSettings, clock: Callable[[], float]) -> None:
        self.scene = scene
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self.in_vain: Counter[str] = Counter()
        self._clock = clock
        self._flying: dict[int, Fetch] = {}
        self._by_page: dict[bytes, Fetch] = {}
        self._waiting: dict[Fetch, list[Prefetch]] = {}
        self._draining: list[Draining] = []
        self._again: deque[tuple[Prefetch, bool]] = deque()
        size = scene.tree.page_size
        self._threshold = max(1, -(-settings.threshold_tokens // size))

    @property
    def nbytes_in_flight(self) -> int:
        """Bytes of HOST that prefetches hold; 0 when none is under way (S2)."""
        held = sum(fetch.nbytes for fetch in self._flying.values())
        return held + sum(draining.nbytes for draining in self._draining)

    @property
    def n_in_flight(self) -> int:
        """Fetches under way, those to begin, and those given up but not yet over."""
        return len(self._flying) + len(self._draining) + len(self._again)

    def start(self, key: TokenKey, limit: int | None = None, *, spare: bool = False) -> Prefetch:
        """Look for what STORAGE has of a sequence; returns at once.

        Args:
            key: the sequence.
            limit: the deepest boundary of use, in pages; a request's by default (M2).
            spare: take only what is free on HOST, and whatever there is, below the threshold too.

        Raises:
            ConfigError: a namespace that has no name in storage.
        """
        expect_key(key)
        if limit is None:
            limit = max(0, key.n_tokens - 1) // self.scene.tree.page_size
        prefetch = Prefetch(key, limit, self.settings, self._clock, owner=self, spare=spare)
        self.counts["started"] += 1
        self._launch(prefetch)
        return prefetch

    def take(self, prefetch: Prefetch, key: TokenKey) -> None:
        """The request of `key` begins: publish what has come for it (S5, S6).

        Raises:
            LeaseError: it was cancelled, or is of another sequence or cache.
        """
        self._expect(prefetch)
        mine = prefetch.key
        if prefetch.cancelled:
            raise LeaseError("the prefetch was cancelled; begin without it, or prefetch again")
        if mine.namespace != key.namespace or not key.data.startswith(mine.data):
            raise LeaseError(
                f"the prefetch is of another sequence, of {mine.n_tokens} tokens; begin the one "
                "it was started for"
            )
        fetch = prefetch.fetch
        if fetch is None:
            return
        fetch.publish()
        self._leave(prefetch, "the request began before all had come")

    def cancel(self, prefetch: Prefetch) -> None:
        """The request is given up: nothing is published for it any more."""
        self._expect(prefetch)
        if prefetch.fetch is not None:
            self._leave(prefetch, "cancelled")
        prefetch.cancelled = True

    def poll(self) -> None:
        """Take in what has come; never waits."""
        for _ in range(min(len(self._again), AGAIN_AT_A_TIME)):
            prefetch, alone = self._again.popleft()
            self._launch(prefetch, alone=alone)
        for draining in [each for each in self._draining if each.ticket.done]:
            self._draining.remove(draining)
            for ledger, slots in draining.slots:
                ledger.cancel(slots)
        for fetch in list(self._flying.values()):
            if fetch.spare and fetch.phase is Phase.LOOKING and self.nbytes_in_flight:
                continue  # requests first, and one after the other, each with all of the budget
            left = fetch.step(self._budget())
            if left is not None:
                self._draining.append(left)
            if fetch.ended:
                self._ended(fetch)

    def stop(self, reason: str) -> None:
        """End everything under way; nothing more is published."""
        waiting = [each for each, _ in self._again]
        for sharing in self._waiting.values():
            waiting += sharing
        for prefetch in waiting:
            self._leave(prefetch, reason)

    def owners(self) -> Iterator[tuple[Ledger, bytes]]:
        """HOST slots in flight, for integrity checks."""
        for fetch in self._flying.values():
            yield from fetch.owners()
        for draining in self._draining:
            yield from draining.slots

    # -- inside

    def _expect(self, prefetch: object) -> None:
        if not isinstance(prefetch, Prefetch):
            raise LeaseError(
                f"a prefetch is what `cache.storage.prefetch` returned, not a "
                f"{type(prefetch).__name__}"
            )
        if prefetch._owner is not self:
            raise LeaseError("the prefetch belongs to another cache; use the one that started it")

    def _budget(self) -> int:
        return self.settings.prefetch_nbytes - self.nbytes_in_flight

    def _launch(self, prefetch: Prefetch, *, alone: bool = False) -> None:
        """Start what a prefetch waits for, or join who fetches it already, unless `alone`."""
        tree, key = self.scene.tree, prefetch.key
        threshold = 1 if prefetch.spare else self._threshold
        prefetch.fetch = None
        prefetch.limit = min(prefetch.limit, key.n_tokens // tree.page_size)  # it may have been cut
        self.scene.naming.namespace(key.namespace)
        tree.hold(key.namespace)
        try:
            found = matching.match(tree, key, prefetch.limit)
            tokens = found.anchor * tree.page_size
            if not prefetch.tokens:
                prefetch.anchor_tokens = tokens
            prefetch.tokens = max(prefetch.tokens, tokens)
            limit = min(prefetch.limit, found.anchor + self._most_pages())
            if limit - found.anchor < threshold:
                left, least = limit - found.anchor, threshold * tree.page_size
                reason = f"{left * tree.page_size} tokens to look for are below the threshold"
                self._finish(prefetch, f"{reason} of {least}")
                return
            if not self.scene.storage.attached:
                self._finish(prefetch, "no store is attached")
                return
            fetch = Fetch(self.scene, key, found, limit, threshold, spare=prefetch.spare)
            other = None if alone else self._by_page.get(fetch.first_hash)
            prefetch.joined = other is not None
            if other is not None:
                fetch, prefetch.shared = other, True
                self.counts["shared"] += 1
            elif not fetch.begin():
                self._finish(prefetch, fetch.reason)
                return
        finally:
            tree.let_go(key.namespace)
        if not prefetch.joined:
            self._flying[id(fetch)] = self._by_page[fetch.first_hash] = fetch
        self._waiting.setdefault(fetch, []).append(prefetch)
        prefetch.fetch = fetch

    def _most_pages(self) -> int:
        """Pages that fit under the cap, going by components that need every one (S2)."""
        sizes = [
            self.scene.slabs.nbytes[track.index] * track.slots_per_page
            for track in self.scene.tree.everything
        ]
        return self.settings.prefetch_nbytes // sum(sizes) if sizes else 1 << 31

    def _leave(self, prefetch: Prefetch, reason: str) -> None:
        fetch = prefetch.fetch
        assert fetch is not None
        self._note(prefetch, fetch)
        self._finish(prefetch, reason)
        if fetch not in self._waiting:  # it has ended; this one was to look again
            self._again = deque(each for each in self._again if each[0] is not prefetch)
            return
        self._waiting[fetch].remove(prefetch)
        if not self._waiting[fetch]:
            draining = fetch.stop(reason)
            if draining is not None:
                self._draining.append(draining)
            self._ended(fetch)

    def _ended(self, fetch: Fetch) -> None:
        """Tell who waits; who only shared it goes on from where it got to."""
        del self._flying[id(fetch)]
        if self._by_page.get(fetch.first_hash) is fetch:
            del self._by_page[fetch.first_hash]
        self.counts["shrunk"] += fetch.shrunk
        for prefetch in self._waiting.pop(fetch):
            shared = self._note(prefetch, fetch)
            prefetch.fetch = None
            came = fetch.boundary > fetch.anchor
            # it may have asked for more, or for less, than what this one wants
            more = came or shared < prefetch.limit or prefetch.spare != fetch.spare
            if prefetch.joined and more:
                prefetch.fetch = fetch
                self._again.append((prefetch, not came))
            else:
                prefetch.short_of = fetch.short_of
                self._finish(prefetch, fetch.reason)

    def _note(self, prefetch: Prefetch, fetch: Fetch) -> int:
        """What a prefetch gained: what can be resumed from of the tokens it shares with a fetch.

        Returns:
            The pages they share, as far as they are of use.
        """
        tree, key, limit = self.scene.tree, prefetch.key, prefetch.limit
        agreed = common_prefix_pages(key.data, 0, bytes(fetch.key.data), tree.page_bytes)
        tree.hold(key.namespace)
        try:
            anchor = matching.match(tree, key, limit).anchor
        finally:
            tree.let_go(key.namespace)
        reached = min(anchor, agreed, fetch.boundary, limit) * tree.page_size
        prefetch.tokens = max(prefetch.tokens, reached)
        planned = min(agreed, fetch.planned, limit) * tree.page_size
        prefetch.planned_tokens = max(prefetch.planned_tokens, planned)
        return min(agreed, limit)

    def _finish(self, prefetch: Prefetch, reason: str) -> None:
        prefetch.fetch = None
        gained = prefetch.gained_tokens
        prefetch.reason = reason or ("complete" if gained else "nothing of it came")
        self.counts["delivered" if gained else "in vain"] += 1
        if not gained:
            self.in_vain[re.sub(r"\d+", "N", prefetch.reason)] += 1
        self.counts["tokens"] += gained
