"""The slots a running request owns: taken from promises, given back or offered to the tree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvgraft.errors import ConfigError, TransferError
from kvgraft.packages.dispatch import Mounted
from kvgraft.packages.hook_results import shown
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.parts import DECODED, POINT, Due, Part, StatePart
from kvgraft.requests.request import Request
from kvgraft.requests.resume_points import GRID, ResumePoints
from kvgraft.tree import eviction
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.inserting import NO_STATES, Holding, Run
from kvgraft.tree.integrity import SlotOwner
from kvgraft.tree.tree import Tree
from kvgraft.types import Span, Tier

if TYPE_CHECKING:
    import torch

__all__ = ["Going", "InnerStates", "RequestSlots"]

InnerStates = Mapping[str, Mapping[int, Sequence["torch.Tensor"]]]
"""Per state component, by boundary in tokens, the planes of its state there."""

NO_PAGE = 1 << 40
"""Behind the last page of every sequence."""


class Going(NamedTuple):
    """Pages that a running request keeps private while it publishes others.

    Attributes:
        position: where it goes on; pages that bounded reaches cover there stay private.
        shared: prefix-closed pages stay private up to here: others' data is in the tree there.
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

    # -- pages

    def allocate_pages(self, request: Request, pages: int) -> bool:
        """Slots for the next `pages` pages, of every paged component or of none.

        Raises:
            TransferError: copies of evicted data did not end in time, so the room is not there.
        """
        first, end = request.allocated, request.allocated + pages
        needs: list[tuple[Part, int]] = []
        for part in request.parts:
            component = part.component
            if component.is_state:
                continue
            n = component.stored_between(first, end) * component.slots_per_page
            if not part.headroom_covers(n):
                return False
            if n:
                needs.append((part, n))
        for part, n in needs:
            if n > part.component.device.free:
                self._make_room(part.component, n)
            if part.host_account is not None:
                self.evictor.free_host(part.component, n)
        for part, n in needs:
            part.take_pages(first, n)
        request.allocated = end
        return True

    def left_behind(self, request: Request, page: int) -> int:
        """The end of the pages that bounded reaches at boundary `page` no longer cover; else 0."""
        end = 0
        for part in request.bounded_parts:
            component, runs = part.component, part.runs
            if not runs:
                continue
            if component.window_pages is not None:
                start = page - component.window_pages
                if runs[0].first < start:
                    end = max(end, start)
                continue
            _, behind = self._behind(part, page)
            if behind:
                end = max(end, behind[-1].end)
        return end

    def pages_behind(self, request: Request, page: int) -> int:
        """Pages of the component that holds most of the pages that `left_behind` names."""
        most = 0
        for part in request.bounded_parts:
            _, behind = self._behind(part, page)
            most = max(most, sum(run.end - run.first for run in behind))
        return most

    def has_promise_left(self, parts: Sequence[Part], pages: int) -> bool:
        """Whether the next `pages` pages of every paged part are promised."""
        for part in parts:
            component = part.component
            if part.account.promised < pages * component.slots_per_page and not component.is_state:
                return False
        return True

    def could_allocate(self, request: Request, pages: int, page: int) -> bool:
        """Whether the next `pages` pages fit once those behind boundary `page` are left behind."""
        first, end = request.allocated, request.allocated + pages
        for part in request.parts:
            component = part.component
            if component.is_state:
                continue
            n = component.stored_between(first, end)
            if not component.is_prefix_closed:
                n -= sum(run.end - run.first for run in self._behind(part, page)[1])
            if n > 0 and not part.headroom_covers(n * component.slots_per_page):
                return False
        return True

    def is_worth_keeping(self, request: Request, page: int) -> bool:
        """Whether a resume point needs any page that `left_behind` names."""
        for part in request.bounded_parts:
            _, behind = self._behind(part, page)
            for run in behind:
                if _needed_between(
                    part.component, (*request.points, *request.left), run.first, run.end
                ):
                    return True
        return False

    def _behind(self, part: Part, page: int) -> tuple[list[Run], list[Run]]:
        """A request's pages that the reach at boundary `page` covers, and those it left."""
        spans = (*part.component.reach_pages.spans(page), Span(page, NO_PAGE))
        return _divided(part.runs, spans)

    def give_back_behind(self, request: Request, page: int) -> None:
        """Free private pages that bounded reaches at boundary `page` no longer cover (L6, I3)."""
        for part in request.bounded_parts:
            kept, behind = self._behind(part, page)
            if behind:
                part.runs = kept
                part.free_pages(behind)

    # -- states

    def set_up_states(self, request: Request) -> None:
        """Give the request live states, copied from its anchor (M8); keep due states first."""
        if request.state_parts[0].due:
            self.settle_due(request)
        for part in request.state_parts:
            if part.live is not None:
                if part.due:
                    self.keep_due(request, part)
                continue
            part.live = self._take_state(part)
            assert part.live is not None
            anchor = request.receipt.anchor
            if anchor.parent is not None:
                source = anchor.cells[part.component.index].device
                assert source is not None
                self._copy(part.component, source, part.live)
                self.copies_on_write += 1

    def note_boundary(self, request: Request, page: int) -> None:
        """The live states stand at boundary `page`: due to be kept before the model goes on.

        The copy waits until then, because a request that ends here donates the state itself (I7).
        Page 0 stands for no boundary: a state that was due and not kept has been overwritten.
        """
        due_as = DECODED
        ahead = request.checkpoints
        while ahead and ahead[0] != page and ahead[0] * self.tree.page_size <= request.computed:
            self._skip_promised(request, ahead.pop(0), "the engine computed past it")
        if ahead and ahead[0] == page:
            request.last_point = ahead.pop(0)
            due_as = POINT
        elif page and request.computed < request.prompt:
            if self.points.on_grid(request, page):
                due_as = Due.GRID
            elif self.points.leaves_state(request, page):
                due_as = Due.LEFT
            else:
                page = 0
        elif request.total <= request.prompt:
            page = 0
        for part in request.state_parts:
            part.due, part.due_as = page, due_as

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
                states.get(part.component.name, {}).get(page * size) for part in request.state_parts
            ]
            promised = page in request.checkpoints
            if promised:
                request.checkpoints.remove(page)
            else:
                request.points.setdefault(page, GRID)
            reason = "the engine handed over no state"
            if None not in handed:
                reason = self._no_room_for_states(request, promised=promised)
            if reason:
                skip = self._skip_promised if promised else self.points.skip
                skip(request, page, reason)
                continue
            for part, planes in zip(request.state_parts, handed):
                if not promised:
                    part.account.add(1)
                slot = self._take_state(part)
                assert slot is not None
                assert planes is not None
                part.captured[page] = slot
                device = self.mounted[part.component.index].component.device
                device.write_slot(slot, planes)
            request.last_point = page

    def _skip_promised(self, request: Request, page: int, reason: str) -> None:
        """A point ahead is none after all; the slots that were promised for it are not (I12)."""
        self.points.skip(request, page, reason)
        for part in request.state_parts:
            part.account.forgo(1)

    def _no_room_for_states(self, request: Request, *, promised: bool) -> str:
        """Make room for a state of every component, promised or of the headroom; else why not."""
        for part in request.state_parts:
            mine = part.account.promised if promised else 0
            if mine < 1 and part.component.device.headroom < 1:
                return _no_headroom(part.component)
        for component in self.state_components:
            if not self.evictor.free_device(component, 1):
                return (
                    f"component {component.name!r} waited {self.evictor.timeout_s} s in vain for "
                    "copies of evicted states"
                )
        return ""

    def settle_due(self, request: Request) -> None:
        """Decide on a state that was not promised: all components keep it, or none does (I10)."""
        if not request.state_parts:
            return
        first = request.state_parts[0]
        page, due_as = first.due, first.due_as
        if not page or first.live is None or due_as in (POINT, DECODED):
            return
        for part in request.state_parts:
            component, ledger = part.component, part.component.device
            spare = ledger.headroom > 0
            if due_as is Due.LEFT:
                spare = spare and (
                    ledger.free > 0 or eviction.has_left_behind(self.tree, component)
                )
            if not spare:
                if due_as is Due.GRID:
                    request.points.setdefault(page, GRID)
                    self.points.skip(request, page, _no_headroom(component))
                for each in request.state_parts:
                    each.due = 0
                return
        for part in request.state_parts:
            part.account.add(1)
            part.due_as = POINT
        if due_as is Due.GRID:
            request.points[page] = GRID
            request.last_point = page
        else:
            request.left |= {page}
            request.last_left = page

    def keep_due(self, request: Request, part: StatePart) -> None:
        """Copy the live state if it is due, as a captured one or as the decode's last boundary.

        Without a slot the point is skipped (I11); nothing fails for want of one.

        Raises:
            TransferError: copies of evicted data did not end in time; the state is due still.
        """
        if not part.due or part.live is None:
            return
        page, component = part.due, part.component
        if part.due_as is DECODED:
            if part.tracked is None:
                part.tracked = self._take_state(part)
            if part.tracked is not None:
                self._copy(component, part.live, part.tracked)
                part.tracked_page = page
        else:
            slot = self._take_state(part)
            if slot is None:
                self.points.skip(request, page, _no_headroom(component))
            else:
                self._copy(component, part.live, slot)
                part.captured[page] = slot
        # Last: where room is still being made, the engine calls again and the state is due still.
        part.due = 0

    def keep_due_states(self, request: Request) -> int:
        """Keep the states due as captured ones; the deepest page with a state of every component.

        That is the page the request stands on where no component keeps states.
        """
        page = request.computed // self.tree.page_size
        if request.state_parts:
            self.settle_due(request)
            for part in request.state_parts:
                if part.due and part.due_as is not DECODED:
                    self.keep_due(request, part)
                page = min(page, max([part.shared, *part.captured]))
        return page

    def offered_page(self, request: Request, part: StatePart) -> int:
        """The deepest boundary at which an ending request has a state to donate; 0 if none."""
        page, rest = divmod(request.computed, self.tree.page_size)
        if not rest and part.live is not None:
            return page
        tracked = part.tracked_page if part.tracked is not None else 0
        return max([tracked, part.shared, *part.captured])

    def offer_states(self, request: Request, part: StatePart) -> None:
        """Put the states that an ending request can donate among its captured ones (I7)."""
        page, rest = divmod(request.computed, self.tree.page_size)
        if not rest and page and part.live is not None:
            self._offer(part, page, part.live)
            part.live = None
        elif part.tracked is not None:
            self._offer(part, part.tracked_page, part.tracked)
            part.tracked = None

    def _offer(self, part: StatePart, page: int, slot: bytes) -> None:
        duplicate = part.captured.pop(page, None)
        if duplicate is not None:
            part.component.device.give_private(duplicate)
            part.account.held -= 1
        part.captured[page] = slot

    def _take_state(self, part: StatePart) -> bytes | None:
        """One promised state slot, or one from the headroom; None if there is neither."""
        account = part.account
        if account.promised < 1 and account.ledger.headroom < 1:
            return None
        if not account.ledger.free:
            self._make_room(part.component, 1)
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
        """The request's offer to the tree up to boundary `end`; the rest stays private.

        Args:
            request: whose pages and states.
            end: a boundary in pages.
            going: the pages it keeps to go on; None if it shares all of them.
        """
        holdings: list[Holding] = []
        for part in request.parts:
            component = part.component
            if isinstance(part, StatePart):
                holdings.append(self._states_out(request, part, end))
                continue
            runs = part.runs
            if len(runs) == 1 and runs[0].end == end and going is None:
                below, part.runs = runs, []
            else:
                private = [Span(end, NO_PAGE)]
                if going is not None and component.is_prefix_closed:
                    private = [Span(0, going.shared), *private]
                elif going is not None:
                    private = sorted([*component.reach_pages.spans(going.position), *private])
                part.runs, below = _divided(runs, private)
            if below and not component.is_prefix_closed:
                below = self._classed(request, part, below)
            part.released(below)
            renews = going is not None and not component.is_prefix_closed
            holdings.append(Holding(below, NO_STATES, (), renews))
        return holdings

    def _states_out(self, request: Request, part: StatePart, end: int) -> Holding:
        """The captured states that the request offers up to boundary `end`; the rest stays."""
        offered = part.captured
        part.captured = {}
        # Where a bounded base's page is still the request's own, its state follows it (T4).
        base = () if self.tree.prefix_closed else request.parts[0].runs
        if offered and (base or max(offered) > end):
            part.captured = {
                page: slot
                for page, slot in offered.items()
                if page > end or any(run.first < page <= run.end for run in base)
            }
            offered = {p: s for p, s in offered.items() if p not in part.captured}
        if offered:
            part.shared = max([part.shared, *offered])
        part.account.release(len(offered))
        return Holding([], offered, request.left)

    def _classed(self, request: Request, part: Part, runs: list[Run]) -> list[Run]:
        """Pages that leave the request: for resume points, or left behind (I9, I10).

        Where there are states too, only pages before one are of use; the others are given back.
        """
        component = part.component
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
            part.free_pages(useless)
        left = [run._replace(is_left=True) for run in behind]
        return sorted([*kept, *left], key=_first_page)

    def give_back_all(self, parts: Sequence[Part]) -> None:
        """Free every slot of a request's parts (H8)."""
        for part in parts:
            component = part.component
            for run in part.runs:
                component.device.give_private(run.device)
                if run.host is not None and component.host is not None:
                    component.host.give_private(run.host)
            part.runs = []
            if isinstance(part, StatePart):
                for slots in part.owned():
                    component.device.give_private(slots)
                part.live = part.tracked = None
                part.captured = {}

    def owners(self, request: Request) -> list[SlotOwner]:
        """Every slot the request owns, for integrity checks."""
        found: list[SlotOwner] = []
        who = f"the request of {request.prompt} tokens"
        for part in request.parts:
            name = part.component.name
            for run in part.runs:
                found.append((name, Tier.DEVICE, who, run.device))
                if run.host is not None:
                    found.append((name, Tier.HOST, who, run.host))
            if isinstance(part, StatePart):
                found += [(name, Tier.DEVICE, who, slots) for slots in part.owned()]
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
                part = run.cut(start, end)
                if inside and inside[-1].end == start:
                    inside[-1] = inside[-1].joined(part)
                else:
                    inside.append(part)
            position = end
        if position == run.first:
            outside.append(run)
        elif position < run.end:
            outside.append(run.cut(position, run.end))
    return inside, outside


def _marked(runs: list[Run], worth: Sequence[Span]) -> list[Run]:
    """The same pages; those outside `worth` (ordered, disjoint spans) are marked left behind."""
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
