"""Whether what vanished between two snapshots was allowed to.

The model does not choose victims; it looks at what the cache evicted and asks, with nothing but
prefixes and its own recency counters: was the cell unpinned, was a pool short that explains it,
were the other components' cells inside the cascade, was there a victim used less recently, and did
it stop in time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from .brute_force import BruteForce, ModelComponent, Prefix
from .observing import NodeView, Snapshot

__all__ = ["Pressure", "Recency", "check_losses", "remaining_victims"]


class Recency:
    """When each component's page was last used.

    A use of a page is a use of its whole prefix for a component that needs all of it. The cache
    keeps that lazily, tier by tier: a stamp climbs when the nodes below leave the tier. So of a
    page below which a tier had a gap when it was used, the model knows the latest use (`used`),
    and the latest the tier is certain to know of (`known`).
    """

    def __init__(self, model: BruteForce) -> None:
        self.model = model
        self.clock = 0
        self.used: dict[str, dict[Prefix, int]] = {each.name: {} for each in model.components}
        self.known: dict[tuple[str, str], dict[Prefix, int]] = {
            (each.name, tier): {} for each in model.components for tier in ("device", "host")
        }
        self._before: dict[tuple[str, str, Prefix], int] = {}

    def settle(self) -> None:
        """An operation begins: from here on its own uses are told from earlier ones."""
        self._before.clear()

    def _note(self, name: str, tier: str, page: Prefix) -> None:
        known = self.known[name, tier]
        self._before.setdefault((name, tier, page), known.get(page, 0))
        known[page] = self.clock

    def created(self, pages: set[Prefix]) -> None:
        """Nodes for these pages appeared."""
        self.clock += 1
        for name in self.used:
            self.adopted(name, pages)

    def adopted(self, name: str, pages: set[Prefix]) -> None:
        """An insert gave a component data."""
        self.used[name].update(dict.fromkeys(pages, self.clock))
        for tier in ("device", "host"):
            for page in pages:
                self._note(name, tier, page)

    def resumed(
        self,
        sequence: Prefix,
        boundary: int,
        after: Snapshot,
        position: int = 0,
        since: int = 0,
    ) -> None:
        """A request resumes at a boundary, or continues from there having got to `position`.

        Then it is certain to use only what it reaches from both. One that ended there is certain
        to have used the pages it computed, `since` on.
        """
        self.clock += 1
        for component in self.model.components:
            name = component.name
            pages = self.model.prefixes(component, *sequence, boundary)
            self.used[name].update(dict.fromkeys(pages, self.clock))
            if position > boundary and not component.is_everything:
                ahead = self.model.pages(component, position) if not component.is_state else ()
                pages = [page for page in pages if self.model.page_of(page) in ahead]
            pages = [page for page in pages if self.model.page_of(page) >= since]
            held = after.held[name]
            for tier, cells in (("device", held.device), ("host", held.host)):
                for page in reversed(pages):
                    if component.is_everything and page not in cells:
                        break
                    self._note(name, tier, page)

    def latest(self, component: ModelComponent, pages: tuple[Prefix, ...]) -> int:
        """Last use, this operation's included."""
        return max(self.used[component.name].get(page, 0) for page in pages)

    def certain(self, component: ModelComponent, tier: str, pages: tuple[Prefix, ...]) -> int:
        """Last use a tier is certain to know of; room may be made before an operation's own."""
        name = component.name
        known = self.known[name, tier]
        return max(self._before.get((name, tier, page), known.get(page, 0)) for page in pages)


@dataclass
class Pressure:
    """Which pools an operation may make room in.

    Attributes:
        device: slots asked for per component; a pool is short if it has fewer free.
        host: components whose HOST pool may be short; slots where known, else None.
        passing: pages pinned only while the operation ran, so it may have passed them over.
    """

    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int | None] = field(default_factory=dict)
    passing: set[Prefix] = field(default_factory=set)


def _cut(nodes: list[NodeView], ends: set[Prefix]) -> list[NodeView]:
    """Nodes split where the operation split them: an operation evicts after it splits."""
    cut: list[NodeView] = []
    position: list[int] = []
    for view in nodes:
        parent = position[view.parent] if view.parent >= 0 else -1
        start = 0
        for end, page in enumerate(view.pages, 1):
            if page in ends or end == len(view.pages):
                cut.append(NodeView(view.pages[start:end], parent))
                parent, start = len(cut) - 1, end
        position.append(parent)
    return cut


class _Tier:
    """One tier of two snapshots, as eviction there sees it."""

    def __init__(self, model: BruteForce, before: Snapshot, after: Snapshot, tier: str) -> None:
        self.model, self.before, self.after, self.tier = model, before, after, tier
        self.parts = {each.name: each for each in model.components}
        self.lost = {
            name: set(self._cells(before, name)) - set(self._cells(after, name))
            for name in self.parts
        }

    def _cells(self, snapshot: Snapshot, name: str) -> dict[Prefix, tuple[int, ...]]:
        held = snapshot.held[name]
        return held.device if self.tier == "device" else held.host

    def cells_of(self, view: NodeView, name: str) -> tuple[Prefix, ...]:
        return view.pages[-1:] if self.parts[name].is_state else view.pages

    def losers(self, view: NodeView) -> list[str]:
        """Components that lost their cell on a node of the first snapshot."""
        losers = []
        for name, lost in self.lost.items():
            gone = [page in lost for page in self.cells_of(view, name)]
            if any(gone):
                assert all(gone), f"E3: {name} lost part of a node: {view}"
                losers.append(name)
        return losers

    def holders(self, snapshot: Snapshot, view: NodeView) -> list[str]:
        return [
            name
            for name in self.parts
            if self.cells_of(view, name)[-1] in self._cells(snapshot, name)
        ]

    def remade(self, name: str, view: NodeView) -> bool:
        """Whether the cell went and came back within the operation, or may have.

        On HOST it may have if it left DEVICE: what is demoted may get back the slots it had.
        """
        page = self.cells_of(view, name)[-1]
        before, after = self.before.held[name], self.after.held[name]
        if self.tier == "host" and page in before.device and page not in after.device:
            return True
        return self._cells(self.before, name).get(page) != self._cells(self.after, name).get(page)

    def live_below(self, stays: Callable[[str, Prefix], bool]) -> set[Prefix]:
        """Last pages of first-snapshot nodes under which a cell is held that `stays`."""
        live: set[Prefix] = set()
        nodes = self.before.nodes
        for view in reversed(nodes):
            held = any(
                page in self._cells(self.before, name) and stays(name, page)
                for name in self.parts
                for page in self.cells_of(view, name)[-1:]
            )
            if (held or view.pages[-1] in live) and view.parent >= 0:
                live.add(nodes[view.parent].pages[-1])
        return live

    def live_before(self) -> set[Prefix]:
        """Nodes under which something was held."""
        return self.live_below(lambda name, page: True)

    def live_throughout(self) -> set[Prefix]:
        """Nodes under which something was held all the time: never leaves meanwhile."""
        return self.live_below(lambda name, page: not self.remade(name, NodeView((page,), -1)))

    def pinned(self, snapshot: Snapshot, name: str, view: NodeView) -> bool:
        held, last = snapshot.held[name], view.pages[-1]
        if self.tier == "device":
            return last in held.device_pinned
        return last in held.host_pinned or (
            self.parts[name].home_is_host and last in held.device_pinned
        )

    def candidates(self, name: str) -> list[NodeView]:
        """Nodes that were victims of the component throughout the operation and remain."""
        live = self.live_before()
        return [
            view
            for view in self.before.nodes
            if self.cells_of(view, name)[-1] in self._cells(self.before, name)
            and not self.remade(name, view)
            and not self.pinned(self.before, name, view)
            and not self.pinned(self.after, name, view)
            and not (self.parts[name].is_everything and view.pages[-1] in live)
        ]


def _gap(model: BruteForce, after: Snapshot, page: Prefix, first: int, end: int) -> bool:
    """Whether a prefix-closed component holds nothing on one of the pages `[first, end)`."""
    return any(
        model.prefix(*page, number) not in after.readable(component)
        for component in model.components
        if component.is_everything
        for number in range(first, end)
    )


def _buried(tier: _Tier, other: _Tier, view: NodeView) -> bool:
    """Whether nothing on the node could be resumed from any more, for a reason found elsewhere:

    a prefix-closed component lost what lies before the node, or its cell here on the other tier.
    """
    first, last = tier.model.page_of(view.pages[0]), tier.model.page_of(view.pages[-1])
    if _gap(tier.model, tier.after, view.pages[-1], 0, first):
        return True
    return _gap(tier.model, tier.after, view.pages[-1], first, last + 1) and any(
        component.is_everything and view.pages[-1] in other.lost[component.name]
        for component in tier.model.components
    )


def _demoted_below(devices: _Tier, view: NodeView) -> bool:
    """Whether a cell below the node left DEVICE, and so may have come to HOST."""
    namespace, tokens = view.pages[-1]
    return any(
        page[0] == namespace and len(page[1]) > len(tokens) and page[1][: len(tokens)] == tokens
        for lost in devices.lost.values()
        for page in lost
    )


def _lost_home(model: BruteForce, hosts: _Tier, view: NodeView, loser: str) -> bool:
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
    return [view.pages[-1] for view in _Tier(model, now, now, tier).candidates(component.name)]


def check_losses(
    model: BruteForce, before: Snapshot, after: Snapshot, pressure: Pressure, recency: Recency
) -> None:
    """Raise unless every cell that vanished did so by the rules E1 to E5."""
    cut = replace(before, nodes=_cut(before.nodes, {view.pages[-1] for view in after.nodes}))
    devices, hosts = _Tier(model, cut, after, "device"), _Tier(model, cut, after, "host")
    if not any(devices.lost.values()) and not any(hosts.lost.values()):
        return
    device_short = {
        name: needed - before.books[name, "device"].free
        for name, needed in pressure.device.items()
        if needed > before.books[name, "device"].free
    }
    host_short = {
        name: None if needed is None else needed - before.books[name, "host"].free
        for name, needed in pressure.host.items()
        if (name, "host") in before.books
        and (needed is None or needed > before.books[name, "host"].free)
    }
    _check_tier(devices, hosts, device_short, pressure, recency)
    _check_tier(hosts, devices, host_short, pressure, recency)


def _check_tier(
    tier: _Tier,
    other: _Tier,
    short: dict[str, int] | dict[str, int | None],
    pressure: Pressure,
    recency: Recency,
) -> None:
    model = tier.model
    live_before, live = tier.live_before(), tier.live_throughout()
    sole: dict[str, list[int]] = defaultdict(list)
    kept = {name: tier.candidates(name) for name in short}
    for view in tier.before.nodes:
        losers = tier.losers(view)
        if not losers:
            continue
        for name in losers:
            assert not tier.pinned(tier.before, name, view) or tier.tier == "host", (
                f"E1: {name} lost a pinned cell on {tier.tier}: {view.pages[-1]}"
            )
            assert not tier.pinned(tier.before, name, view) or not tier.pinned(
                tier.after, name, view
            ), f"E1: {name} lost a pinned cell on {tier.tier}: {view.pages[-1]}"
        reasons = []
        if _buried(tier, other, view):
            reasons.append("buried")
        if tier.tier == "device" and all(_lost_home(model, other, view, name) for name in losers):
            reasons.append("home")
        returned = [
            name
            for name in tier.holders(tier.before, view)
            if name not in losers and tier.remade(name, view)
        ]
        passed = [
            name
            for name in tier.parts
            if tier.tier == "host"
            and name not in losers
            and tier.cells_of(view, name)[-1] in other.lost[name]
            and tier.cells_of(view, name)[-1] not in tier.after.held[name].host
        ]
        # What came to HOST when it left DEVICE may have been evicted there in the same operation.
        starters = [
            name
            for name in losers + returned + passed
            if name in short
            and _cascade_fits(tier, view, name, losers, live)
            and _least_recent(tier, view, name, kept[name], pressure, recency)
        ]
        assert starters or reasons, (
            f"E2/E3: {losers} left {tier.tier} at {view.pages[-1]}; short were {short}; "
            + "; ".join(
                f"{name}: cascade {_cascade_fits(tier, view, name, losers, live)}, "
                f"least recent {_least_recent(tier, view, name, kept[name], pressure, recency)}"
                for name in losers
                if name in short
            )
        )
        grew = tier.tier == "host" and _demoted_below(other, view)
        if starters and not reasons and not grew and view.pages[-1] not in live_before:
            left = [
                name
                for name in tier.holders(tier.after, view)
                if not tier.pinned(tier.before, name, view) and not tier.remade(name, view)
            ]
            pinned = any(
                tier.pinned(tier.before, name, view) for name in tier.holders(tier.before, view)
            )
            assert not left or pinned, (
                f"E3: {losers} left {tier.tier} at the leaf {view.pages[-1]}, {left} did not"
            )
        if len(losers) == 1 and starters == losers and not reasons:
            name = starters[0]
            parts = tier.parts[name]
            n_cells = 1 if parts.is_state else len(view.pages) * parts.slots_per_page
            sole[name].append(n_cells)
    for name, sizes in sole.items():
        wanted = short[name]
        assert wanted is None or sum(sizes) - max(sizes) < wanted, (
            f"E2: {name} was short of {wanted} {tier.tier} slots and evicted {sizes}"
        )


def _cascade_fits(
    tier: _Tier, view: NodeView, starter: str, losers: list[str], live: set[Prefix]
) -> bool:
    """Whether an eviction started by one component explains all that left the node (E3)."""
    if view.pages[-1] not in live:
        return True
    return all(tier.model.contains(tier.parts[starter], tier.parts[name]) for name in losers)


def _least_recent(
    tier: _Tier,
    view: NodeView,
    name: str,
    kept: list[NodeView],
    pressure: Pressure,
    recency: Recency,
) -> bool:
    """Whether no victim that was kept had been used before the node."""
    component = tier.parts[name]
    used = recency.certain(component, tier.tier, tier.cells_of(view, name))
    return not any(
        recency.latest(component, tier.cells_of(other, name)) < used
        for other in kept
        if other.pages[-1] not in pressure.passing
    )
