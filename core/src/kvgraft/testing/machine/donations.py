"""What a request leaves to the tree: at a checkpoint, and when it finishes (I1 to I7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvgraft.config import WritePolicy
from kvgraft.testing.machine.bench import Bench
from kvgraft.testing.machine.hooks import locks
from kvgraft.testing.machine.legality import Pressure
from kvgraft.testing.machine.live import Live
from kvgraft.testing.machine.predicting import Adopted, adopted

__all__ = ["Donations"]

T = TypeVar("T")


class Donations:
    """Checkpoints and finishes."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cache, self.model, self.judge = bench.cache, bench.model, bench.judge

    def _offer(self, live: Live, boundary: int, states: set[int]) -> Adopted:
        """Private data up to a boundary, by page."""
        size = self.model.page_size
        offered: Adopted = {}
        for component in self.bench.paged:
            table = self.cache.table(live.request, component.name).tolist()
            per_page = component.slots_per_page
            offered[component.name] = {}
            for page in range(live.anchor, boundary):
                slots = tuple(table[page * per_page : (page + 1) * per_page])
                if slots and min(slots) >= 0:
                    prefix = self.model.prefix(live.namespace, live.tuple, page)
                    offered[component.name][prefix] = slots
        for component in self.bench.states:
            offered[component.name] = {
                (live.namespace, live.tuple[: page * size]): None
                for page in states
                if live.anchor < page <= boundary
            }
        return offered

    def _share(
        self, live: Live, boundary: int, states: set[int], name: str, operation: Callable[[], T]
    ) -> T:
        """Run an operation that inserts up to a boundary."""
        bench = self.bench
        before = bench.seen
        offered = self._offer(live, boundary, states)
        inserted = adopted(self.model, before, offered)
        known = before.known()
        path = {
            self.model.prefix(live.namespace, live.tuple, page) for page in range(max(boundary, 0))
        }
        computed = {page for page in path if self.model.page_of(page) >= live.anchor}
        deeper = boundary > live.anchor

        def uses(result: T) -> None:
            if result is not False and deeper:
                seen, recency = bench.seen, bench.recency
                recency.created(path - known)
                recency.recomputed(computed & known)
                for part, held in seen.held.items():
                    recency.adopted(part, held.device.keys() - before.held[part].device.keys())
                position = live.computed // self.model.page_size
                since = live.anchor if name == "finish" else 0
                locked = locks(bench.calls, boundary)
                recency.resumed(live.sequence, boundary, seen, position, since, locked)

        write_through = bench.sizes.policy is WritePolicy.WRITE_THROUGH
        pressure = Pressure(
            device={} if name == "finish" else {each.name: 1 for each in bench.states},
            host=dict.fromkeys(bench.mirrored) if write_through else {},
            passing=path,
        )
        return bench.act(name, operation, pressure=pressure, inserted=inserted, uses=uses)

    def checkpoint(self, live: Live) -> None:
        """Share what is computed so far; declined only for a reason (I5, I6, A12)."""
        boundary = live.computed // self.model.page_size
        if self.bench.states:
            boundary = min(boundary, max(live.captured, default=0))
        declined = self.cache.declined_checkpoints
        moved = self._share(
            live,
            boundary,
            set(live.captured),
            "checkpoint",
            lambda: self._checkpoint(live, boundary),
        )
        self.bench.trace.outcome("shared" if moved else "declined")
        if boundary <= live.anchor and not moved:
            return
        # A state that was due and is not there found no slot, although it was budgeted.
        self.judge.expect(
            moved or self.cache.declined_checkpoints == declined + 1,
            "A10" if self.bench.states else "I6",
            self.bench.states[0].name if self.bench.states else None,
            lambda: f"a checkpoint of {live.name} at page {boundary} was declined for nothing",
        )

    def _checkpoint(self, live: Live, boundary: int) -> bool:
        moved = self.cache.checkpoint(live.request, self.bench.fence)
        if moved:
            live.anchor = boundary
            live.captured = {page for page in live.captured if page > boundary}
            live.locked = {}
        return moved

    def finish(self, live: Live) -> None:
        """End a request; what can be cached is (I6, I7)."""
        size = self.model.page_size
        boundary, rest = divmod(live.computed, size)
        states = set(live.captured)
        if self.bench.states:
            if not rest and live.started and boundary:
                states.add(boundary)
            elif live.tracked:
                states.add(live.tracked)
            boundary = min(boundary, max(states, default=0))
        self.bench.live.remove(live)
        cached = self._share(
            live,
            boundary,
            states,
            "finish",
            lambda: self.cache.finish(live.request, self.bench.fence),
        )
        self.bench.trace.outcome(f"{cached} tokens cached")
        expected = max(boundary, live.anchor) * size
        self.judge.expect(
            cached == expected,
            "I6",
            None,
            lambda: f"finishing {live.name} cached {cached} tokens, the model says {expected}",
        )
