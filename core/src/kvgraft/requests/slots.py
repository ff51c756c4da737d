"""The slots a running request owns: taken from promises, given back or offered to the tree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvgraft.errors import ConfigError, TransferError
from kvgraft.packages.dispatch import Mounted
from kvgraft.packages.hook_results import shown
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.request import Due, Request, StateSlots
from kvgraft.requests.resume_points import ResumePoints
from kvgraft.tree import eviction
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.inserting import Holding, Run
from kvgraft.tree.integrity import SlotOwner
from kvgraft.tree.tree import Tree
from kvgraft.types import PointKind, Span, Tier

if TYPE_CHECKING:
    import torch

__all__ = ["Going", "InnerStates", "RequestSlots"]

InnerStates = Mapping[str, Mapping[int, Sequence["torch.Tensor"]]]
"""Per state component, by boundary in tokens, the planes of its state there."""

NO_PAGE = 1 << 40
"""Behind the last page of every sequence."""


class Going(NamedTuple):
    """What a request that goes on keeps to itself while it publishes other pages; in pages.

    Attributes:
        position: where it goes on; what bounded reaches cover there stays private.
        shared: what needs every page stays private up to here: others' data is in the tree there.
    """

    position: int
    shared: int


class RequestSlots:
    """Moves slots between pools, running requests and the tree's insert.

    Attributes:
        copies_on_write: states copied from the tree for a request that writes to them (M8).
    """

    def __init__(
        self, tree: Tree, mounted: Sequence[Mounted], evictor: Evictor, points: ResumePoints
    ) -> None:
        self.tree = tree
        self.evictor = evictor
        self.points = points
        self.mounted = mounted
        self.copies_on_write = 0
        self.state_components = tuple(
            component for component in tree.components if component.is_state
        )
        self.paged_components = tuple(
            component for component in tree.components if not component.is_state
        )
        self.bounded_components = tuple(t for t in self.paged_components if not t.is_prefix_closed)

    # -- pages

    def allocate_pages(self, request: Request, pages: int) -> bool:
        """Slots for the next `pages` pages, of every paged component or of none.

        Raises:
            TransferError: copies of evicted data did not end in time, so the room is not there.
        """
        first, end = request.allocated, request.allocated + pages
        needs = [
            (component, component.stored_between(first, end) * component.slots_per_page)
            for component in self.paged_components
        ]
        for component, n in needs:
            for account in (
                request.accounts[component.index],
                request.host_accounts[component.index],
            ):
                short = 0 if account is None else n - account.promised
                if account is not None and short > 0 and short > account.ledger.headroom:
                    return False
        for component, n in needs:
            if n > component.device.free:
                self._make_room(component, n)
            if request.host_accounts[component.index] is not None:
                self.evictor.free_host(component, n)
        for component, n in needs:
            if not n:
                continue
            account = request.accounts[component.index]
            if n > account.promised:
                account.extend(n - account.promised)
            slots = account.take(n)
            mirror = None
            host_account = request.host_accounts[component.index]
            if host_account is not None:
                if n > host_account.promised:
                    host_account.extend(n - host_account.promised)
                mirror = host_account.take(n)
            stop = first + n // component.slots_per_page
            _append(request.runs[component.index], Run(first, stop, slots, mirror))
        request.allocated = end
        return True

    def left_behind(self, request: Request, page: int) -> int:
        """The end, in pages, of what bounded reaches at boundary `page` no longer cover; else 0."""
        end = 0
        for component in self.bounded_components:
            runs = request.runs[component.index]
            if not runs:
                continue
            if component.window_pages is not None:
                start = page - component.window_pages
                if runs[0].first < start:
                    end = max(end, start)
                continue
            _, behind = self._behind(request, component, page)
            if behind:
                end = max(end, behind[-1].end)
        return end

    def pages_behind(self, request: Request, page: int) -> int:
        """Pages of the component that holds most of what `left_behind` names."""
        most = 0
        for component in self.bounded_components:
            _, behind = self._behind(request, component, page)
            most = max(most, sum(run.end - run.first for run in behind))
        return most

    def has_promise_left(self, request: Request, pages: int) -> bool:
        """Whether the next `pages` pages of every bounded component are promised."""
        return all(
            request.accounts[component.index].promised >= pages * component.slots_per_page
            for component in self.bounded_components
        )

    def is_worth_keeping(self, request: Request, page: int) -> bool:
        """Whether a resume point needs any of what `left_behind` names."""
        for component in self.bounded_components:
            _, behind = self._behind(request, component, page)
            for run in behind:
                if _needed_between(component, (*request.points, *request.left), run.first, run.end):
                    return True
        return False

    def _behind(
        self, request: Request, component: TreeComponent, page: int
    ) -> tuple[list[Run], list[Run]]:
        """A request's pages that the reach at boundary `page` covers, and those it left."""
        spans = (*component.reach_pages.spans(page), Span(page, NO_PAGE))
        return _divided(request.runs[component.index], spans)

    def give_back_behind(self, request: Request, page: int) -> None:
        """Free private pages that bounded reaches at boundary `page` no longer cover (L6, I3)."""
        for component in self.bounded_components:
            kept, behind = self._behind(request, component, page)
            if behind:
                request.runs[component.index] = kept
                self._free(request, component, behind)

    def holds_below(self, request: Request, page: int) -> bool:
        """Whether the request holds pages of its own before boundary `page`."""
        return any(runs and runs[0].first < page for runs in request.runs)

    def has_new(self, request: Request, page: int) -> bool:
        """Whether the tree lacks something that the request has up to boundary `page`."""
        if page > request.receipt.anchor.end or self.holds_below(request, page):
            return True
        return page > request.cached and any(
            states is not None and states.shared < page for states in request.states
        )

    def _free(self, request: Request, component: TreeComponent, runs: list[Run]) -> None:
        """Give pages back to their pools, and what they cost to the request's promises."""
        slots = b"".join([run.device for run in runs])
        component.device.give_private(slots)
        request.accounts[component.index].release(len(slots) // SLOT_BYTES)
        host_account = request.host_accounts[component.index]
        if host_account is not None:
            mirror = b"".join([run.host for run in runs if run.host is not None])
            host_account.ledger.give_private(mirror)
            host_account.release(len(mirror) // SLOT_BYTES)

    # -- states

    def set_up_states(self, request: Request) -> None:
        """Give the request live states, copied from its anchor (M8); keep what is due first."""
        self.settle_due(request)
        for component in self.state_components:
            states = request.states[component.index]
            assert states is not None
            if states.live is not None:
                self.keep_due(request, component, states)
                continue
            states.live = self._take_state(request, component)
            assert states.live is not None
            anchor = request.receipt.anchor
            if anchor.parent is not None:
                source = anchor.cells[component.index].device
                assert source is not None
                self._copy(component, source, states.live)
                self.copies_on_write += 1

    def note_boundary(self, request: Request, page: int) -> None:
        """The live states stand at boundary `page`: due to be kept before the model goes on.

        The copy waits until then, because a request that ends here donates the state itself (I7).
        Page 0 stands for no boundary: whatever was due and not kept has been overwritten.
        """
        due_as = Due.DECODED
        ahead = request.checkpoints
        while ahead and ahead[0] != page and ahead[0] * self.tree.page_size <= request.computed:
            self.points.skip(request, ahead.pop(0), "the engine computed past it")
        if page in ahead:
            request.checkpoints.remove(page)
            request.last_point = page
            due_as = Due.POINT
        elif page and request.computed < request.prompt:
            if self.points.on_grid(request, page):
                due_as = Due.GRID
            elif self.points.leaves_state(request, page):
                due_as = Due.LEFT
            else:
                page = 0
        elif request.total <= request.prompt:
            page = 0
        for component in self.state_components:
            states = request.states[component.index]
            assert states is not None
            states.due, states.due_as = page, due_as

    def check_inner(self, request: Request, end: int, states: InnerStates) -> None:
        """Refuse states of a chunk up to token `end` that have no place, before anything changes.

        Raises:
            ConfigError: no states by component and position, a component that keeps none, a
                position that is not wanted, or other planes than a slot's (I8).
        """
        if not isinstance(states, Mapping):
            raise ConfigError(
                f"computed: states={shown(states)}; give {{component: {{position: planes}}}}"
            )
        pools = {
            component.name: self.mounted[component.index].component.device
            for component in self.state_components
        }
        size = self.tree.page_size
        inside = self.points.inside_chunk(request, request.computed, end)
        wanted = [page * size for page in inside]
        for name, by_position in states.items():
            if name not in pools:
                raise ConfigError(
                    f"computed: component {name!r} keeps no states; those that do are "
                    f"{', '.join(pools) or 'none'}"
                )
            if not isinstance(by_position, Mapping):
                raise ConfigError(
                    f"computed: states of component {name!r} are a {type(by_position).__name__}; "
                    "give {position: planes}"
                )
            for position, planes in by_position.items():
                if position not in wanted:
                    raise ConfigError(
                        f"computed: states of component {name!r} at {shown(position)}, inside "
                        f"these {end - request.computed} tokens they are wanted at "
                        f"{', '.join(map(str, wanted)) or 'no position'}; give them where "
                        "state_boundaries says"
                    )
                what = f"computed: the state of component {name!r} at token {position}"
                pools[name].check_slot(planes, what)

    def capture_inside(self, request: Request, start: int, states: InnerStates) -> None:
        """Keep states from inside the chunk that began at token `start` (I10, I11).

        A point is kept for every state component or for none: where the engine hands over nothing,
        or a pool has no slot to spare or gets none in time, it is skipped.
        """
        size = self.tree.page_size
        for page in self.points.inside_chunk(request, start, request.computed):
            handed = [
                states.get(component.name, {}).get(page * size)
                for component in self.state_components
            ]
            promised = page in request.checkpoints
            if promised:
                request.checkpoints.remove(page)
            else:
                request.points.setdefault(page, PointKind.GRID)
            reason = "the engine handed over no state"
            if None not in handed:
                reason = self._no_room_for_states(request, promised=promised)
            if reason:
                self.points.skip(request, page, reason)
                continue
            for component, planes in zip(self.state_components, handed):
                if not promised:
                    request.accounts[component.index].add(1)
                slot = self._take_state(request, component)
                own = request.states[component.index]
                assert slot is not None
                assert own is not None
                assert planes is not None
                own.captured[page] = slot
                self.mounted[component.index].component.device.write_slot(slot, planes)
            request.last_point = page

    def _no_room_for_states(self, request: Request, *, promised: bool) -> str:
        """Make room for a state of every component, promised or of the headroom; else why not."""
        for component in self.state_components:
            mine = request.accounts[component.index].promised if promised else 0
            if mine < 1 and component.device.headroom < 1:
                return _no_headroom(component)
        for component in self.state_components:
            if not self.evictor.free_device(component, 1):
                return (
                    f"component {component.name!r} waited {self.evictor.timeout_s} s in vain for "
                    "copies of evicted states"
                )
        return ""

    def settle_due(self, request: Request) -> None:
        """Decide on a state that was not promised: all components keep it, or none does (I10)."""
        if not self.state_components:
            return
        first = request.states[self.state_components[0].index]
        assert first is not None
        page, due_as = first.due, first.due_as
        if not page or first.live is None or due_as in (Due.POINT, Due.DECODED):
            return
        for component in self.state_components:
            ledger = component.device
            spare = ledger.headroom > 0
            if due_as is Due.LEFT:
                spare = spare and (
                    ledger.free > 0 or eviction.has_left_behind(self.tree, component)
                )
            if not spare:
                if due_as is Due.GRID:
                    self.points.count_skipped(PointKind.GRID, _no_headroom(component))
                for each in self.state_components:
                    states = request.states[each.index]
                    assert states is not None
                    states.due = 0
                return
        for component in self.state_components:
            request.accounts[component.index].add(1)
        for component in self.state_components:
            states = request.states[component.index]
            assert states is not None
            states.due_as = Due.POINT
        if due_as is Due.GRID:
            request.points[page] = PointKind.GRID
            request.last_point = page
        else:
            request.left |= {page}
            request.last_left = page

    def keep_due(self, request: Request, component: TreeComponent, states: StateSlots) -> None:
        """Copy the live state if it is due, as a captured one or as the decode's last boundary.

        Without a slot the point is skipped (I11); nothing fails for want of one.

        Raises:
            TransferError: copies of evicted data did not end in time; the state is due still.
        """
        if not states.due or states.live is None:
            return
        page = states.due
        if states.due_as is Due.DECODED:
            if states.tracked is None:
                states.tracked = self._take_state(request, component)
            if states.tracked is not None:
                self._copy(component, states.live, states.tracked)
                states.tracked_page = page
        else:
            slot = self._take_state(request, component)
            if slot is None:
                self.points.skip(request, page, _no_headroom(component))
            else:
                self._copy(component, states.live, slot)
                states.captured[page] = slot
        # Last: where room is still being made, the engine calls again and the state is due still.
        states.due = 0

    def captured_pages(self, request: Request) -> list[int]:
        """Boundaries of the states that it captured and the tree does not have yet."""
        pages: list[int] = []
        for component in self.state_components:
            states = request.states[component.index]
            if states is not None and states.captured:
                pages += states.captured
        return pages

    def offered_page(self, request: Request, component: TreeComponent) -> int:
        """The deepest boundary at which an ending request has a state to donate; 0 if none."""
        states = request.states[component.index]
        assert states is not None
        page, rest = divmod(request.computed, self.tree.page_size)
        if not rest and states.live is not None:
            return page
        tracked = states.tracked_page if states.tracked is not None else 0
        return max([tracked, states.shared, *states.captured])

    def offer_states(self, request: Request, component: TreeComponent) -> None:
        """Put what an ending request can donate among its captured states (I7)."""
        states = request.states[component.index]
        assert states is not None
        page, rest = divmod(request.computed, self.tree.page_size)
        if not rest and page and states.live is not None:
            self._offer(request, component, states, page, states.live)
            states.live = None
        elif states.tracked is not None:
            self._offer(request, component, states, states.tracked_page, states.tracked)
            states.tracked = None

    def _offer(
        self, request: Request, component: TreeComponent, states: StateSlots, page: int, slot: bytes
    ) -> None:
        duplicate = states.captured.pop(page, None)
        if duplicate is not None:
            component.device.give_private(duplicate)
            request.accounts[component.index].held -= 1
        states.captured[page] = slot

    def _take_state(self, request: Request, component: TreeComponent) -> bytes | None:
        """One promised state slot, or one from the headroom; None if there is neither."""
        account = request.accounts[component.index]
        if account.promised < 1:
            if account.ledger.headroom < 1:
                return None
            account.extend(1)
        if not component.device.free:
            self._make_room(component, 1)
        return account.take(1)

    def _make_room(self, component: TreeComponent, n: int) -> None:
        if not self.evictor.free_device(component, n):
            raise TransferError(
                f"component {component.name!r}: free({component.device.free}) < needed({n}) after "
                f"waiting {self.evictor.timeout_s} s for copies of evicted data; check the "
                "transfer engine"
            )

    def _copy(self, component: TreeComponent, source: bytes, target: bytes) -> None:
        self.mounted[component.index].component.device.copy_slots(source, target)

    # -- everything

    def take_out(self, request: Request, end: int, going: Going | None = None) -> list[Holding]:
        """What the request offers to the tree up to boundary `end`; the rest stays private.

        Args:
            request: whose pages and states.
            end: a boundary in pages.
            going: what it needs to go on with its own pages; None if it shares all of them.
        """
        holdings: list[Holding] = []
        for component in self.tree.components:
            account = request.accounts[component.index]
            states = request.states[component.index]
            if states is not None:
                offered = states.captured
                states.captured = {}
                # Where a bounded base's page is still the request's own, its state follows it (T4).
                base = () if self.tree.everything else request.runs[0]
                if offered and (base or max(offered) > end):
                    states.captured = {
                        page: slot
                        for page, slot in offered.items()
                        if page > end or any(run.first < page <= run.end for run in base)
                    }
                    offered = {p: s for p, s in offered.items() if p not in states.captured}
                states.shared = max(states.shared, *offered) if offered else states.shared
                account.release(len(offered))
                holdings.append(Holding([], offered, request.left))
                continue
            runs = request.runs[component.index]
            if len(runs) == 1 and runs[0].end == end and going is None:
                below, request.runs[component.index] = runs, []
            else:
                private = [Span(end, NO_PAGE)]
                if going is not None and component.is_prefix_closed:
                    private = [Span(0, going.shared), *private]
                elif going is not None:
                    private = sorted([*component.reach_pages.spans(going.position), *private])
                request.runs[component.index], below = _divided(runs, private)
            if below and not component.is_prefix_closed:
                below = self._classed(request, component, below)
            n_slots = sum([len(run.device) for run in below]) // SLOT_BYTES
            account.release(n_slots)
            host_account = request.host_accounts[component.index]
            if host_account is not None:
                host_account.release(n_slots)
            renews = going is not None and not component.is_prefix_closed
            holdings.append(Holding(below, {}, renews=renews))
        return holdings

    def _classed(self, request: Request, component: TreeComponent, runs: list[Run]) -> list[Run]:
        """Pages that leave the request: for resume points, or left behind (I9, I10).

        Where there are states too, only pages before one are of use; the others are given back.
        """
        first, end = runs[0].first, runs[-1].end
        window = component.window_pages
        if window is not None and end - window <= first and end in request.points:
            return runs
        worth = _needed_between(component, request.points, first, end)
        if len(worth) == 1 and worth[0].start <= first and worth[0].end >= end:
            return runs
        if not self.state_components:
            return _marked(runs, worth)
        kept, behind = _divided(runs, worth)
        behind, useless = _divided(behind, _needed_between(component, request.left, first, end))
        if useless:
            self._free(request, component, useless)
        left = [run._replace(is_left=True) for run in behind]
        return sorted([*kept, *left], key=_first_page)

    def give_back_all(self, request: Request) -> None:
        """Free every slot the request owns (H8)."""
        for component, runs, states in zip(self.tree.components, request.runs, request.states):
            for run in runs:
                component.device.give_private(run.device)
                if run.host is not None and component.host is not None:
                    component.host.give_private(run.host)
            if states is not None:
                for slots in states.owned():
                    component.device.give_private(slots)
        request.runs, request.states = [], []

    def owners(self, request: Request) -> list[SlotOwner]:
        """Every slot the request owns, for integrity checks."""
        found: list[SlotOwner] = []
        who = f"the request of {request.prompt} tokens"
        for component, runs, states in zip(self.tree.components, request.runs, request.states):
            for run in runs:
                found.append((component.name, Tier.DEVICE, who, run.device))
                if run.host is not None:
                    found.append((component.name, Tier.HOST, who, run.host))
            if states is not None:
                found += [(component.name, Tier.DEVICE, who, slots) for slots in states.owned()]
        return found


def _no_headroom(component: TreeComponent) -> str:
    """Why a state that was not promised a slot is not kept."""
    capacity = component.device.capacity
    return f"component {component.name!r}: all {capacity} states are in use or promised"


def _first_page(run: Run) -> int:
    return run.first


def _divided(runs: list[Run], spans: Sequence[Span]) -> tuple[list[Run], list[Run]]:
    """Pages inside and outside `spans`, which are in order and may overlap at their ends."""
    inside: list[Run] = []
    outside: list[Run] = []
    for run in runs:
        position = run.first
        for span in spans:
            start, end = max(position, span.start), min(run.end, span.end)
            if start >= end:
                continue
            if start > position:
                outside.append(run.cut(position, start))
            if (start, end) == (run.first, run.end):
                inside.append(run)
            else:
                _append(inside, run.cut(start, end))
            position = end
        if position == run.first:
            outside.append(run)
        elif position < run.end:
            outside.append(run.cut(position, run.end))
    return inside, outside


def _marked(runs: list[Run], worth: Sequence[Span]) -> list[Run]:
    """The same pages; what is not `worth` keeping, in order and disjoint, is left behind."""
    marked: list[Run] = []
    for run in runs:
        position = run.first
        for start, end in worth:
            if end <= position:
                continue
            if start >= run.end:
                break
            if start > position:
                marked.append(run.cut(position, start)._replace(is_left=True))
                position = start
            stop = end if end < run.end else run.end
            marked.append(run.cut(position, stop))
            position = stop
        if position < run.end:
            rest = run if position == run.first else run.cut(position, run.end)
            marked.append(rest._replace(is_left=True))
    return marked


def _needed_between(
    component: TreeComponent, boundaries: Collection[int], first: int, end: int
) -> list[Span]:
    """Pages between `first` and `end` that a component needs at any of `boundaries`.

    In order and disjoint.
    """
    merged: list[Span] = []
    named = [
        span
        for boundary in boundaries
        if boundary > first
        for span in component.reach_pages.spans(boundary)
        if span.start < end and span.end > first
    ]
    for span in sorted(named) if len(named) > 1 else named:
        if merged and span.start <= merged[-1].end:
            last = merged[-1]
            merged[-1] = Span(last.start, max(last.end, span.end))
        else:
            merged.append(span)
    return merged


def _append(runs: list[Run], run: Run) -> None:
    """Add a run behind those held already, joining it to the last if they are adjacent."""
    if runs and runs[-1].end == run.first:
        last = runs[-1]
        host = None if run.host is None or last.host is None else last.host + run.host
        runs[-1] = Run(last.first, run.end, last.device + run.device, host)
    else:
        runs.append(run)
