"""Leases, a match that stays true until it is released, and the load-backs they need (M, R)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from kvgraft.compiled import mypyc_attr
from kvgraft.config import LoadModel
from kvgraft.errors import ContractViolation
from kvgraft.packages.dispatch import Mounted, are_spans, shown
from kvgraft.requests.components import RequestComponent, RequestState
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.request import NO_PAGES, NOTHING_FETCHED, Limited, Request
from kvgraft.transfers import Fence, Journal, Transfer
from kvgraft.tree import matching, operations, pinning
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.matching import Match
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt, common_pages
from kvgraft.tree.tree import Tree
from kvgraft.types import Direction, LockQuery, Span, new_view


class Lease(NamedTuple):
    """A match that stays true until its receipt is released (M7).

    Attributes:
        match: the deepest boundary that all components can resume at, and those before it.
        receipt: pins all reaches there.
        limited: why it is shorter than the tree's data; None if it is not.
        asked: boundaries, in pages, where components ask for resume points.
    """

    match: Match
    receipt: Receipt
    limited: Limited | None
    asked: Collection[int]


class Locks(NamedTuple):
    """Components' answers about pins at a boundary.

    Attributes:
        segments: per component whose hook names its own pages, by its index.
        undo: their inverse hooks.
    """

    segments: dict[int, tuple[Span, ...]]
    undo: ExitStack

    def within(
        self, tree: Tree, limits: Sequence[tuple[Span, ...] | None] | None = None
    ) -> list[tuple[Span, ...] | None]:
        """The pages to pin of every component, at most `limits` of one that has some."""
        segments = list(limits or (None,) * len(tree.components))
        for index, segment in self.segments.items():
            limit = segments[index]
            if limit is None:
                segments[index] = segment
            elif not tree.components[index].is_state:
                segments[index] = common_pages(segment, limit)
        return segments


@mypyc_attr(allow_interpreted_subclasses=True)
class Leases:
    """Matches keys, and pins what it finds.

    Attributes:
        shared_loads: load-backs of other requests that a request waited for (R6).
        skipped_loads: prefixes computed again because that is estimated to be faster (R8).
        never_resumes: whether no match is used, because a component cannot copy its state (M8).
    """

    def __init__(
        self,
        tree: Tree,
        mounted: Sequence[Mounted],
        load: LoadModel | None,
    ) -> None:
        self.tree = tree
        self.load = load
        self.mounted = mounted
        self.shared_loads = 0
        self.skipped_loads = 0
        self._finalizers = [
            (component, each.finalize_match_result)
            for component, each in zip(tree.components, mounted)
            if each.finalize_match_result is not None
        ]
        self.lockers = [
            (component, each.lock_hooks)
            for component, each in zip(tree.components, mounted)
            if each.lock_hooks is not None
        ]
        self.never_resumes = any(
            component.is_state and not component.can_copy for component in tree.components
        )

    def lease(self, key: TokenKey, limit: int) -> Lease:
        """Match at most `limit` pages of a request's key, and pin the anchor."""
        #   0 ───── device_anchor ───── anchor ───── base ───── limit
        #   all on DEVICE │ some on HOST  │ wider components have data, a narrower one lacks its own
        # Falls back to device_anchor where computing is faster, and to 0 where pins would break a
        # promise. Afterwards all reaches at the anchor are pinned (M7).
        tree = self.tree
        found, asked, limited = self._match(key, limit)
        host_from = None
        if found.device_anchor != found.anchor:
            if self._recompute(found, key.n_tokens):
                limited = Limited.RECOMPUTE
                self.skipped_loads += 1
                found = self._shorten(found, found.device_anchor)
            else:
                host_from = matching.missing_from(tree, found)
        anchor = matching.anchor_node(tree, found)
        receipt = self._acquire(anchor, 0 if tree.homes_on_host else host_from)
        if receipt is None:
            limited = Limited.CROWDED
            found = self._shorten(found, 0)
            receipt = pinning.acquire(tree, found.root, touch=False)
            assert receipt is not None
        return Lease(found, receipt, limited, asked)

    def keep(self, key: TokenKey, limit: int) -> tuple[Match, Receipt | None]:
        """Match at most `limit` pages of a key, and pin the anchor for no request (K6).

        It does not count as a use of the data. Returns no receipt if it would take promised slots.
        """
        found, _, _ = self._match(key, limit)
        host_from = 0 if self.tree.homes_on_host else matching.missing_from(self.tree, found)
        anchor = matching.anchor_node(self.tree, found)
        return found, self._acquire(anchor, host_from, touch=False)

    def lock(self, boundary: int) -> Locks | None:
        """Ask components what to pin at a boundary, given in pages: all, or none (I8)."""
        if not self.lockers:
            return None
        segments: dict[int, tuple[Span, ...]] = {}
        with ExitStack() as undo:
            for component, hooks in self.lockers:
                answer = hooks.acquire(LockQuery(boundary, self.tree.page_size))
                if answer is not None:
                    undo.callback(hooks.release, answer)
                    segments[component.index] = _merged(component, boundary, answer)
                    _check_segment(self.tree, component, boundary, segments[component.index])
            held = undo.pop_all()
        return Locks(segments, held)

    # -- inside

    def _match(self, key: TokenKey, limit: int) -> tuple[Match, Collection[int], Limited | None]:
        """The match that all components agree on, their resume points, and why it is shorter."""
        found = matching.match(self.tree, key, limit)
        limited = None
        if self.never_resumes and found.anchor:
            limited = Limited.NO_COPY
            found = self._shorten(found, 0)
        if not self._finalizers:
            return found, (), limited
        return *self._finalize(found, limit), limited

    def _shorten(self, found: Match, limit: int) -> Match:
        limit = min(found.anchor, limit)
        shorter = matching.resolve(self.tree, found.node, limit, found.root)
        return shorter._replace(base=found.base)

    def _finalize(self, found: Match, limit: int) -> tuple[Match, Collection[int]]:
        """Let components shorten the match, and ask for resume points, in pages (M5).

        Where one shortens it the others are asked again: they may not accept the new boundary (M1).
        """
        asked: tuple[int, ...] = ()
        anchor = -1
        while anchor != found.anchor:
            anchor = found.anchor
            for component, hook in self._finalizers:
                host_slots = 0
                if found.device_anchor != found.anchor:
                    host_slots = _missing_slots(found, component)
                view = new_view((found.anchor, found.device_anchor, found.base, limit, host_slots))
                answer = hook(view)
                if answer is None:
                    continue
                if answer.limit_pages > found.anchor:
                    raise ContractViolation(
                        "M5",
                        component.name,
                        f"finalize_match_result lengthened the match from {found.anchor} to "
                        f"{answer.limit_pages} pages",
                    )
                asked = (*asked, *answer.checkpoint_pages)
                if answer.limit_pages < found.anchor:
                    found = self._shorten(found, answer.limit_pages)
        return found, asked

    def _recompute(self, found: Match, n_tokens: int) -> bool:
        """Whether computing is estimated faster than loading (R8); not if a state is needed."""
        if self.load is None or not found.device_anchor < found.anchor:
            return False
        nbytes = 0
        for component, each in zip(self.tree.components, self.mounted):
            if component.is_state:
                if found.node.cells[component.index].device is None:
                    return False
                continue
            nbytes += _missing_slots(found, component) * each.component.device.slot_nbytes
        load_s = self.load.latency_s + nbytes / self.load.bandwidth_bytes_s
        rest = n_tokens - found.anchor * self.tree.page_size
        tokens = (found.anchor - found.device_anchor) * self.tree.page_size
        return self.load.compute_s(tokens, rest) < load_s

    def _acquire(
        self, anchor: Node, host_from: int | None, *, touch: bool = True
    ) -> Receipt | None:
        """Pin a match; None, with nothing pinned or locked, if that would break a promise."""
        locks = self.lock(anchor.end) if self.lockers else None
        if locks is None:
            return pinning.acquire(self.tree, anchor, host_from=host_from, touch=touch)
        if host_from is not None:
            # Pages that a load-back brings beyond the reaches are pinned on HOST as well (M4).
            starts = [span.start for segment in locks.segments.values() for span in segment]
            host_from = min([host_from, *starts])
        return pinning.acquire(
            self.tree,
            anchor,
            host_from=host_from,
            touch=touch,
            segments=locks.within(self.tree),
            locks=locks.undo,
        )


def begin_at(lease: Lease, request: Request, tree: Tree) -> None:
    """A request begins at a lease's anchor, or begins again there.

    It gets new components; a caller whose request holds slots must free those of the old ones.
    """
    found, receipt = lease.match, lease.receipt
    request.receipt, request.limited = receipt, lease.limited
    if request.root is not found.root:
        # Its namespace was cleared after it began: it continues in the new tree.
        root = tree.hold_root(request.namespace)
        tree.release_root(request.root)
        request.root = root
    request.key.found_at(receipt.anchor, found.root)
    request.computed = request.anchor_tokens = found.anchor * tree.page_size
    request.device_tokens, request.storage_tokens = found.device_anchor * tree.page_size, 0
    if request.fetched is not NOTHING_FETCHED:
        start = max(found.device_anchor, request.fetched.start)
        fetched = min(found.anchor, request.fetched.end) - start
        request.storage_tokens = max(0, fetched) * tree.page_size
    request.allocated = request.cached = request.last_point = request.last_left = found.anchor
    request.left, request.points_left_out, request.published = NO_PAGES, None, False
    request.waits, request.fits = [], False
    mine: list[RequestComponent] = []
    states: list[RequestState] = []
    bounded: list[RequestComponent] = []
    tenant = request.root.tenant
    for component in tree.components:
        if component.is_state:
            states.append(RequestState(component, tenant))
            mine.append(states[-1])
            continue
        mine.append(RequestComponent(component, tenant))
        if not component.is_prefix_closed:
            bounded.append(mine[-1])
    request.components, request.state_components, request.bounded_components = mine, states, bounded
    if found.device_anchor != found.anchor:
        for each, nodes in zip(mine, operations.load_plan(receipt, tree.components)):
            each.host_slots = sum([each.component.n_slots(node) for node in nodes])


def _missing_slots(found: Match, component: TreeComponent) -> int:
    """Slots a load-back from the anchor would move for one component, in its own units (M4)."""
    missing = 0
    for node in matching.needed_nodes(found, component):
        cell = node.cells[component.index]
        if cell.device is not None or cell.incoming is not None:
            continue
        if component.is_state:
            return 1
        for span in component.reach_pages.spans(found.anchor):
            pages = max(0, min(node.end, span.end) - max(node.start, span.start))
            missing += pages * component.slots_per_page
    return missing


def _merged(component: TreeComponent, boundary: int, answer: Sequence[Span]) -> tuple[Span, ...]:
    """The spans a hook named, in order, disjoint and not empty (a state's point is kept).

    Raises:
        ContractViolation: no spans, or one outside `[0, boundary]` (L3).
    """
    if not are_spans(answer):
        said = f"acquire_component_lock returned {shown(answer)}, not a list of Span in whole pages"
        raise ContractViolation("L3", component.name, said)
    spans = sorted(Span(*span) for span in answer)
    merged: list[Span] = []
    for span in spans:
        if not 0 <= span.start <= span.end <= boundary:
            raise ContractViolation(
                "L3", component.name, f"acquire_component_lock names {span} at boundary {boundary}"
            )
        if span.start == span.end and not (component.is_state and boundary):
            continue
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return tuple(merged)


def _check_segment(
    tree: Tree, component: TreeComponent, boundary: int, segment: tuple[Span, ...]
) -> None:
    """Refuse a pin that leaves out part of the reach, or escapes the wider ones' (L3, T6)."""

    def covered(inner: Span, outer: tuple[Span, ...]) -> bool:
        return any(span.start <= inner.start and inner.end <= span.end for span in outer)

    for need in component.segment_at(boundary):
        if not covered(need, segment):
            raise ContractViolation(
                "L3",
                component.name,
                f"acquire_component_lock pins {segment} where {need} is needed",
            )
    for other in tree.components[: component.index]:
        if component.index not in other.narrower:
            continue
        outer = other.segment_at(boundary)
        for span in segment:
            if not covered(span, outer):
                raise ContractViolation(
                    "T6", component.name, f"acquire_component_lock pins {span} outside {outer}"
                )


@mypyc_attr(allow_interpreted_subclasses=True)
class LoadBacks:
    """Starts the transfers of admitted requests, and shares those in flight already."""

    def __init__(self, tree: Tree, journal: Journal, evictor: Evictor, leases: Leases) -> None:
        self.tree = tree
        self.journal = journal
        self.evictor = evictor
        self.leases = leases

    def start(self, request: Request, fence: Fence | None) -> list[Transfer]:
        """Reserve DEVICE slots for the missing part of the request's reach and start copying it.

        Room is made per pool, for its own shortfall (R3); all slots are reserved or none (R4). An
        error leaves the request unchanged, so that it may try again (I8).
        """
        components = self.tree.components
        waits = [
            self.journal.find(operation)
            for operation in operations.waits_for(request.receipt, components)
        ]
        n_shared = len(waits)
        plan = operations.load_plan(request.receipt, components)
        if any(plan):
            for component, nodes in zip(components, plan):
                if nodes:
                    n_slots = sum(component.n_slots(node) for node in nodes)
                    self.evictor.ensure_promised(component, n_slots, request.root.tenant, n_slots)
            operation = operations.begin_load_back(self.tree, request.receipt)
            if operation is None:
                n_nodes = sum([len(each) for each in plan])
                raise ContractViolation(
                    "A7",
                    None,
                    f"load-back of an admitted request found no room for {n_nodes} nodes",
                )
            waits.append(self.journal.submit(operation, Direction.LOAD_BACK, fence))
        for part in request.components:
            part.account.loaded()
        self.leases.shared_loads += n_shared
        request.waits, request.load_started = waits, True
        return waits
