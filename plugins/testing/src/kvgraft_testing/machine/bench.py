"""One cache beside its model: a call, and everything that must hold after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from kvgraft.config import WritePolicy
from kvgraft.errors import ContractViolation, KvgraftError
from kvgraft.pools import DevicePool
from kvgraft.transfers.journal import Transfer
from kvgraft.tree.component import TreeComponent
from kvgraft.types import Direction, Tier
from kvgraft_scheduling.slot_copies import SlotCopies
from kvgraft_testing.machine.brute_force import BruteForce, Gone, Prefix
from kvgraft_testing.machine.checks import (
    Gains,
    check_accounts,
    check_closure,
    check_flights,
    check_hits,
    check_payloads,
    check_promises,
)
from kvgraft_testing.machine.defined import check_levels, check_rights
from kvgraft_testing.machine.deriving import model_components
from kvgraft_testing.machine.engines import Point, Submission
from kvgraft_testing.machine.hooks import HookCall, Hooks
from kvgraft_testing.machine.judging import HOOK_RULES, Judge, Stopped
from kvgraft_testing.machine.legality import Pressure, check_losses
from kvgraft_testing.machine.live import Live, Using
from kvgraft_testing.machine.observing import Snapshot, observe
from kvgraft_testing.machine.payloads import Payloads
from kvgraft_testing.machine.predicting import Adopted, Predictor
from kvgraft_testing.machine.publishing import Publishing
from kvgraft_testing.machine.recency import Recency, Retention
from kvgraft_testing.machine.reserving import SHARE as RESERVE_SHARE
from kvgraft_testing.machine.reserving import Reserving
from kvgraft_testing.machine.resuming import DRAFTED_TOKENS, SHARE, Resuming
from kvgraft_testing.machine.setups import Setup, engine_for, open_cache
from kvgraft_testing.machine.sizes import Sizes
from kvgraft_testing.machine.streams import PromptedStreamEngine
from kvgraft_testing.machine.tenancy import check_reserved
from kvgraft_testing.machine.trace import Trace
from kvgraft_testing.machine.watching import Watching

if TYPE_CHECKING:
    from kvgraft_testing.machine.pins import Pinning
    from kvgraft_testing.machine.prefetches import Prefetches

__all__ = ["Bench"]

T = TypeVar("T")

SWEEPS = frozenset({"clear", "poll", "drain"})
"""Operations after which unpinned cleared data is gone; with small steps only the last."""

MOVES = frozenset({"poll", "move device memory", "move host memory"})
"""Operations in which slots may move where pools share a budget (K7); others never do."""

READS_CLOCK = frozenset({"begin", "finish", "poll"})
"""Operations in which the cache reads its clock, for times to live."""

PREFETCHES = frozenset({"prefetch", "cancel prefetch"})
"""Operations in which data may come to HOST from a store."""

GOES_ON = frozenset({"allocate", "computed"})
"""Operations of a running request that leave data behind (I9)."""


class Bench:
    """A cache, its model, and the checks around every call.

    Args:
        setup: the component set.
        sizes: page size, policy and pools.
        judge: raises broken rules.

    Attributes:
        live: running requests, oldest first.
        pins: the pinned prefixes.
        prefetches: those from the store behind HOST; None without one.
        seen: the cache after the last call.
        calls: the hook calls of the last call.
        n_calls: calls so far, which are seconds of the cache's clock.
        steps: steps of the model so far.
        behind_since: the last of them that a lagging device has computed; None if it has computed
            all.
        waited_in_vain: whether a wait for copies ran out in the last call.
        counts: events by name, for reports.
        trace: the same in words.
    """

    def __init__(self, setup: Setup, sizes: Sizes, judge: Judge) -> None:
        self.setup, self.sizes, self.judge = setup, sizes, judge
        self.trace = Trace()
        self.trace.call(f"open {sizes} with {', '.join(setup.shown(sizes))}")
        self.engine = engine_for(setup.device)
        self.hooks = Hooks()
        self.n_calls = 0
        try:
            self.cache = open_cache(
                setup, sizes, self.engine, self.hooks, clock=lambda: float(self.n_calls)
            )
        except KvgraftError as error:
            judge.refuse(error, f"open {sizes}")
            raise Stopped from error
        self.model = BruteForce(sizes.page_size, model_components(self.cache.mounted))
        self.paged = [each for each in self.model.components if not each.is_state]
        self.states = [each for each in self.model.components if each.is_state]
        self._check_pools()
        device = self.engine.device if isinstance(self.engine, PromptedStreamEngine) else None
        self.payloads = Payloads(self.cache, device)
        self.watching = Watching(self.cache, sizes.page_size, judge)
        self.engine.submitted = self._submitted
        if self.cache.arenas is not None:
            self._follow_moves(self.cache.arenas.mover)
        self.misread: list[ContractViolation] = []
        self.steps = 0
        self.behind_since: int | None = None
        self._points: list[Point] = []
        """The last two points that were named, or fewer."""
        self.waited_in_vain = False
        self.recency = Recency(self.model, setup.keeping)
        self.reserving = Reserving(self.model, self.recency, judge)
        self.cache.clean_reserve.share = RESERVE_SHARE
        if setup.sweep_steps is not None:
            self.cache.evictor.sweeper.n_steps = setup.sweep_steps
        nbytes = {each.name: each.component.device.slot_nbytes for each in self.cache.mounted}
        self.predictor = Predictor(self.model, sizes.load, nbytes)
        self.resuming = self._resuming(nbytes)
        self.gone: dict[str, set[Prefix]] = {each.name: set() for each in self.model.components}
        self.publishing = Publishing(self)
        self.live: list[Live] = []
        self.pins: Pinning | None = None
        self.prefetches: Prefetches | None = None
        self.calls: list[HookCall] = []
        self.counts: Counter[str] = Counter()
        self.write_back = sizes.policy is WritePolicy.WRITE_BACK
        self.payloads.poison()
        self.seen = observe(self.cache, self.model)
        self.names = [component.name for component in self.cache.tree.components]
        self.budgeted = {
            each.name for each in self.cache.mounted if each.budget_contribution is not None
        }
        self.lost_on_host = False
        self.in_flight: list[list[Transfer]] = []
        self.mirrored = [name for name, tier in self.seen.books if tier == "host"]

    @cached_property
    def copies(self) -> list[tuple[DevicePool, SlotCopies]]:
        """Pools whose copies the engine makes behind each call, all at once (N3).

        In every second cache; not where bytes are compared, or a call waits for them, before.
        """
        checked = isinstance(self.engine, PromptedStreamEngine) or self.cache.guard is not None
        if checked or self.write_back or self.sizes.device % 2:
            return []
        pools = [each.component.device for each in self.cache.mounted]
        return [(pool, SlotCopies(pool)) for pool in pools]

    def _follow_moves(self, mover: Any) -> None:
        """Data that moves is followed here, too, besides by the guard."""
        others = mover.on_move

        def moved(tier: Tier, component: TreeComponent, source: bytes, target: bytes) -> None:
            if others is not None:
                others(tier, component, source, target)
            self.payloads.moved(tier, component, source, target)
            if tier is Tier.HOST or not self.copies:  # else the engine still reads the old rows
                self.payloads.left(tier, component, source)

        mover.on_move = moved

    def _check_pools(self) -> None:
        """Every slot of a pool has its row of memory (T8)."""
        for each in self.cache.mounted:
            for tier, pool in (("device", each.component.device), ("host", each.component.host)):
                rows = min((len(lanes) for lanes in pool.lanes), default=0) if pool else 0
                if pool is not None and pool.lanes and rows < pool.allocator.capacity:
                    said = f"{tier} pool of {pool.allocator.capacity} slots has {rows} rows"
                    self.judge.fail("T8", each.name, said)
                    raise Stopped

    def _resuming(self, nbytes: dict[str, int]) -> Resuming:
        """The points of this cache; a grid that costs more than its share is refused (I12)."""
        points = self.cache.points
        model = self.model.components
        windows = not all(each.is_state or each.is_prefix_closed for each in model)
        apart = self.sizes.decode_tokens
        if windows:
            apart = min(apart, DRAFTED_TOKENS) if self.sizes.max_drafts else 0
        resuming = Resuming(
            self.model,
            cut_pages=-(-self.sizes.cut_tokens // self.sizes.page_size),
            decode_pages=max(1, -(-apart // self.sizes.page_size)),
            spacing=points.spacing,
            state_spacing=points.state_spacing,
        )
        base = self.model.components[0]
        per_page = nbytes[base.name] * base.slots_per_page
        if base.home_is_host:
            host = self.cache.mounted[0].component.host
            per_page += (host.slab_nbytes if host is not None else 0) * base.slots_per_page
        bounded = resuming.bounded + resuming.states
        for parts, spacing in ((bounded, points.spacing), (resuming.states, points.state_spacing)):
            cost = resuming.most_nbytes(parts, nbytes)
            if cost * SHARE > spacing * per_page:
                said = f"a point of {cost} bytes every {spacing} pages of {per_page} bytes"
                self.judge.fail("I12", None, f"{said}: more than 1/{SHARE}")
        return resuming

    def _note_gone(self, before: Snapshot, after: Snapshot, inserted: Adopted) -> None:
        """Evicted pages are nobody's to find again, until somebody computes them again.

        Also those that were inserted and evicted by one call.
        """
        for component in self.model.components:
            there, gone = after.readable(component), self.gone[component.name]
            gone |= (before.readable(component) | inserted.get(component.name, {}).keys()) - there
            gone -= there

    def clear(self, gone: Mapping[object, Gone]) -> None:
        """From now on the data of some namespaces counts as cleared."""
        self.seen = self.seen.cleared(gone)
        self.recency.cleared(gone)
        for pages in self.gone.values():
            for page in [page for page in pages if page[0] in gone]:
                pages.remove(page)
                pages.add((gone[page[0]], page[1]))
        for live in self.live:
            live.namespace = gone.get(live.namespace, live.namespace)

    @property
    def may_adopt(self) -> bool:
        """Whether an engine can have slots of its own here (N2)."""
        others = self.states or any(each.home_is_host for each in self.paged)
        return not others and self.cache.arenas is None and not self.setup.tenants

    @property
    def fence(self) -> Point:
        """When everything computed so far exists; the point before if that one was named already.

        Engines name an event again that they named before. It takes nothing back (B4).
        """
        if not self._points or self._points[-1].number < self.steps:
            self._points = [*self._points[-1:], Point(self.steps, self.reached)]
            return self._points[-1]
        return self._points[0]

    def reached(self) -> int:
        """The step up to which the device has computed; here the bytes are there at once."""
        return self.steps if self.behind_since is None else self.behind_since

    def read_clock(self) -> None:
        """The cache reads its clock."""
        self.recency.now_s = float(self.n_calls)

    def retention(self, namespace: object) -> Retention | None:
        """The retention of a request's data from the next call on."""
        priority, ttl_s = self.setup.keeping.wanted(namespace)
        if priority is None and ttl_s is None:
            return None
        return Retention(priority or 0, inf if ttl_s is None else self.n_calls + 1 + ttl_s)

    def _submitted(self, submission: Submission) -> None:
        """Copies were handed over; their errors are reported once the call is over."""
        found = self.payloads.misread(submission)
        if found is not None:
            self.misread.append(found)

    def act(
        self,
        name: str,
        operation: Callable[[], T],
        *,
        pressure: Pressure | None = None,
        inserted: Adopted | None = None,
        uses: Callable[[T], Adopted | None] | None = None,
        acknowledges: bool = False,
        by: Sequence[Using] = (),
    ) -> T:
        """Run an operation, then check the books, the changes and every byte.

        Args:
            name: its name in counts and messages.
            operation: the call.
            pressure: which pools it may make room in; none by default.
            inserted: the data the tree must adopt, unless the call returns False.
            uses: called with the result, before the checks, to note uses; it may return the data
                that the tree must have adopted.
            acknowledges: whether transfers may end meanwhile.
            by: the namespaces of what the call uses, and the retentions of its requests there.

        Raises:
            ContractViolation: a rule is broken.
            Stopped: it failed, under a rule that is ignored.
        """
        before = self.seen
        self.n_calls += 1
        self.recency.settle(by)
        if name in READS_CLOCK:
            self.read_clock()
        waited = self.engine.time_outs
        result = self._attempt(name, operation)
        self._check_order()
        self.waited_in_vain = self.engine.time_outs > waited
        doubles = self.write_back and not self.setup.tenants
        pressure = replace(pressure or Pressure(), delayed=self.waited_in_vain, doubles=doubles)
        self.counts[name] += 1
        self.payloads.poison()
        after = self.seen = observe(self.cache, self.model)
        if uses is not None:
            inserted = uses(result) or inserted
        if self.prefetches is not None:
            pressure = self.prefetches.went_on(name, pressure, before)
        evicts = bool(pressure.device) and self.write_back
        copies_ahead = name == "poll" and doubles
        if evicts or copies_ahead:
            pressure = replace(pressure, host=dict.fromkeys(self.mirrored))
        check_losses(self.judge, before, after, pressure, self.recency)
        self._check_defined(after)
        if copies_ahead:
            failed = self.engine.failed or self.misread or any(call.error for call in self.calls)
            failed = failed or self.setup.stored
            entered = self.reserving.check_filled(before, after, failed=bool(failed))
            self.counts["copied ahead"] += entered
        self.reserving.note(before, after)
        self._note_gone(before, after, inserted or {})
        gains = Gains(
            inserted=inserted if inserted is not None and result is not False else {},
            remade=_may_evict(pressure, before),
            loads_may_end=acknowledges,
            backups_may_end=acknowledges or evicts or name in PREFETCHES,
            goes_on=name in GOES_ON,
        )
        if self.cache.arenas is None or name not in MOVES:
            gains.check_moves(self.judge, before, after)
        try:
            self.cache.check_integrity()
        except ContractViolation as violation:
            self.judge.refuse(violation, name)
        gains.check(self.judge, before, after)
        check_hits(self.judge, before, after)
        check_closure(self.judge, self.model, after, host_closed=not self.write_back)
        self._check_held(name, before, after)
        check_accounts(self.judge, self.model, after, self.live, self.names, self.budgeted)
        self._check_deliveries(before, after)
        check_flights(self.judge, self.payloads, self.engine, after)
        check_payloads(self.judge, self.model, self.payloads, before, after)
        self.watching.check(after)
        if name in SWEEPS and (self.setup.sweep_steps is None or name == "drain"):
            for (part, tier), pages in after.left_over().items():
                self.judge.fail("T3", part, f"{name} leaves cleared data on {tier}: {pages}")
        return result

    def _check_held(self, name: str, before: Snapshot, after: Snapshot) -> None:
        """Data that requests, prefetches and pins rely on is there."""
        check_promises(self.judge, self.model, after, self.live)
        if self.prefetches is not None:
            self.prefetches.check(name, before, after)
        if self.pins is not None:
            self.pins.check(after)

    def _check_defined(self, after: Snapshot) -> None:
        """Tenants' rights, and priorities and times to live, are as they are defined."""
        check_reserved(self.judge, after)
        check_rights(self.judge, self.cache, after)
        check_levels(self)

    def _attempt(self, name: str, operation: Callable[[], T]) -> T:
        """Run an operation; an error of it or of a hook is a broken rule."""
        failed: Exception | None = None
        try:
            result = operation()
        except Exception as error:  # noqa: BLE001 - the core's error is the finding
            failed = error
        self.calls = self.hooks.take()
        for call in self.calls:
            self.trace.hook(call)
        if failed is not None:
            self.judge.refuse(failed, name)
            raise Stopped from failed
        for pool, copies in self.copies:
            sources, targets = (torch.from_numpy(each.astype(np.int64)) for each in copies.take())
            for lanes in pool.lanes:
                lanes[targets] = lanes[sources]
        for call in self.calls:
            if call.error is not None:
                # A backup that cannot be built is given up; the core only logs it.
                said = f"{name}: {call.hook} raised {type(call.error).__name__}: {call.error}"
                self.judge.fail(HOOK_RULES[call.hook], call.component, said)
        misread, self.misread = self.misread, []
        for violation in misread:
            self.judge.refuse(violation, name)
        for ticket, reason in self.engine.broken:
            self._cannot_run(ticket.copies[0].target if ticket.copies else None, reason)
        self.engine.broken.clear()
        return result

    def _check_order(self) -> None:
        """All accesses to the device's memory are ordered (B3, B4, R7, L8, M8)."""
        for pair in self.engine.settle():
            self.judge.fail(pair.rule, None, str(pair))

    def _check_deliveries(self, before: Snapshot, after: Snapshot) -> None:
        """Transfers end in order, and deliver if copies run and HOST loses nothing (B1, R5)."""
        for line in self.in_flight:
            first = next((at for at, each in enumerate(line) if not each.ended), len(line))
            early = sum(each.ended for each in line[first:])
            if early:
                said = f"{early} of {len(line)} transfers in flight ended before earlier ones"
                self.judge.fail("B1", None, said)
        self.in_flight = [list(line) for line in self.cache.journal.queues.values()]
        counters = self.cache.journal.counters
        self.lost_on_host = self.lost_on_host or any(
            before.held[name].host.keys() - held.host.keys() for name, held in after.held.items()
        )
        if self.engine.failed:
            return
        for way, rule in ((Direction.LOAD_BACK, "R5"), (Direction.BACKUP, "B1")):
            failed = counters[way].failed
            if failed and not (way is Direction.BACKUP and self.lost_on_host):
                said = f"{failed} transfers ({way.value}) delivered nothing, all copies ran"
                self.judge.fail(rule, None, said)

    def _cannot_run(self, target: object, error: Exception) -> None:
        name, tier = self.payloads.pool_of.get(id(target), (None, "host"))
        way = Direction.LOAD_BACK if tier == "device" else Direction.BACKUP
        rule = "R5" if way is Direction.LOAD_BACK else "B3"
        said = f"copies of a {way.value} cannot run: {type(error).__name__}: {error}"
        self.judge.fail(rule, name, said)


def _may_evict(pressure: Pressure, before: Snapshot) -> bool:
    """Whether a pool was short, so that room was made on DEVICE."""
    return any(
        needed is None or needed > before.books[name, "device"].free
        for name, needed in pressure.device.items()
    )
