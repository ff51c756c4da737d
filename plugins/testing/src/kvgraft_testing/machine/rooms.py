"""Room and transfers: evictions, copies that end or fail, and the end of everything."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.types import Tier
from kvgraft_testing.machine.bench import Bench
from kvgraft_testing.machine.brute_force import ModelComponent
from kvgraft_testing.machine.engines import Wait
from kvgraft_testing.machine.legality import Pressure, remaining_victims

__all__ = ["Rooms"]


class Rooms:
    """Calls that belong to no request."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cache, self.model, self.judge = bench.cache, bench.model, bench.judge

    def poll(self) -> None:
        """Process transfers that ended."""
        self.bench.trace.call("poll")
        wished = self._wished()
        ended = self.bench.act(
            "poll",
            self.cache.poll,
            pressure=self._moving(),
            acknowledges=True,
        )
        for (tier, name), (had, wanted) in wished.items():
            arenas = self.cache.arenas
            has = arenas.by_tier[tier].by_name[name].leased if arenas is not None else had
            if has < min(had, wanted):
                said = (
                    f"{tier.value}: of {had} extents {has} are left, a request waits for {wanted}"
                )
                self.judge.fail("A8", name, said)
        self.bench.trace.outcome(f"{ended} transfers ended")

    def _wished(self) -> dict[tuple[Tier, str], tuple[int, int]]:
        """Where a request waits for other boundaries: each pool's extents, and those it needs."""
        arenas = self.cache.arenas
        return {
            (tier, name): (pool.leased, -(-arena.wished.get(name, 0) // pool.extent))
            for tier, arena in (arenas.by_tier.items() if arenas is not None else ())
            if arena.wished is not None
            for name, pool in arena.by_name.items()
        }

    def _moving(self) -> Pressure:
        """The pools in which a boundary that moves makes room."""
        arenas = self.cache.arenas
        needs: dict[Tier, dict[str, int | None]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        for tier, arena in arenas.by_tier.items() if arenas is not None else ():
            needs[tier] = dict.fromkeys(arena.by_name)
        return Pressure(needs[Tier.DEVICE], needs[Tier.HOST], unpins=arenas is not None)

    def move_memory(self, giver: int, taker: int, tier: Tier) -> bool:
        """Move an extent between two pools: now, or in later polls (K7); whether it moves."""
        arenas, bench = self.cache.arenas, self.bench
        arena = arenas.by_tier.get(tier) if arenas is not None else None
        if arena is None:
            return False
        names = list(arena.by_name)
        source, target = names[giver % len(names)], names[taker % len(names)]
        bench.trace.call(f"move an extent of {tier.value} from {source} to {target}")
        before = bench.seen.books[source, tier.value]
        free = arena.moving is None and arena.by_name[source].leased > 1 and source != target
        extent = arena.by_name[source].extent
        moves = bench.act(
            f"move {tier.value} memory",
            lambda: self.cache.move_memory(source, target, tier),
            pressure=self._moving(),
        )
        bench.trace.outcome("it moves" if moves else "refused")
        bench.counts["boundaries moved"] += moves
        self.judge.expect(
            moves == (free and before.headroom >= extent),
            "K7",
            source,
            lambda: f"an extent of {extent} slots {'moves' if moves else 'stays'} with {before}",
        )
        self._expect_settled()
        return moves

    def compute(self, *, behind: bool) -> None:
        """From now on the device computes behind the engine, or it has computed everything (B4)."""
        bench = self.bench
        if behind is (bench.behind_since is None):
            bench.trace.call(f"the device {'lags behind' if behind else 'has computed everything'}")
            bench.behind_since = bench.steps if behind else None

    def settle_memory(self) -> None:
        """Extents on their way arrive, and those that a request waits for."""
        arenas = self.cache.arenas
        self.compute(behind=False)
        for _ in range(len(self.bench.seen.books) if arenas is not None else 0):
            if arenas is not None and arenas.n_pending:
                self.drain()
                self.poll()
        self._expect_settled()

    def _expect_settled(self) -> None:
        """Nothing is in flight, so no slot of a DEVICE extent that moves has to wait (K7)."""
        arenas = self.cache.arenas
        arena = arenas.by_tier.get(Tier.DEVICE) if arenas is not None else None
        is_behind = self.bench.behind_since is not None
        if arena is None or is_behind or self.bench.engine.pending:
            return
        if self.cache.journal.n_in_flight:
            return
        giver = arena.moving[0] if arena.moving is not None else None
        self.judge.expect(
            giver is None or self.bench.waited_in_vain,
            "K7",
            None if giver is None else giver.component.name,
            lambda: f"an extent stays on its way: {giver}",
        )

    def step(self, index: int, *, fails: bool) -> None:
        """Run one pending copy, or let it fail."""
        engine = self.bench.engine
        ends = "fails" if fails else "runs"
        self.bench.trace.call(f"copy {index} of {len(engine.pending)} pending {ends}")
        self.bench.counts["copies failed" if fails else "copies"] += 1
        if fails:
            engine.fail(index)
        else:
            engine.step(index)

    def step_all(self) -> None:
        """Run everything pending, and poll."""
        self.bench.trace.call(f"all {len(self.bench.engine.pending)} pending copies run")
        self.bench.engine.run_all()
        self.poll()

    def expect_waits(self, outcomes: Sequence[Wait]) -> None:
        """Set the outcomes of the next copies that are waited for, one after the other."""
        said = ", ".join(outcome.value for outcome in outcomes) or "all run"
        self.bench.trace.call(f"of the next copies that are waited for: {said}")
        self.bench.engine.outcomes = list(outcomes)

    def drain(self) -> None:
        """Let everything in flight end."""
        engine = self.bench.engine
        if not engine.pending and not self.cache.journal.n_in_flight:
            return
        self.bench.trace.call("drain")
        if Wait.TIMES_OUT in engine.outcomes:
            ended = self.bench.act("drain", self.cache.drain, acknowledges=True)
            self.judge.expect(
                ended == (not self.cache.journal.n_in_flight) or self.bench.setup.stored,
                "B3",
                None,
                lambda: f"drain said {ended}, {self.cache.journal.n_in_flight} are in flight",
            )
            engine.outcomes.clear()
        ended = self.bench.act("drain", self.cache.drain, acknowledges=True)
        ended = ended or (self.bench.setup.stored and not self.cache.journal.n_in_flight)
        self.judge.expect(ended, "B3", None, lambda: "drain left transfers in flight")
        self.judge.expect(
            not engine.pending, "B3", None, lambda: "a transfer was acknowledged before it ran"
        )

    def evict(self, component: ModelComponent, n_slots: int, tier: Tier) -> None:
        """Ask for room; it is made, or there is no victim left (E2, E6)."""
        bench, name = self.bench, component.name
        bench.trace.call(f"evict {n_slots} slots of {name} on {tier.value}")
        books = bench.seen.books.get((name, tier.value))
        if books is None:
            freed = self.cache.evict(name, n_slots, tier)
            self.judge.expect(
                not freed, "E6", name, lambda: f"{freed} slots freed of a tier it does not have"
            )
            return
        wanted = books.free + n_slots
        pressure = (
            Pressure(device={name: wanted})
            if tier is Tier.DEVICE
            else Pressure(host={name: wanted})
        )
        freed = bench.act(
            f"evict {tier.value}",
            lambda: self.cache.evict(name, n_slots, tier),
            pressure=pressure,
        )
        bench.trace.outcome(f"{freed} freed")
        now = bench.seen.books[name, tier.value]
        self.judge.expect(
            freed == now.free - books.free,
            "E6",
            name,
            lambda: f"said {freed} slots were freed on {tier.value}, {now.free - books.free} were",
        )
        if freed < n_slots:
            rule = "E4" if bench.waited_in_vain else "E6"
            left = remaining_victims(self.model, bench.seen, component, tier.value)
            short = f"{freed} of {n_slots} slots freed on {tier.value}"
            self.judge.expect(
                not left, rule, name, lambda: f"{short}, {left} could still be evicted"
            )
            # On HOST a load-back pins only its source; the pages above it stay as well.
            self.judge.expect(
                now.evictable == 0 or (tier is Tier.HOST and component.is_prefix_closed),
                "E6",
                name,
                lambda: f"{short}, {now.evictable} still evictable",
            )

    def squeeze(self) -> None:
        """Everything unpinned leaves DEVICE: the next hits are on HOST."""
        for component in self.model.components:
            books = self.bench.seen.books[component.name, "device"]
            self.evict(component, books.capacity, Tier.DEVICE)

    def clear_host(self) -> None:
        """Everything unpinned leaves HOST."""
        for component in self.model.components:
            books = self.bench.seen.books.get((component.name, "host"))
            if books is not None:
                self.evict(component, books.capacity, Tier.HOST)

    def empty(self) -> None:
        """Nothing is left once every request has ended and all is evicted (T3, T8, L1, H8)."""
        bench = self.bench
        for _ in range(2):
            if bench.prefetches is not None:
                bench.prefetches.settle()
            for tier in (Tier.DEVICE, Tier.HOST):
                for component in self.model.components:
                    books = bench.seen.books.get((component.name, tier.value))
                    if books is not None:
                        self.evict(component, books.capacity, tier)
            self.drain()
        for (name, tier_name), books in bench.seen.books.items():
            if books.free != books.capacity:
                self.judge.fail("T8", name, f"{tier_name} leaks: {books}")
            if books.promised:
                self.judge.fail("A12", name, f"{tier_name} still promises {books.promised} slots")
        for ledgers in self.cache.private:
            for ledger in ledgers:
                if ledger.free != ledger.capacity:
                    self.judge.fail("H8", ledger.component, f"private pool: {ledger.equation()}")
        if bench.seen.nodes:
            self.judge.fail("T3", None, f"{bench.seen.nodes} outlive their data")
        for name, held in bench.hooks.held.items():
            if any(held.values()):
                odd = {segment: count for segment, count in held.items() if count}
                self.judge.fail("L1", name, f"acquired minus released: {odd}")
        for name, copying in bench.hooks.copying.items():
            if copying:
                said = f"transfers of {copying} slots were built and neither committed nor aborted"
                self.judge.fail("R2", name, said)
