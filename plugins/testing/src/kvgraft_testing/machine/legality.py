"""Whether data that vanished between two snapshots was allowed to.

The model does not choose victims. It checks the evicted data with only prefixes and its own recency
counters: was the cell unpinned, does a short pool explain it, were the other components' cells
inside the cascade, was there an earlier victim, and did the eviction stop in time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvgraft.errors import ContractViolation
from kvgraft_testing.machine.brute_force import BruteForce, Gone, ModelComponent, Prefix
from kvgraft_testing.machine.judging import Judge
from kvgraft_testing.machine.observing import NOBODY, NodeView, Snapshot
from kvgraft_testing.machine.recency import LEFT_FIRST, Rank, Recency
from kvgraft_testing.machine.tenancy import check_taken
from kvgraft_testing.machine.tiers import TierChange, cut_nodes, vanished

__all__ = ["Pressure", "check_losses", "remaining_victims"]

NEXT = (LEFT_FIRST, 1, 0)
"""The rank of the clean reserve: behind evict-first data."""


@dataclass
class Pressure:
    """The pools in which an operation may make room.

    Attributes:
        device: needed slots per component; a pool is short if it has fewer free. None if an unknown
            number of slots moves (K7).
        host: components whose HOST pool may be short; slots where known, else None.
        passing: pages pinned only while the operation ran, so it may have passed them over.
        unpins: pins may end before room is made: transfers end, or requests pass pinned pages.
        doubles: HOST evicts DEVICE's data first.
        delayed: a wait for copies of evicted data timed out, so other data had to leave as well
            (E4).
        asks: the namespace of the request that needs the room.
    """

    device: Mapping[str, int | None] = field(default_factory=dict)
    host: Mapping[str, int | None] = field(default_factory=dict)
    passing: set[Prefix] = field(default_factory=set)
    unpins: bool = False
    doubles: bool = False
    delayed: bool = False
    asks: object = NOBODY


def _gap(model: BruteForce, after: Snapshot, page: Prefix, first: int, end: int) -> bool:
    """Whether a prefix-closed component holds nothing on one of the pages `[first, end)`."""
    return any(
        model.prefix(*page, number) not in after.readable(component)
        for component in model.components
        if component.is_prefix_closed
        for number in range(first, end)
    )


def _unreachable(tier: TierChange, other: TierChange, view: NodeView) -> bool:
    """Whether nothing on the node could be resumed from any more, for a reason found elsewhere.

    A prefix-closed component lost data before the node, or its cell here on the other tier, or
    here a copy to HOST that outlasted the call which took the data off DEVICE.
    """
    first, last = tier.model.page_of(view.pages[0]), tier.model.page_of(view.pages[-1])
    if _gap(tier.model, tier.after, view.pages[-1], 0, first):
        return True
    return _gap(tier.model, tier.after, view.pages[-1], first, last + 1) and any(
        component.is_prefix_closed
        and (view.pages[-1] in other.lost[component.name] or _lost_copy(tier, view, component))
        for component in tier.model.components
    )


def _lost_copy(tier: TierChange, view: NodeView, component: ModelComponent) -> bool:
    """Whether the component's data on the node was on its way to HOST and never got there."""
    page = view.pages[-1]
    return (
        page in tier.before.held[component.name].backing_up
        and page not in tier.after.held[component.name].backing_up
        and page not in tier.after.readable(component)
    )


def _copy_ended(tier: TierChange, view: NodeView) -> bool:
    """Whether a copy to HOST of data on the node, or below it, ended; another may have begun."""
    namespace, tokens = view.pages[-1]
    return any(
        page[0] == namespace and page[1][: len(tokens)] == tokens
        for name, held in tier.before.held.items()
        for page, copy in held.copies.items()
        if copy is not tier.after.held[name].copies.get(page)
    )


def _demoted_below(devices: TierChange, view: NodeView) -> bool:
    """Whether a cell below the node left DEVICE, and so may have come to HOST."""
    namespace, tokens = view.pages[-1]
    return any(
        page[0] == namespace and len(page[1]) > len(tokens) and page[1][: len(tokens)] == tokens
        for lost in devices.lost.values()
        for page in lost
    )


def _lost_home(model: BruteForce, hosts: TierChange, view: NodeView, loser: str) -> bool:
    """Whether the DEVICE cell went because a canonical copy on HOST did."""
    return any(
        component.home_is_host
        and model.contains(component, hosts.parts[loser])
        and view.pages[-1] in hosts.lost[component.name]
        for component in model.components
    )


def remaining_victims(
    model: BruteForce, now: Snapshot, component: ModelComponent, tier: str
) -> list[Prefix]:
    """Nodes of which the component's cell could still be evicted."""
    return [view.pages[-1] for view in TierChange(model, now, now, tier).candidates(component.name)]


def check_losses(
    judge: Judge,
    before: Snapshot,
    after: Snapshot,
    pressure: Pressure,
    recency: Recency,
) -> None:
    """Every cell that vanished did so by the rules E1 to E5, and of tenants by K4.

    An operation splits nodes and evicts, in any order: data that vanished from a split node was
    evicted from either part, or from the whole before.
    """
    if not all(view.pages for view in after.nodes):
        judge.fail("T2", None, "a node has no whole page")
    ends = {view.pages[-1] for view in after.nodes}
    split = cut_nodes(before.nodes, ends)
    remade = cut_nodes(before.nodes, ends, lambda view: vanished(view, before, after))
    try:
        _check_losses(judge, replace(before, nodes=split), after, pressure, recency)
    except ContractViolation:
        if remade == split:
            raise
        _check_losses(judge, replace(before, nodes=remade), after, pressure, recency)
    check_taken(judge, recency.model, before, after, pressure.asks)


def _check_losses(
    judge: Judge, before: Snapshot, after: Snapshot, pressure: Pressure, recency: Recency
) -> None:
    model = recency.model
    devices = TierChange(model, before, after, "device")
    hosts = TierChange(model, before, after, "host")
    if not any(devices.lost.values()) and not any(hosts.lost.values()):
        return
    device_short: dict[str, int | None] = {
        name: None if pressure.delayed else _short(before, name, "device", needed, pressure.asks)
        for name, needed in pressure.device.items()
        if needed is None or needed > before.room(name, "device", pressure.asks)
    }
    host_short = {
        name: _short(before, name, "host", needed, pressure.asks)
        for name, needed in pressure.host.items()
        if (name, "host") in before.books
        and (needed is None or needed > before.room(name, "host", pressure.asks))
    }
    _Losses(judge, devices, hosts, device_short, pressure, recency).check()
    _Losses(judge, hosts, devices, host_short, pressure, recency).check()


def _short(before: Snapshot, name: str, tier: str, needed: int | None, asks: object) -> int | None:
    """Slots that lack at most: a closed slot that is evicted leaves the pool."""
    if needed is None:
        return None
    return needed - before.room(name, tier, asks) + before.books[name, tier].closing


class _Losses:
    """The data that left one tier, and the reasons for it."""

    def __init__(
        self,
        judge: Judge,
        tier: TierChange,
        other: TierChange,
        short: Mapping[str, int | None],
        pressure: Pressure,
        recency: Recency,
    ) -> None:
        self.judge, self.tier, self.other = judge, tier, other
        self.short, self.pressure, self.recency = short, pressure, recency
        self.live_before, self.live = tier.live_before(), tier.live_throughout()
        self.kept = {
            name: [
                view for view in tier.candidates(name) if not isinstance(view.pages[-1][0], Gone)
            ]
            for name in tier.parts
        }
        self.sole: dict[str, list[int]] = defaultdict(list)
        self.doubles = {
            name: self._doubles(name) if pressure.doubles and tier.tier == "host" else set()
            for name in tier.parts
        }

    def _doubles(self, name: str) -> set[Prefix]:
        """Pages on HOST that DEVICE had, too, before or after the operation."""
        if self.tier.parts[name].home_is_host:
            return set()
        before, after = self.tier.before.held[name], self.tier.after.held[name]
        return before.host.keys() & (before.device.keys() | after.device.keys())

    def check(self) -> None:
        tier, followed = self.tier, False
        every: dict[str, list[int]] = defaultdict(list)
        for view in tier.before.nodes:
            losers = tier.losers(view, self.judge)
            if not losers:
                continue
            if isinstance(view.pages[-1][0], Gone):
                self._check_cleared(view, losers)
                continue
            self._check_pins(view, losers)
            reasons = _unreachable(tier, self.other, view) or (
                tier.tier == "device"
                and all(_lost_home(tier.model, self.other, view, name) for name in losers)
            )
            possible = self._possible(view, losers)
            starters = [name for name in possible if self._fits(view, name)]
            if not reasons and not self._explain(view, starters, losers):
                self._unexplained(view, possible, losers)
                continue
            grew = tier.tier == "host" and _demoted_below(self.other, view)
            passed = view.pages[-1] in self.live_before or view.pages[-1] in self.pressure.passing
            double = all(view.pages[-1] in self.doubles[name] for name in losers)
            if starters and not reasons and not grew and not passed and not double:
                self._check_leaf(view, losers)
            if reasons:
                followed = True
            elif len(losers) == 1 and starters == losers:
                self.sole[losers[0]].append(tier.n_slots(view, losers[0]))
            for name in self.short:
                if name in losers:
                    every[name].append(tier.n_slots(view, name))
        if len(self.short) == 1 and not followed:
            self.sole = every  # each of them was a victim of that pool
        for name, sizes in self.sole.items():
            wanted = self.short[name]
            if wanted is not None and sum(sizes) - max(sizes) >= wanted:
                self.judge.fail(
                    "E2", name, f"was short of {wanted} {tier.tier} slots and evicted {sizes}"
                )

    def _check_cleared(self, view: NodeView, losers: list[str]) -> None:
        """Nobody finds cleared data: it may go, unless somebody holds it."""
        tier = self.tier
        for name in losers:
            if tier.pinned(tier.before, name, view) and tier.pinned(tier.after, name, view):
                said = f"lost a cell of a cleared namespace that is pinned on {tier.tier}"
                self.judge.fail("E1", name, f"{said}: {view.pages[-1]}")

    def _check_pins(self, view: NodeView, losers: list[str]) -> None:
        """Pinned cells are no victims; pins may end within a call, those of a copy for one."""
        tier = self.tier
        for name in losers:
            stays = tier.tier == "device" and not (self.pressure.unpins or _copy_ended(tier, view))
            if tier.pinned(tier.before, name, view) and (
                stays or tier.pinned(tier.after, name, view)
            ):
                self.judge.fail("E1", name, f"lost a pinned cell on {tier.tier}: {view.pages[-1]}")

    def _possible(self, view: NodeView, losers: list[str]) -> list[str]:
        """Components whose pool was short and whose cell on the node went, for good or not."""
        tier = self.tier
        returned = [
            name
            for name in tier.holders(tier.before, view)
            if name not in losers and tier.remade(name, view)
        ]
        # Data that came to HOST when it left DEVICE may have been evicted there in the same
        # operation.
        passed = [
            name
            for name in tier.parts
            if tier.tier == "host"
            and name not in losers
            and tier.cells_of(view, name)[-1] in self.other.lost[name]
            and tier.cells_of(view, name)[-1] not in tier.after.held[name].host
        ]
        return [name for name in losers + returned + passed if name in self.short]

    def _explain(self, view: NodeView, starters: list[str], losers: list[str]) -> bool:
        """Whether evictions started by some components explain all that left the node (E3)."""
        if view.pages[-1] not in self.live:
            return bool(starters)
        parts, contains = self.tier.parts, self.tier.model.contains
        return all(
            any(contains(parts[starter], parts[name]) for starter in starters) for name in losers
        )

    def _fits(self, view: NodeView, name: str) -> bool:
        """Whether no victim that was kept was to leave before the node."""
        return not self._older(view, name)

    def _older(self, view: NodeView, name: str) -> list[tuple[int, Prefix]]:
        """Victims that were kept though they were to leave before the node, and their last use."""
        tier, component = self.tier, self.tier.parts[name]
        page = view.pages[-1]
        tenant = tier.before.tenant_of(page[0])
        rank = self.recency.earliest(component, tier.tier, tier.cells_of(view, name))
        on_device = tier.tier == "device"
        if on_device and page in tier.before.held[name].reserved:
            rank = NEXT
        if page in self.doubles[name]:
            return []
        found = [
            (self.recency.latest(component, tier.cells_of(other, name)), other.pages[-1])
            for other in self.kept[name]
            if other.pages[-1] not in self.pressure.passing
            and not isinstance(other.pages[-1][0], Gone)
            and tier.before.tenant_of(other.pages[-1][0]) == tenant
            and self._rank(component, other) < rank
        ]
        found += [(0, other) for other in self._kept_doubles(name)]
        return sorted(found, key=lambda each: each[0])

    def _kept_doubles(self, name: str) -> list[Prefix]:
        """Pages that both tiers had all the time, which HOST might have given up."""
        before, after = self.tier.before.held[name], self.tier.after.held[name]
        return [
            page
            for page in self.doubles[name]
            if page in before.device
            and page in after.device
            and after.host.get(page) == before.host[page]
            and page not in (before.host_pinned | after.host_pinned)
            and page not in (before.reserved.keys() | after.reserved.keys())
            and page not in self.pressure.passing
            and not isinstance(page[0], Gone)
        ]

    def _rank(self, component: ModelComponent, view: NodeView) -> Rank:
        """When kept data was to leave; the clean reserve goes first, but for data left behind."""
        name, tier, page = component.name, self.tier, view.pages[-1]
        rank = self.recency.last(component, tier.tier, tier.cells_of(view, name))
        if (
            tier.tier == "device"
            and rank[-1] >= 0
            and self.recency.is_next(name, page)
            and page in tier.after.held[name].reserved
        ):
            return NEXT
        return rank

    def _unexplained(self, view: NodeView, possible: list[str], losers: list[str]) -> None:
        """Say which rule does not allow the loss."""
        where = f"{losers} left {self.tier.tier} at {view.pages[-1]}"
        if not possible:
            why = f"short were {dict(self.short) or 'no pools'}"
            self.judge.fail("E2", losers[0], f"{where}; {why}")
            return
        if not self._explain(view, possible, losers):
            why = f"not all of narrower or equal reach than {possible}, which were short"
            self.judge.fail("E3", possible[0], f"{where}; {why}")
            return
        for name in losers:
            if name not in self.short and self._fits(view, name):
                why = f"as if {name!r} were short, and short were {dict(self.short)}"
                self.judge.fail("E2", name, f"{where}, {why}")
                return
        older = self._older(view, possible[0])
        left = any(used < 0 for used, _ in older)
        what = "data left behind" if left else "data that was to leave before"
        said = ", ".join(f"{page} at {used}" for used, page in older)
        why = f"of {possible}, which were short, {what} stayed: {said}"
        self.judge.fail("I9" if left else "T7", possible[0], f"{where}; {why}")

    def _check_leaf(self, view: NodeView, losers: list[str]) -> None:
        """At a leaf everything goes; of another tenant's only if all of it was borrowed.

        A request that publishes pins what it needs of a leaf, and may then take the rest (I5).
        """
        tier = self.tier
        if tier.before.shares:
            return
        left = [
            name
            for name in tier.holders(tier.after, view)
            if not any(tier.pinned(seen, name, view) for seen in (tier.before, tier.after))
            and not tier.remade(name, view)
        ]
        if left and not any(
            tier.pinned(tier.before, name, view) for name in tier.holders(tier.before, view)
        ):
            self.judge.fail(
                "E3", left[0], f"stayed on {tier.tier} at the leaf {view.pages[-1]}, {losers} left"
            )
