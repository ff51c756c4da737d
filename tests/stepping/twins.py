"""Two caches that are asked the same: one in steps of all requests, the other request by request.

Whatever can be seen of them is compared after every call, but for the numbers of slots: those are
another's in the other cache, the same one for the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft import Cache, Request, TokenKey
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.components import RequestComponent, RequestState
from kvgraft_testing.machine.brute_force import BruteForce
from kvgraft_testing.machine.deriving import model_components
from kvgraft_testing.machine.observing import observe

__all__ = ["Pair", "Twins"]


class Pair(NamedTuple):
    """A request, in both caches."""

    stepped: Request
    looped: Request


class Twins:
    """The two caches and their running requests.

    Attributes:
        running: admitted requests whose prompts are computed.
        n_refused: requests that a step refused so far.
    """

    def __init__(self, components: dict[str, dict[str, Any]], **settings: Any) -> None:
        self.stepped = Cache.open(components, **settings)
        self.looped = Cache.open(components, **settings)
        self.caches = (self.stepped, self.looped)
        self.model = BruteForce(self.stepped.tree.page_size, model_components(self.stepped.mounted))
        self.streams = [cache.events() for cache in self.caches]
        self.running: list[Pair] = []
        self.given: dict[int, int] = {}
        self.n_refused = 0
        self.slots: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)

    # -- calls

    def begin(
        self,
        tokens: Sequence[int],
        reserve: int,
        chunk: int | None = None,
        namespace: str | None = None,
    ) -> None:
        """A request, up to the end of its prompt; one that does not fit goes again."""
        found = [
            cache.begin(TokenKey(tokens, namespace=namespace), reserve=reserve, chunk=chunk)
            for cache in self.caches
        ]
        outcomes = [cache.admit(request) for cache, request in zip(self.caches, found)]
        assert outcomes[0].outcome is outcomes[1].outcome
        pair = Pair(*found)
        if not outcomes[0].admitted:
            self.abort(pair)
            return
        self._prefill(pair)

    def _prefill(self, pair: Pair) -> None:
        for cache, request in zip(self.caches, pair):
            cache.load_back(request)
            while not request.ready:
                cache.poll()
            while request.computed < request.prompt:
                n_tokens = cache.next_chunk(request)
                assert cache.allocate(request, n_tokens)
                self._run(cache, request, n_tokens)
                cache.computed(request, n_tokens)
                cache.checkpoint(request)
        self.running.append(pair)
        self.given[id(pair.looped)] = 0

    def step(
        self,
        pairs: Sequence[Pair],
        tokens: npt.NDArray[np.int64] | None,
        n_tokens: int,
        *,
        rejects: bool,
    ) -> None:
        """One pass of some of them; of several tokens, the last one may be rejected."""
        given = [self.given[id(pair.looped)] for pair in pairs]
        noted = [n - 1 if rejects and n > 1 else n for n in given]
        if tokens is not None:  # they go right behind the computed ones
            for pair, n in zip(pairs, noted):
                self._name(pair, n)
        step = self.stepped.step(
            [pair.stepped for pair in pairs],
            tokens,
            n_tokens=n_tokens,
            n_computed=np.array(noted, np.int64) if rejects else None,
        )
        for pair, n in zip(pairs, noted):
            if n:
                self.looped.computed(pair.looped, n)
        refused: list[Request] = []
        for at, pair in enumerate(pairs):
            fits = not n_tokens or self.looped.allocate(pair.looped, n_tokens)
            self.given[id(pair.looped)] = n_tokens if fits else 0
            if not fits:
                refused.append(pair.stepped)
            elif tokens is not None:
                pair.looped.key.extend(np.atleast_1d(tokens[at]))
        assert step.refused == refused
        self.n_refused += len(refused)
        on = [pair for pair in pairs if pair.stepped not in refused]
        assert step.requests == [pair.stepped for pair in on]
        self._check_step(step, [pair.stepped for pair in on], n_tokens)
        for pair in on:
            self._run(self.stepped, pair.stepped, n_tokens)
            self._run(self.looped, pair.looped, n_tokens)

    def _run(self, cache: Cache, request: Request, n_tokens: int) -> None:
        """The model writes its states: of each, how far it is."""
        if not cache.config.payload:
            return
        for each in cache.mounted:
            if cache.tree.component(each.name).is_state and n_tokens:
                slot = cache.state_slot(request, each.name)
                for lanes in each.component.device.lanes:
                    lanes[slot] = (request.computed + n_tokens) % 100

    def _check_step(self, step: Any, requests: list[Request], n_tokens: int) -> None:
        """The result is what `table` and `state_slot` say of each request."""
        cache, size = self.stepped, self.stepped.tree.page_size
        assert step.rows.tolist() == [request.row for request in requests]
        assert step.seq_lens.tolist() == [request.computed + n_tokens for request in requests]
        for component in cache.tree.components:
            name = component.name
            if component.is_state:
                numbers = [cache.state_slot(request, name) for request in requests]
                assert step.state_slots[name].tolist() == numbers
                continue
            tables = cache.table_rows(name)
            wanted: list[int] = []
            for request in requests:
                table = cache.table(request, name)
                assert tables[request.row, : len(table)].tolist() == table.tolist()
                for position in range(request.computed, request.computed + n_tokens):
                    slot = table[position // size]
                    wanted.append(-1 if slot < 0 else slot * size + position % size)
            assert step.slot_mapping[name].tolist() == wanted

    def each(self, call: str, pair: Pair) -> None:
        """A call for one request, in both."""
        found = [getattr(cache, call)(request) for cache, request in zip(self.caches, pair)]
        assert found[0] == found[1]

    def note(self, pair: Pair) -> None:
        """Note the tokens of its last pass, for it alone."""
        n_tokens = self.given[id(pair.looped)]
        for cache, request in zip(self.caches, pair):
            cache.computed(request, n_tokens)
        self.given[id(pair.looped)] = 0

    def checkpoint(self, pair: Pair) -> None:
        """It shares what it has, under the tokens of all of it."""
        self._name(pair)
        self.each("checkpoint", pair)

    def restart(self, pair: Pair) -> None:
        """It is matched again, and runs on if it is admitted."""
        self._name(pair)
        self.each("restart", pair)
        self.running.remove(pair)
        outcomes = [cache.admit(request) for cache, request in zip(self.caches, pair)]
        assert outcomes[0].outcome is outcomes[1].outcome
        if not outcomes[0].admitted:
            self.abort(pair)
            return
        self._prefill(pair)

    def _name(self, pair: Pair, n_more: int = 0) -> None:
        """The keys get tokens that they lack, so many behind the computed ones included."""
        for request in pair:
            request.key.extend([7] * max(0, request.computed + n_more - request.key.n_tokens))

    def end(self, pair: Pair, call: str) -> None:
        """It finishes, or is retracted: with the tokens of its last pass."""
        self.note(pair)
        self._name(pair)
        self.each(call, pair)
        self.running.remove(pair)

    def abort(self, pair: Pair) -> None:
        """It is dropped."""
        self.each("abort", pair)
        if pair in self.running:
            self.running.remove(pair)

    # -- looks

    def compare(self) -> None:
        """Everything that can be seen is the same."""
        self.slots.clear()
        seen = [observe(cache, self.model) for cache in self.caches]
        assert seen[0].books == seen[1].books
        assert [(node.pages, node.parent, node.hits) for node in seen[0].nodes] == [
            (node.pages, node.parent, node.hits) for node in seen[1].nodes
        ]
        for name, held in seen[0].held.items():
            other = seen[1].held[name]
            assert held.device_pinned == other.device_pinned
            assert held.host_pinned == other.host_pinned
            for tier in ("device", "host"):
                mine, theirs = getattr(held, tier), getattr(other, tier)
                assert mine.keys() == theirs.keys()
                for page, slots in mine.items():
                    self._same_slots(name, tier, slots, theirs[page])
        for pair in self.running:
            self._compare_requests(pair)
        assert self.stepped.stats() == self.looped.stats()
        told = [re.sub("0x[0-9a-f]+", "", repr(stream.take())) for stream in self.streams]
        assert told[0] == told[1]
        assert self.stepped.tree.clock == self.looped.tree.clock
        for cache in self.caches:
            cache.check_integrity()

    def _compare_requests(self, pair: Pair) -> None:
        assert _told(pair.stepped) == _told(pair.looped)
        for component in self.stepped.tree.components:
            parts = [request.components[component.index] for request in pair]
            assert _told_of_part(parts[0]) == _told_of_part(parts[1])
            slots = [list(_slots_of(part)) for part in parts]
            for mine, theirs in zip(*slots):
                self._same_slots(component.name, "device", mine, theirs)
            if not component.is_state:
                tables = [cache.table(r, component.name) for cache, r in zip(self.caches, pair)]
                mine, theirs = (table.tolist() for table in tables)
                self._same_slots(component.name, "device", mine, theirs)
            elif self.stepped.config.payload:
                self._compare_states(component.name, slots)

    def _compare_states(self, name: str, slots: list[list[Sequence[int]]]) -> None:
        values = []
        for cache, its in zip(self.caches, slots):
            (mounted,) = [each for each in cache.mounted if each.name == name]
            numbers = [number for each in its for number in each]
            values.append([lanes[numbers].tolist() for lanes in mounted.component.device.lanes])
        assert values[0] == values[1]

    def _same_slots(self, name: str, tier: str, mine: Sequence[int], theirs: Sequence[int]) -> None:
        """One slot stands for one of the other cache's; -1 for itself."""
        known = self.slots[name, tier]
        assert len(mine) == len(theirs)
        for one, other in zip(list(mine), list(theirs)):
            assert (one < 0) == (other < 0)
            assert known.setdefault(int(one), int(other)) == int(other)
        assert len(set(known.values())) == len(known)

    def close(self) -> None:
        """All end; nothing is left that is not in the tree."""
        for pair in [*self.running]:
            self.end(pair, "finish")
        self.compare()
        for cache in self.caches:
            cache.close()


def _told(request: Request) -> dict[str, Any]:
    """Public state of a request."""
    names = (
        *("computed", "allocated", "points", "checkpoints", "left", "last_point", "last_left"),
        *("cached", "published", "skipped", "stage", "load_started", "anchor_tokens"),
    )
    found = {name: getattr(request, name) for name in names}
    receipt = request.receipt
    found["receipt"] = (receipt.anchor.end, receipt.host_from, tuple(receipt.segments))
    found["key"] = bytes(request.key.data)
    return found


def _told_of_part(part: RequestComponent) -> dict[str, Any]:
    """Public state of a part, slots aside."""
    found: dict[str, Any] = {}
    for account in (part.account, part.host_account):
        if account is not None:
            names = ("peak", "remaining", "held", "promised", "load")
            found[account.ledger.name] = [getattr(account, name) for name in names]
    found["runs"] = [(run.first, run.end, run.host is None, run.is_left) for run in part.runs]
    if isinstance(part, RequestState):
        found["captured"] = list(part.captured)
        found["has"] = (part.live is None, part.tracked is None)
        found["stands"] = (part.shared, part.tracked_page, part.due, part.due_as)
    return found


def _slots_of(part: RequestComponent) -> Iterator[Sequence[int]]:
    for run in part.runs:
        yield memoryview(run.device).cast("i").tolist()
    if isinstance(part, RequestState):
        for slot in part.owned():
            assert len(slot) == SLOT_BYTES
            yield [int.from_bytes(slot, "little")]
