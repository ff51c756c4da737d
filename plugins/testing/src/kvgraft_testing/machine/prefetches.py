"""Prefetches from a store: what is published is whole, resumable and kept (S1 to S10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from kvgraft.requests.request import Request
from kvgraft.tree.keys import TokenKey
from kvgraft_storage.tier import Prefetch, StorageTier
from kvgraft_testing.machine.bench import Bench
from kvgraft_testing.machine.brute_force import Gone, Prefix
from kvgraft_testing.machine.legality import Pressure
from kvgraft_testing.machine.observing import Snapshot
from kvgraft_testing.machine.stores import Answer, PromptedStore
from kvgraft_testing.machine.trace import shown

__all__ = ["Fetched", "Prefetches"]

LETS_GO = frozenset({"admit", "allocate", "poll", "drain", "prefetch", "clear"})
"""Calls in which data that is kept for a request may be unpinned for others, or expire."""

STEPS_OF_TIER = frozenset({"poll", "drain", "prefetch", "cancel prefetch"})
"""Calls in which the tier goes on."""

MOST_FETCHED = 3
"""Requests that wait in a queue."""

IDLE_POLLS = 6
"""Polls after which a prefetch has called the store again, or has no call to make."""

MOST_POLLS = 400
"""Polls after which everything has ended, where the store answers at once."""


@dataclass
class Fetched:
    """A prefetch as the model follows it.

    Attributes:
        prefetch: the cache's own.
        name: in traces.
        sequence: namespace and tokens.
        kept: whether its data is kept on HOST for its request.
        pages: per component, its kept pages.
    """

    prefetch: Prefetch
    name: str
    sequence: Prefix
    kept: bool = False
    pages: dict[str, set[Prefix]] = field(default_factory=dict)


class Prefetches:
    """The store of one cache, and the prefetches from it; there may be none.

    Args:
        bench: the cache and its checks.
        poll: takes in transfers that ended.

    Attributes:
        fetched: prefetches whose requests have not begun.
    """

    def __init__(self, bench: Bench, poll: Callable[[], None]) -> None:
        self.bench = bench
        self.cache, self.model, self.judge = bench.cache, bench.model, bench.judge
        self.fetched: list[Fetched] = []
        self.poll = poll
        tier = bench.cache.storage
        self.tier = tier if isinstance(tier, StorageTier) else None
        client = self.tier.client if self.tier is not None else None
        self.store = client if isinstance(client, PromptedStore) else None
        self._begun = self._dropped = 0
        hooks = [each.finalize_match_result for each in bench.cache.mounted]
        self._shortens = sum(hook is not None for hook in hooks) > len(bench.states)

    @property
    def pending(self) -> int:
        """Calls of the store that have not returned."""
        return 0 if self.store is None else len(self.store.pending)

    @property
    def may_start(self) -> bool:
        """Whether another may be started."""
        return self.tier is not None and len(self.fetched) < MOST_FETCHED

    def start(self, sequence: Prefix) -> Fetched:
        """Fetch a queued request's data."""
        assert self.tier is not None
        tier, (namespace, tokens) = self.tier, sequence
        self._begun += 1
        name = f"f{self._begun}"
        self.bench.trace.call(f"prefetch {name}: {shown(tokens)} in namespace {namespace!r}")
        made: list[Fetched] = []

        def start() -> None:
            prefetch = tier.prefetch(TokenKey(tokens, namespace))
            made.append(Fetched(prefetch, name, sequence))
            self.fetched += made

        self.bench.act("prefetch", start)
        self.bench.trace.outcome(str(made[0].prefetch))
        return made[0]

    def cancel(self, fetched: Fetched) -> None:
        """Its request was given up."""
        assert self.tier is not None
        tier = self.tier
        self.bench.trace.call(f"cancel {fetched.name}")
        self.fetched.remove(fetched)
        self.bench.act("cancel prefetch", lambda: tier.cancel(fetched.prefetch))

    def taken(self, fetched: Fetched, request: Request) -> None:
        """Its request has begun."""
        prefetch = fetched.prefetch
        start = max(prefetch.anchor_tokens, request.device_tokens)
        gained = max(0, min(request.anchor_tokens, prefetch.tokens) - start)
        self.judge.expect(
            request.storage_tokens == gained,
            "S5",
            None,
            lambda: f"{request.storage_tokens} tokens of {fetched.name} count, not {gained}",
        )

    def answer(self, index: int, answer: Answer) -> None:
        """A call of the store ends."""
        assert self.store is not None
        call = self.store.pending[index]
        self.bench.trace.call(f"the store's {call} {answer.value}")
        self.bench.counts["calls of the store"] += 1
        self.store.end(index, answer)

    def answer_until(self, verb: str) -> None:
        """The store answers up to a call of that kind, or all calls."""
        assert self.store is not None
        idle = 0
        while idle < IDLE_POLLS and all(call.job.verb != verb for call in self.store.pending):
            if self.pending:
                self.answer(0, Answer.RUNS)
            idle = 0 if self.pending else idle + 1
            self.poll()

    def cleared(self, gone: dict[object, Gone]) -> list[Fetched]:
        """Prefetches of namespaces that are being cleared."""
        cleared = [each for each in self.fetched if each.sequence[0] in gone]
        for each in cleared:
            self.fetched.remove(each)
        return cleared

    def check_ended(self, cleared: list[Fetched]) -> None:
        """Those of cleared namespaces have ended, and no more data is fetched for them."""
        under_way = self.tier.prefetching.in_flight.values() if self.tier is not None else ()
        going = {fetch.key.namespace for fetch in under_way}
        for namespace in going & {each.sequence[0] for each in cleared}:
            said = f"data of namespace {namespace!r} is fetched, which was cleared"
            self.judge.fail("S5", None, said)
        for each in cleared:
            if not each.prefetch.ended or self._is_kept(each):
                said = f"{each.name} goes on, its namespace was cleared: {each.prefetch}"
                self.judge.fail("S5", None, said)

    def end_all(self) -> None:
        """All prefetches are given up, and the store answers all calls (S2, S6)."""
        if self.tier is None:
            return
        for each in list(self.fetched):
            self.cancel(each)
        self.settle()
        held = self.tier.prefetching.nbytes_in_flight
        self.judge.expect(
            not held, "S2", None, lambda: f"prefetches hold {held} bytes, none is under way"
        )

    def settle(self) -> None:
        """The store answers at once, until nothing is under way (S6, S10)."""
        if self.tier is None or self.store is None:
            return
        self.bench.trace.call("the store answers everything")
        while self.store.pending:
            self.store.end(0, Answer.RUNS)
        self.store.at_once = True
        tier = self.tier
        tier.storing.hurry()
        for _ in range(MOST_POLLS):
            self.poll()
            if not tier.n_in_flight:
                break
        self.store.at_once = False
        self.judge.expect(
            not tier.n_in_flight,
            "S10",
            None,
            lambda: (
                f"{tier.n_in_flight} are under way, the store has answered all: {tier.counts()}"
            ),
        )

    def stored(self, sequence: Prefix) -> int:
        """The boundary to resume from without DEVICE, in pages, if the store has all its data."""
        assert self.tier is not None
        self._dropped = self._n_dropped()
        seen = self.bench.seen
        on_host = {name: replace(held, device={}) for name, held in seen.held.items()}
        limit = (len(sequence[1]) - 1) // self.model.page_size
        found = self.bench.predictor.found(replace(seen, held=on_host), sequence, limit)
        return found.deepest

    def _n_dropped(self) -> int:
        assert self.tier is not None
        counts = self.tier.storing.counts
        return sum(n for name, n in counts.items() if name.startswith("dropped"))

    def check_complete(self, fetched: Fetched, boundary: int) -> None:
        """All stored data comes back, if HOST has room for it (S3)."""
        assert self.tier is not None
        seen, prefetch, size = self.bench.seen, fetched.prefetch, self.model.page_size
        short = [
            each.name
            for each in self.model.components
            if len(list(self.model.prefixes(each, fetched.sequence, boundary)))
            * each.slots_per_page
            > seen.headroom(each.name, "host", fetched.sequence[0])
        ]
        if short or self._n_dropped() > self._dropped or self._shortens:
            return
        self.bench.counts["prefetches compared"] += 1
        self.judge.expect(
            prefetch.tokens >= boundary * size,
            "S3",
            None,
            lambda: f"{fetched.name} brought {prefetch}; up to {boundary * size} was stored",
        )

    def went_on(self, name: str, given: Pressure, before: Snapshot) -> Pressure:
        """After a call in which the tier may have worked: the room that it may have made.

        It makes room on HOST in an order of its own, and arrived data may count as used.
        """
        if self.tier is None or name not in STEPS_OF_TIER:
            return given
        recency = self.bench.recency
        recency.clock += 1
        for each in self.fetched:
            for component in self.model.components:
                recency.touched(component.name, self._pages_of(each))
        host = dict.fromkeys(self.bench.mirrored)
        return replace(given, host=host, passing=given.passing | before.known())

    def _pages_of(self, fetched: Fetched) -> list[Prefix]:
        n_pages = len(fetched.sequence[1]) // self.model.page_size
        return [self.model.prefix(*fetched.sequence, page) for page in range(n_pages)]

    def check(self, name: str, before: Snapshot, after: Snapshot) -> None:
        """Fetched data is whole, and stays until its request begins."""
        if self.store is None:
            return
        found, self.store.found = self.store.found, []
        for violation in found:
            self.judge.refuse(violation, name)
        self._check_arrivals(before, after)
        if name in STEPS_OF_TIER:
            self._check_stored(self.store)
        self._check_lent(self.store, after)
        for each in self.fetched:
            kept = self._is_kept(each)
            if kept and each.prefetch.ended and not each.pages:
                self._delivered(each, after)
            if each.kept and not kept and name not in LETS_GO:
                self.judge.fail("S4", None, f"{name}: {each.name} is not kept any longer")
            each.kept = kept
            for component, pages in each.pages.items() if kept else ():
                held = after.held[component]
                lost = pages - (held.host.keys() & held.host_pinned)
                if lost:
                    said = f"does not hold {lost} on host, which came for {each.name}"
                    self.judge.fail("S4", component, said)

    def _check_arrivals(self, before: Snapshot, after: Snapshot) -> None:
        """Only copies and prefetches bring data to HOST."""
        wanted = {page for each in self.fetched for page in self._pages_of(each)}
        for component in self.model.components:
            was, held = before.held[component.name], after.held[component.name]
            odd = held.host.keys() - was.host.keys() - was.backing_up - wanted
            odd -= was.device.keys() | held.device.keys()
            if odd:
                said = f"gained {odd} on host, which no prefetch asked for"
                self.judge.fail("S5", component.name, said)

    def _check_stored(self, store: PromptedStore) -> None:
        """Data that counts as stored is in the store, which loses nothing (S7)."""
        assert self.tier is not None
        naming, tree = self.tier.context.naming, self.cache.tree
        for namespace, root in tree.roots.items():
            for node in tree.nodes([root]):
                names = node.names
                if (
                    names is None
                    or not names.stored
                    or names.store != self.tier.client.store_number
                ):
                    continue
                for component in tree.components:
                    if names.stored >> component.index & 1:
                        first = node.end - 1 if component.is_state else node.start
                        pages = [(component, np.arange(first, node.end))]
                        digest = naming.namespace(namespace)
                        asked = naming.asked(names.hashes, node.start, pages, digest)
                        lacking = store.lacking([each.key for each in asked[:]])
                        if lacking:
                            said = f"{lacking} payloads of {node!r} count as stored and are not"
                            self.judge.fail("S7", component.name, said)

    def _check_lent(self, store: PromptedStore, after: Snapshot) -> None:
        """Slots that the store may still write to belong to nobody else."""
        lent = set(store.lent())
        for each in self.cache.mounted if lent else ():
            mirror = each.component.host
            assert mirror is not None
            first, nbytes = mirror.slab.data_ptr(), mirror.slab_nbytes
            slots = {(at - first) // nbytes for at in lent if 0 <= at - first < mirror.slab.nbytes}
            used = {slot for page in after.held[each.name].host.values() for slot in page}
            wrong = slots & (used | set(mirror.allocator.free_slots()))
            if wrong:
                said = f"host slots {wrong} are free or in use while the store may write to them"
                self.judge.fail("S5", each.name, said)

    def _is_kept(self, fetched: Fetched) -> bool:
        assert self.tier is not None
        return fetched.prefetch in self.tier.prefetching.deliveries

    def _delivered(self, fetched: Fetched, after: Snapshot) -> None:
        """Data came up to a boundary: every component can resume from there (S4)."""
        boundary = fetched.prefetch.tokens // self.model.page_size
        self.bench.counts["prefetches delivered"] += 1
        tokens = fetched.sequence[1]
        limit = (len(tokens) - 1) // self.model.page_size
        found = self.bench.predictor.found(after, fetched.sequence, limit)
        if found.deepest < boundary:
            said = f"{fetched.name} brought all up to page {boundary}, to resume from is up to "
            self.judge.fail("S4", None, f"{said}{found.deepest}")
        fetched.pages = {
            component.name: {
                page
                for page in self.model.prefixes(component, fetched.sequence, boundary)
                if page in after.held[component.name].host
            }
            for component in self.model.components
        }
