"""Prefetches of queued requests: shared, bounded, ended by policy (S1 to S7).

Their work on the scheduler's thread is cut into steps, and each prefetch has one in turn: a
small prefetch does not wait for a large one.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from kvgraft.errors import LeaseError
from kvgraft.refusals import of_type
from kvgraft.requests.request import expect_key
from kvgraft.tree import matching
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey, common_prefix_pages
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt
from kvgraft_storage.settings import PrefetchPolicy, StorageSettings
from kvgraft_storage.tier.context import TierContext
from kvgraft_storage.tier.deliveries import Deliveries
from kvgraft_storage.tier.fetching import Fetch, Phase
from kvgraft_storage.tier.inventory import ShortOf
from kvgraft_storage.tier.slabs import Draining
from kvgraft_storage.tier.slicing import Slice

__all__ = ["Prefetch", "Prefetching"]


COMPARED_NBYTES = 1 << 19
"""Bytes of two sequences that are compared in one step, but at least a page."""


class _Told(NamedTuple):
    """A prefetch that is to be told how its fetch ended, and the bytes they agree on at least."""

    prefetch: Prefetch
    fetch: Fetch


class _Short(NamedTuple):
    """The room that a prefetch lacked when it asked last.

    Attributes:
        of: the limit that was too small.
        lacking: the components whose pools were short.
        room: the bytes and slots that it could have had when it was planned.
        until: the time until which it waits for more.
    """

    of: ShortOf
    lacking: Sequence[TreeComponent]
    room: Sequence[int]
    until: float


class Prefetch:
    """A queued request's data on its way from STORAGE; made by `StorageTier.prefetch`.

    Give it to `Cache.begin` once, when the request should run, or cancel it: until then its data
    stays on HOST, at most `queue_timeout_s`. If HOST is short it waits for room as long, in order
    of arrival, and holds nothing meanwhile. Counts are tokens.

    Attributes:
        key: the request's.
        arrival: number in the order in which prefetches were started, from 1.
        anchor_tokens: tokens that could be resumed from when it was queued.
        tokens: tokens that can be resumed from now, thanks to STORAGE.
        planned_tokens: tokens that the store's data would reach with enough room on HOST, within
            `prefetch_nbytes`.
        capped: whether the rest of the sequence was not looked up, because of `prefetch_nbytes`.
        limit: the deepest boundary of use, in pages.
        fetch: the fetch that brings it; None once it has ended.
        agreed_nbytes: bytes of tokens that it is known to share with that fetch.
        shared: whether it ever waited for another request's fetch.
        joined: whether it waits for one now.
        spare: whether it takes only free HOST slots, and every page counts.
        reason: how it ended, for people; empty while it has not.
        short_of: why it got nothing; None otherwise.
        waits: whether it waits for room on HOST now, and no fetch is under way for it.
        begun: whether a request began with it.
    """

    __slots__ = (
        "_clock",
        "_deadline",
        "_owner",
        "_policy",
        "_timeout_s",
        "agreed_nbytes",
        "anchor_tokens",
        "arrival",
        "begun",
        "cancelled",
        "capped",
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
        "waits",
    )

    def __init__(
        self,
        key: TokenKey,
        limit: int,
        settings: StorageSettings,
        clock: Callable[[], float],
        *,
        owner: Prefetching,
        arrival: int,
        spare: bool,
    ) -> None:
        self.key = key
        self.arrival = arrival
        self._owner = owner
        self.limit = limit
        self.spare = spare
        self._clock = clock
        self._policy = settings.prefetch
        self._timeout_s = settings.prefetch_timeout_s
        self._deadline = clock() + self._timeout_s
        self.anchor_tokens = self.tokens = self.planned_tokens = 0
        self.shared = self.joined = False
        self.begun = self.cancelled = self.waits = self.capped = False
        self.reason = ""
        self.short_of: ShortOf | None = None
        self.fetch: Fetch | None = None
        self.agreed_nbytes = 0

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.fetch is None and not self.waits

    @property
    def ready(self) -> bool:
        """Whether the policy lets the request begin; never blocks (S6)."""
        return self.ended or self._policy is PrefetchPolicy.BEST_EFFORT or self.timed_out

    @property
    def timed_out(self) -> bool:
        """Whether its request need not wait, though more may come until `begin` takes it."""
        waits = self._policy is PrefetchPolicy.TIMEOUT and not self.ended
        return waits and self._clock() >= self._deadline

    @property
    def asked_tokens(self) -> int:
        """Tokens of the sequence that a request could resume from, in whole pages."""
        return self.limit * self._owner.context.tree.page_size

    @property
    def gained_tokens(self) -> int:
        """Tokens that STORAGE made resumable."""
        return self.tokens - self.anchor_tokens

    def __str__(self) -> str:
        """One line: the tokens gained, beyond which anchor, and how it ended."""
        reason = self.reason or "under way"
        if self.waits:
            reason = f"waits for room: {reason}"
        if self.timed_out:
            reason = (
                f"timed out after {self._timeout_s:g} s; the request may begin without the rest"
            )
        if self.capped:
            reason += f", capped by prefetch_nbytes; {self.asked_tokens} were asked for"
        if self.planned_tokens > self.tokens:
            reason += f"; storage has {self.planned_tokens}"
        return f"{self.gained_tokens} tokens beyond {self.anchor_tokens}: {reason}"

    def __repr__(self) -> str:
        return f"<Prefetch {self}>"


class Prefetching:
    """Starts fetches, shares them, bounds them and publishes their pages.

    Attributes:
        counts: how prefetches went, by name.
        in_vain: why they gained nothing, without numbers, and how often.
        in_flight: fetches that have begun and not ended, by their `id()`.
        deliveries: fetched data that waits for its request to begin.
        frees_host: whether others than prefetches hold slots of HOST that they will free.
    """

    new_fetch: type[Fetch] = Fetch
    """The class of a prefetch at work; a subclass names another."""

    def __init__(
        self, context: TierContext, settings: StorageSettings, clock: Callable[[], float]
    ) -> None:
        self.context = context
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self.in_vain: Counter[str] = Counter()
        self._clock = clock
        self.in_flight: dict[int, Fetch] = {}
        self._by_page: dict[tuple[int, bytes], Fetch] = {}
        self._waiting: dict[Fetch, list[Prefetch]] = {}
        self._draining: list[Draining] = []
        self.deliveries = Deliveries(context.tree, clock, settings.queue_timeout_s)
        self.frees_host: Callable[[], bool] = lambda: False
        self._short: dict[Prefetch, _Short] = {}
        self._told: deque[_Told] = deque()
        self._turns: deque[Fetch] = deque()
        size = context.tree.page_size
        self._threshold = max(1, -(-settings.threshold_tokens // size))

    @property
    def nbytes_in_flight(self) -> int:
        """Bytes of HOST that prefetches hold; 0 when none is under way (S2)."""
        held = sum(fetch.nbytes for fetch in self.in_flight.values())
        return held + sum(draining.nbytes for draining in self._draining)

    @property
    def n_in_flight(self) -> int:
        """Fetches under way, those to begin, and those abandoned but not yet over.

        Those that wait for room are not among them.
        """
        return len(self.in_flight) + len(self._draining) + len(self._told)

    def start(self, key: TokenKey, limit: int | None = None, *, spare: bool = False) -> Prefetch:
        """Look up a sequence's data in STORAGE; returns at once.

        Args:
            key: the sequence.
            limit: the deepest boundary of use, in pages; a request's by default (M2).
            spare: take only free HOST slots, and fetch also below the threshold.

        Raises:
            ConfigError: a namespace that has no name in storage.
        """
        expect_key(key)
        if limit is None:
            limit = max(0, key.n_tokens - 1) // self.context.tree.page_size
        self.counts["started"] += 1
        arrival = self.counts["started"]
        prefetch = Prefetch(
            key, limit, self.settings, self._clock, owner=self, arrival=arrival, spare=spare
        )
        self._launch(prefetch)
        return prefetch

    def resume(self, prefetch: Prefetch, time: Slice) -> None:
        """Run a prefetch that was just started at once, for a slice of time."""
        fetch = prefetch.fetch
        while fetch is not None and not prefetch.joined and prefetch.fetch is fetch:
            stepped = self._tell_next() if fetch.ended else self._step(fetch)
            if not stepped or time.spent:
                return

    def take(self, prefetch: Prefetch, key: TokenKey, time: Slice) -> None:
        """The request of `key` begins: publish the pages that arrived for it (S5, S6).

        Pages for which there is no time now are published in later polls.

        Raises:
            LeaseError: it was cancelled or taken before, or is of another sequence or cache.
        """
        self.expect(prefetch)
        mine = prefetch.key
        if prefetch.begun:
            raise LeaseError(
                "a request began with this prefetch before; begin without it, or prefetch again"
            )
        if prefetch.cancelled:
            raise LeaseError("the prefetch was cancelled; begin without it, or prefetch again")
        if mine is not key and (
            mine.namespace != key.namespace or not key.data.startswith(mine.data)
        ):
            raise LeaseError(
                f"the prefetch is of another sequence, of {mine.n_tokens} tokens; begin the one "
                "it was started for"
            )
        prefetch.begun = True
        fetch = prefetch.fetch
        reason = "the request began before all had come"
        if fetch is None or fetch.ended:
            self._leave(prefetch, reason, time)
            return
        whole = fetch.publish(_until_spent(time))
        alone = self._waiting[fetch] == [prefetch]
        self._leave(prefetch, reason, time, stop=whole or not alone)
        if alone and not whole:
            fetch.wind_up(reason)
            self._drain(fetch)

    def cancel(self, prefetch: Prefetch, time: Slice) -> None:
        """The request is given up: nothing is published for it any more."""
        self.expect(prefetch)
        self._leave(prefetch, "cancelled", time)
        prefetch.cancelled = True

    def poll(self) -> None:
        """Free the slots that abandoned calls have released, and retry where room came.

        Never waits.
        """
        for draining in [each for each in self._draining if each.ticket.done]:
            self._draining.remove(draining)
            for ledger, slots in draining.slots:
                ledger.cancel(slots)
        self.deliveries.expire()
        if self._short:
            self._ask_again()

    def step(self) -> bool:
        """One step of the next prefetch in turn; false if none can go on."""
        if self._told and self._tell_next():
            return True
        for _ in range(len(self._turns)):
            fetch = self._turns[0]
            self._turns.rotate(-1)
            if self._step(fetch):
                return True
        return False

    def stop(self, reason: str, namespaces: Container[object] | None = None) -> None:
        """End prefetches under way, in some namespaces or in all, without publishing more."""
        told = list(self._told)
        self._told.clear()
        for each in told:
            if namespaces is None or each.prefetch.key.namespace in namespaces:
                self._finish(each.prefetch, reason)
            else:
                self._told.append(each)
        for fetch in list(self.in_flight.values()):
            if namespaces is not None and fetch.key.namespace not in namespaces:
                continue
            for prefetch in list(self._waiting.get(fetch, ())):
                self._note(prefetch, fetch)
                self._finish(prefetch, reason)
            self._waiting.pop(fetch, None)
            self._stop(fetch, reason)
        for prefetch in [each for each in self._short if each.waits]:
            if namespaces is None or prefetch.key.namespace in namespaces:
                self._finish(prefetch, reason)

    def owners(self) -> Iterator[tuple[Ledger, bytes]]:
        """HOST slots in flight, for integrity checks."""
        for fetch in self.in_flight.values():
            yield from fetch.owners()
        for draining in self._draining:
            yield from draining.slots

    def receipts(self) -> list[Receipt]:
        """Pins on HOST, for integrity checks."""
        fetching = [receipt for fetch in self.in_flight.values() for receipt in fetch.receipts()]
        return fetching + self.deliveries.receipts()

    def expect(self, prefetch: object) -> None:
        """Refuse other objects than prefetches, and other caches' prefetches (`LeaseError`)."""
        if not isinstance(prefetch, Prefetch):
            raise LeaseError(
                f"{of_type(prefetch)} is no prefetch; give the one that "
                "cache.storage.prefetch returned"
            )
        if prefetch._owner is not self:
            raise LeaseError("the prefetch belongs to another cache; use the one that started it")

    # -- inside

    def _budget(self) -> int:
        return self.settings.prefetch_nbytes - self.nbytes_in_flight

    def _launch(self, prefetch: Prefetch, *, alone: bool = False) -> None:
        """Start the fetch a prefetch waits for, or join a running one, unless `alone`."""
        tree, key = self.context.tree, prefetch.key
        threshold = 1 if prefetch.spare else self._threshold
        prefetch.fetch = None
        prefetch.limit = min(prefetch.limit, key.n_tokens // tree.page_size)  # it may have been cut
        self.context.naming.namespace(key.namespace)
        root = tree.hold_root(key.namespace)
        try:
            found = matching.match(tree, key, prefetch.limit)
            tokens = found.anchor * tree.page_size
            if not prefetch.tokens:
                prefetch.anchor_tokens = tokens
            prefetch.tokens = max(prefetch.tokens, tokens)
            limit = min(prefetch.limit, found.anchor + self._most_pages())
            if limit - found.anchor < threshold:
                prefetch.capped = limit < prefetch.limit
                left, least = limit - found.anchor, threshold * tree.page_size
                reason = f"{left * tree.page_size} tokens to look for are below the threshold"
                whole = not left and prefetch.gained_tokens  # others brought the rest
                self._finish(prefetch, "" if whole else f"{reason} of {least}")
                return
            if not self.context.client.attached:
                self._finish(prefetch, "no store is attached")
                return
            fetch = self.new_fetch(self.context, key, found, limit, threshold, spare=prefetch.spare)
            fetch.capped = limit < prefetch.limit
            other = None if alone else self._fetching(fetch.first)
            prefetch.joined = other is not None
            if other is not None:
                fetch, prefetch.shared = other, True
                self.counts["shared"] += 1
            elif not fetch.begin():
                self._finish(prefetch, fetch.reason)
                return
        finally:
            tree.release_root(root)
        if not prefetch.joined:
            fetch.give_way = partial(self._give_way, fetch)
            self.in_flight[id(fetch)] = self._by_page[fetch.first] = fetch
            self._turns.append(fetch)
            fetch.hand_names_to(key)
        prefetch.agreed_nbytes = 0
        self._waiting.setdefault(fetch, []).append(prefetch)
        prefetch.fetch = fetch

    def _fetching(self, page: tuple[int, bytes]) -> Fetch | None:
        """The fetch that brings a page, or inserts it into the tree just now."""
        hanging = (each for each in self._turns if each.phase is Phase.HANGING)
        return self._by_page.get(page) or next(
            (each for each in hanging if each.next == page), None
        )

    def _most_pages(self) -> int:
        """Pages that fit under the cap, going by components that need every one (S2)."""
        sizes = [
            self.context.slabs.nbytes[component.index] * component.slots_per_page
            for component in self.context.tree.prefix_closed
        ]
        return self.settings.prefetch_nbytes // sum(sizes) if sizes else 1 << 31

    def _step(self, fetch: Fetch) -> bool:
        """A step of one fetch; whether there was any."""
        if not fetch.can_step:
            return False
        if fetch.spare and fetch.phase is Phase.LOOKING and self.nbytes_in_flight:
            return False  # requests first, and one after the other, each with all of the budget
        fetch.budget = self._budget()
        fetch.comes_after = bool(self._short) and self._comes_after(fetch)
        fetch.step()
        if fetch.ended:
            self._ended(fetch)
        return True

    # -- room on HOST, in order of arrival

    @property
    def n_short(self) -> int:
        """Prefetches that wait for room."""
        return sum(each.waits for each in self._short)

    def _wait(self, prefetch: Prefetch, fetch: Fetch) -> None:
        """A prefetch found no room: it asks again when some comes, if that can be."""
        prefetch.fetch, prefetch.reason = None, fetch.reason
        before = self._short.get(prefetch)
        until = self._clock() + self.settings.queue_timeout_s if before is None else before.until
        self.counts["waited for room"] += before is None
        assert fetch.short_of is not None
        room = [-1]
        if not fetch.comes_after:
            room = [fetch.room[0], *(fetch.room[1 + each.index] for each in fetch.lacking)]
        self._short[prefetch] = _Short(fetch.short_of, fetch.lacking, room, until)
        prefetch.waits = True

    def _room(self, prefetch: Prefetch, lacking: Sequence[TreeComponent]) -> list[int]:
        """The slots it could have of the pools that were short, and the bytes of HOST."""
        tenant = self.context.tree.tenant_of(prefetch.key.namespace)
        ledgers = [component.hosts[tenant] for component in lacking]
        return [self._budget(), *(ledger.headroom for ledger in ledgers if ledger is not None)]

    def _ask_again(self) -> None:
        """Those first in line of each tenant ask, where room came; who waited too long ends."""
        now, asked = self._clock(), set()
        hope = bool(self.in_flight or self._draining or self._told or self.deliveries)
        hope = hope or self.frees_host()
        for prefetch in sorted(self._short, key=lambda each: each.arrival):
            short = self._short[prefetch]
            tenant = self.context.tree.tenant_of(prefetch.key.namespace)
            first = tenant not in asked
            asked.add(tenant)
            if not prefetch.waits:
                continue
            room = self._room(prefetch, short.lacking)
            came = any(have > had for have, had in zip(room, short.room))
            if now >= short.until or (first and not came and not hope):
                prefetch.short_of = short.of
                self._finish(prefetch, prefetch.reason)
            elif first and came:
                prefetch.waits, prefetch.reason = False, ""
                self._launch(prefetch)
                hope = True

    def _comes_after(self, fetch: Fetch) -> bool:
        """Whether a prefetch of the tenant that came before those of a fetch is short of room."""
        if fetch.phase is not Phase.LOOKING:
            return False
        arrival = self._arrival(fetch)
        tenant_of = self.context.tree.tenant_of
        tenant = tenant_of(fetch.key.namespace)
        return any(
            each.arrival < arrival and tenant_of(each.key.namespace) == tenant
            for each in self._short
        )

    def _arrival(self, fetch: Fetch) -> int:
        """The number of the first prefetch that waits for a fetch."""
        return min(each.arrival for each in self._waiting[fetch])

    def _give_way(self, fetch: Fetch) -> bool:
        """Data that came for a younger prefetch makes room; false if there is none."""
        tenant = self.context.tree.tenant_of(fetch.key.namespace)
        return self.deliveries.give_way(self._arrival(fetch), tenant) is not None

    # -- the end

    def _leave(self, prefetch: Prefetch, reason: str, time: Slice, *, stop: bool = True) -> None:
        """A prefetch stops waiting; its fetch ends unless another one waits for it."""
        fetch = prefetch.fetch
        if fetch is None:
            if prefetch.waits:
                self._finish(prefetch, reason)
            self.deliveries.release(prefetch)
            return
        while not self._compare(prefetch, fetch) and not time.spent:
            pass
        self._note(prefetch, fetch)
        self._finish(prefetch, reason)
        self.deliveries.release(prefetch)
        if fetch not in self._waiting:  # it has ended; this one was to look again
            self._told = deque(each for each in self._told if each.prefetch is not prefetch)
            return
        self._waiting[fetch].remove(prefetch)
        if not self._waiting[fetch] and stop:
            self._stop(fetch, reason)

    def _stop(self, fetch: Fetch, reason: str) -> None:
        fetch.stop(reason)
        self._ended(fetch)

    def _drain(self, fetch: Fetch) -> None:
        if fetch.draining is not None:
            self._draining.append(fetch.draining)
            fetch.draining = None

    def _ended(self, fetch: Fetch) -> None:
        """Tell the prefetches that wait for a fetch, one after the other."""
        self._drain(fetch)
        del self.in_flight[id(fetch)]
        self._turns.remove(fetch)
        if self._by_page.get(fetch.first) is fetch:
            del self._by_page[fetch.first]
        self.counts["shrunk"] += fetch.shrunk
        for prefetch in self._waiting.pop(fetch, ()):
            self._told.append(_Told(prefetch, fetch))
            if fetch.boundary > fetch.anchor:
                self._keep(prefetch, fetch.boundary)

    def _keep(self, prefetch: Prefetch, boundary: int) -> None:
        """Data that came for a request, up to a boundary in pages, stays until it begins."""
        n_pages = prefetch.key.n_tokens // self.context.tree.page_size
        if not prefetch.spare:
            self.deliveries.keep(prefetch, min(boundary, prefetch.limit, n_pages))

    def _tell_next(self) -> bool:
        """Tell one prefetch that its fetch ended; one that only shared it goes on (S7)."""
        prefetch, fetch = told = self._told.popleft()
        if not self._compare(prefetch, fetch):
            self._told.append(told)
            return True
        shared = self._note(prefetch, fetch)
        prefetch.fetch = None
        came = fetch.boundary > fetch.anchor
        # it may have asked for more, or for less, than this one
        more = came or shared < prefetch.limit or prefetch.spare != fetch.spare
        if not came and fetch.gap is not None and shared > fetch.gap:
            more = False  # the same limit stops this one
        if prefetch.joined and more:
            self._launch(prefetch, alone=not came)
        elif fetch.short_of is not None and not prefetch.spare:
            self._wait(prefetch, fetch)
        else:
            prefetch.short_of = fetch.short_of
            self._finish(prefetch, fetch.reason)
        return True

    def _compare(self, prefetch: Prefetch, fetch: Fetch) -> bool:
        """Find out, step by step, how much of its sequence a prefetch shares with a fetch.

        Returns:
            Whether that is known; until then `agreed_nbytes` is a lower bound.
        """
        tree, mine, its = self.context.tree, prefetch.key.data, fetch.key.data
        whole = min(len(mine), fetch.asked * tree.page_bytes)
        start = min(prefetch.agreed_nbytes, whole)
        step = max(COMPARED_NBYTES, tree.page_bytes)
        end = whole if mine is its else min(start + step, whole)
        end -= end % tree.page_bytes
        agreed = end
        if mine is not its:
            with memoryview(its) as view:
                pages = common_prefix_pages(mine, 0, view[:end], tree.page_bytes, start)
            agreed = pages * tree.page_bytes
        prefetch.agreed_nbytes = agreed
        return agreed < end or end + tree.page_bytes > whole

    def _note(self, prefetch: Prefetch, fetch: Fetch) -> int:
        """Note a prefetch's gain: the resumable part of the tokens it shares with a fetch.

        Returns:
            The pages they are known to share, as far as they are of use.
        """
        tree, key, limit = self.context.tree, prefetch.key, prefetch.limit
        agreed = prefetch.agreed_nbytes // tree.page_bytes
        root = tree.hold_root(key.namespace)
        try:
            node: Node | None = fetch.tip
            while node is not None and node.end > agreed:
                node = node.parent
            if node is not None and node.parent is not None:
                key.found_at(node, tree.root(key.namespace))
            anchor = matching.match(tree, key, limit).anchor
        finally:
            tree.release_root(root)
        reached = min(anchor, agreed, fetch.boundary, limit) * tree.page_size
        prefetch.tokens = max(prefetch.tokens, reached)
        planned = min(agreed, fetch.planned, limit) * tree.page_size
        prefetch.planned_tokens = max(prefetch.planned_tokens, planned)
        prefetch.capped = fetch.capped and fetch.gap is None and fetch.asked < limit
        return min(agreed, limit)

    def _finish(self, prefetch: Prefetch, reason: str) -> None:
        prefetch.fetch, prefetch.waits = None, False
        self._short.pop(prefetch, None)
        gained = prefetch.gained_tokens
        prefetch.reason = reason or ("complete" if gained else "nothing of it came")
        self.counts["delivered" if gained else "in vain"] += 1
        if not gained:
            self.in_vain[re.sub(r"\d+", "N", prefetch.reason)] += 1
            self.deliveries.release(prefetch)
        else:
            self._keep(prefetch, prefetch.tokens // self.context.tree.page_size)
        self.counts["tokens"] += gained
        self.counts["capped"] += prefetch.capped


def _until_spent(time: Slice) -> Iterator[None]:
    yield
    while not time.spent:
        yield
