"""The slots a running request owns: taken from promises, given back or offered to the tree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvgraft.answers import shown
from kvgraft.dispatch import Mounted
from kvgraft.errors import ConfigError, TransferError
from kvgraft.points import ResumePoints
from kvgraft.request import Due, Request, StateSlots
from kvgraft.room import Room
from kvgraft.slots import SLOT_BYTES
from kvgraft.tree import eviction
from kvgraft.tree.inserting import Holding, Run
from kvgraft.tree.integrity import SlotOwner
from kvgraft.tree.track import Track
from kvgraft.tree.tree import Tree
from kvgraft.types import PointKind, Span, Tier

if TYPE_CHECKING:
    import torch

__all__ = ["Going", "InnerStates", "PrivateSlots"]

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


class PrivateSlots:
    """Moves slots between pools, running requests and the tree's insert.

    Attributes:
        copies_on_write: states copied from the tree for a request that writes to them (M8).
    """

    def __init__(
        self, tree: Tree, mounted: Sequence[Mounted], room: Room, points: ResumePoints
    ) -> None:
        self.tree = tree
        self.room = room
        self.points = points
        self.mounted = mounted
        self.copies_on_write = 0
        self.state_tracks = tuple(track for track in tree.tracks if track.is_state)
        self.paged_tracks = tuple(track for track in tree.tracks if not track.is_state)
        self.bounded_tracks = tuple(t for t in self.paged_tracks if not t.is_everything)

    # -- pages

    def allocate_pages(self, request: Request, pages: int) -> bool:
        """Slots for the next `pages` pages, of every paged component or of none.

        Raises:
            TransferError: copies of evicted data did not end in time, so the room is not there.
        """
        first, end = request.allocated, request.allocated + pages
        needs = [
            (track, track.stored_between(first, end) * track.slots_per_page)
            for track in self.paged_tracks
        ]
        for track, n in needs:
            for account in (
                request.accounts[track.index],
                request.host_accounts[track.index],
            ):
                short = 0 if account is None else n - account.promised
                if account is not None and short > 0 and short > account.ledger.headroom:
                    return False
        for track, n in needs:
            if n > track.device.free:
                self._make_room(track, n)
            if request.host_accounts[track.index] is not None:
                self.room.on_host(track, n)
        for track, n in needs:
            if not n:
                continue
            account = request.accounts[track.index]
            if n > account.promised:
                account.extend(n - account.promised)
            slots = account.take(n)
            mirror = None
            host_account = request.host_accounts[track.index]
            if host_account is not None:
                if n > host_account.promised:
                    host_account.extend(n - host_account.promised)
                mirror = host_account.take(n)
            stop = first + n // track.slots_per_page
            _append(request.runs[track.index], Run(first, stop, slots, mirror))
        request.allocated = end
        return True

    def left_behind(self, request: Request, page: int) -> int:
        """The end, in pages, of what bounded reaches at boundary `page` no longer cover; else 0."""
        end = 0
        for track in self.bounded_tracks:
            runs = request.runs[track.index]
            if not runs:
                continue
            if track.window_pages is not None:
                start = page - track.window_pages
                if runs[0].first < start:
                    end = max(end, start)
                continue
            _, behind = self._behind(request, track, page)
            if behind:
                end = max(end, behind[-1].end)
        return end

    def pages_behind(self, request: Request, page: int) -> int:
        """Pages of the component that holds most of what `left_behind` names."""
        most = 0
        for track in self.bounded_tracks:
            _, behind = self._behind(request, track, page)
            most = max(most, sum(run.end - run.first for run in behind))
        return most

    def has_promise_left(self, request: Request, pages: int) -> bool:
        """Whether the next `pages` pages of every bounded component are promised."""
        return all(
            request.accounts[track.index].promised >= pages * track.slots_per_page
            for track in self.bounded_tracks
        )

    def is_worth_keeping(self, request: Request, page: int) -> bool:
        """Whether a resume point needs any of what `left_behind` names."""
        for track in self.bounded_tracks:
            _, behind = self._behind(request, track, page)
            for run in behind:
                if _needed_between(track, (*request.points, *request.left), run.first, run.end):
                    return True
        return False

    def _behind(self, request: Request, track: Track, page: int) -> tuple[list[Run], list[Run]]:
        """A request's pages that the reach at boundary `page` covers, and those it left."""
        spans = (*track.reach_pages.spans(page), Span(page, NO_PAGE))
        return _divided(request.runs[track.index], spans)

    def give_back_behind(self, request: Request, page: int) -> None:
        """Free private pages that bounded reaches at boundary `page` no longer cover (L6, I3)."""
        for track in self.bounded_tracks:
            kept, behind = self._behind(request, track, page)
            if behind:
                request.runs[track.index] = kept
                self._free(request, track, behind)

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

    def _free(self, request: Request, track: Track, runs: list[Run]) -> None:
        """Give pages back to their pools, and what they cost to the request's promises."""
        slots = b"".join([run.device for run in runs])
        track.device.give_private(slots)
        request.accounts[track.index].part(len(slots) // SLOT_BYTES)
        host_account = request.host_accounts[track.index]
        if host_account is not None:
            mirror = b"".join([run.host for run in runs if run.host is not None])
            host_account.ledger.give_private(mirror)
            host_account.part(len(mirror) // SLOT_BYTES)

    # -- states

    def set_up_states(self, request: Request) -> None:
        """Give the request live states, copied from its anchor (M8); keep what is due first."""
        self.settle_due(request)
        for track in self.state_tracks:
            states = request.states[track.index]
            assert states is not None
            if states.live is not None:
                self.keep_due(request, track, states)
                continue
            states.live = self._take_state(request, track)
            assert states.live is not None
            anchor = request.receipt.anchor
            if anchor.parent is not None:
                source = anchor.cells[track.index].device
                assert source is not None
                self._copy(track, source, states.live)
                self.copies_on_write += 1

    def note_boundary(self, request: Request, page: int) -> None:
        """The live states stand at boundary `page`: due to be kept before the model goes on.

        The copy waits until then, because a request that ends here donates the state itself (I7).
        Page 0 stands for no boundary: whatever was due and not kept has been overwritten.
        """
        due_as = Due.DECODED
        ahead = request.checkpoints
        while ahead and ahead[0] != page and ahead[0] * self.tree.page_size <= request.computed:
            self.points.skip(request, ahead.pop(0))  # the engine computed past it
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
        for track in self.state_tracks:
            states = request.states[track.index]
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
            track.name: self.mounted[track.index].component.device for track in self.state_tracks
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
            handed = [states.get(track.name, {}).get(page * size) for track in self.state_tracks]
            promised = page in request.checkpoints
            if promised:
                request.checkpoints.remove(page)
            else:
                request.points.setdefault(page, PointKind.GRID)
            if None in handed or not self._has_room_for_states(request, promised=promised):
                self.points.skip(request, page)
                continue
            for track, planes in zip(self.state_tracks, handed):
                if not promised:
                    request.accounts[track.index].add(1)
                slot = self._take_state(request, track)
                own = request.states[track.index]
                assert slot is not None
                assert own is not None
                assert planes is not None
                own.captured[page] = slot
                self.mounted[track.index].component.device.write_slot(slot, planes)
            request.last_point = page

    def _has_room_for_states(self, request: Request, *, promised: bool) -> bool:
        """Make room for a state of every component, out of the promise or of the headroom.

        Where copies of evicted states do not end in time there is none.
        """
        for track in self.state_tracks:
            mine = request.accounts[track.index].promised if promised else 0
            if mine < 1 and track.device.headroom < 1:
                return False
        return all(self.room.on_device(track, 1) for track in self.state_tracks)

    def settle_due(self, request: Request) -> None:
        """Decide on a state that was not promised: all components keep it, or none does (I10)."""
        if not self.state_tracks:
            return
        first = request.states[self.state_tracks[0].index]
        assert first is not None
        page, due_as = first.due, first.due_as
        if not page or first.live is None or due_as in (Due.POINT, Due.DECODED):
            return
        for track in self.state_tracks:
            ledger = track.device
            spare = ledger.headroom > 0
            if due_as is Due.LEFT:
                spare = spare and (ledger.free > 0 or eviction.has_left_behind(self.tree, track))
            if not spare:
                if due_as is Due.GRID:
                    self.points.skipped[PointKind.GRID] += 1
                for each in self.state_tracks:
                    states = request.states[each.index]
                    assert states is not None
                    states.due = 0
                return
        for track in self.state_tracks:
            request.accounts[track.index].add(1)
        for track in self.state_tracks:
            states = request.states[track.index]
            assert states is not None
            states.due_as = Due.POINT
        if due_as is Due.GRID:
            request.points[page] = PointKind.GRID
            request.last_point = page
        else:
            request.left |= {page}
            request.last_left = page

    def keep_due(self, request: Request, track: Track, states: StateSlots) -> None:
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
                states.tracked = self._take_state(request, track)
            if states.tracked is not None:
                self._copy(track, states.live, states.tracked)
                states.tracked_page = page
        else:
            slot = self._take_state(request, track)
            if slot is None:
                self.points.skip(request, page)
            else:
                self._copy(track, states.live, slot)
                states.captured[page] = slot
        # Last: where room is still being made, the engine calls again and the state is due still.
        states.due = 0

    def captured_pages(self, request: Request) -> list[int]:
        """Boundaries of the states that it captured and the tree does not have yet."""
        pages: list[int] = []
        for track in self.state_tracks:
            states = request.states[track.index]
            if states is not None and states.captured:
                pages += states.captured
        return pages

    def offered_page(self, request: Request, track: Track) -> int:
        """The deepest boundary at which an ending request has a state to donate; 0 if none."""
        states = request.states[track.index]
        assert states is not None
        page, rest = divmod(request.computed, self.tree.page_size)
        if not rest and states.live is not None:
            return page
        tracked = states.tracked_page if states.tracked is not None else 0
        return max([tracked, states.shared, *states.captured])

    def offer_states(self, request: Request, track: Track) -> None:
        """Put what an ending request can donate among its captured states (I7)."""
        states = request.states[track.index]
        assert states is not None
        page, rest = divmod(request.computed, self.tree.page_size)
        if not rest and page and states.live is not None:
            self._offer(request, track, states, page, states.live)
            states.live = None
        elif states.tracked is not None:
            self._offer(request, track, states, states.tracked_page, states.tracked)
            states.tracked = None

    def _offer(
        self, request: Request, track: Track, states: StateSlots, page: int, slot: bytes
    ) -> None:
        duplicate = states.captured.pop(page, None)
        if duplicate is not None:
            track.device.give_private(duplicate)
            request.accounts[track.index].held -= 1
        states.captured[page] = slot

    def _take_state(self, request: Request, track: Track) -> bytes | None:
        """One promised state slot, or one from the headroom; None if there is neither."""
        account = request.accounts[track.index]
        if account.promised < 1:
            if account.ledger.headroom < 1:
                return None
            account.extend(1)
        if not track.device.free:
            self._make_room(track, 1)
        return account.take(1)

    def _make_room(self, track: Track, n: int) -> None:
        if not self.room.on_device(track, n):
            raise TransferError(
                f"component {track.name!r}: free({track.device.free}) < needed({n}) after waiting "
                f"{self.room.timeout_s} s for copies of evicted data; check the transfer engine"
            )

    def _copy(self, track: Track, source: bytes, target: bytes) -> None:
        self.mounted[track.index].component.device.copy_slots(source, target)

    # -- everything

    def take_out(self, request: Request, end: int, going: Going | None = None) -> list[Holding]:
        """What the request offers to the tree up to boundary `end`; the rest stays private.

        Args:
            request: whose pages and states.
            end: a boundary in pages.
            going: what it needs to go on with its own pages; None if it shares all of them.
        """
        holdings: list[Holding] = []
        for track in self.tree.tracks:
            account = request.accounts[track.index]
            states = request.states[track.index]
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
                account.part(len(offered))
                holdings.append(Holding([], offered, request.left))
                continue
            runs = request.runs[track.index]
            if len(runs) == 1 and runs[0].end == end and going is None:
                below, request.runs[track.index] = runs, []
            else:
                private = [Span(end, NO_PAGE)]
                if going is not None and track.is_everything:
                    private = [Span(0, going.shared), *private]
                elif going is not None:
                    private = sorted([*track.reach_pages.spans(going.position), *private])
                request.runs[track.index], below = _divided(runs, private)
            if below and not track.is_everything:
                below = self._classed(request, track, below)
            n_slots = sum([len(run.device) for run in below]) // SLOT_BYTES
            account.part(n_slots)
            host_account = request.host_accounts[track.index]
            if host_account is not None:
                host_account.part(n_slots)
            renews = going is not None and not track.is_everything
            holdings.append(Holding(below, {}, renews=renews))
        return holdings

    def _classed(self, request: Request, track: Track, runs: list[Run]) -> list[Run]:
        """Pages that leave the request: for resume points, or left behind (I9, I10).

        Where there are states too, only pages before one are of use; the others are given back.
        """
        first, end = runs[0].first, runs[-1].end
        window = track.window_pages
        if window is not None and end - window <= first and end in request.points:
            return runs
        worth = _needed_between(track, request.points, first, end)
        if len(worth) == 1 and worth[0].start <= first and worth[0].end >= end:
            return runs
        if not self.state_tracks:
            return _marked(runs, worth)
        kept, behind = _divided(runs, worth)
        behind, useless = _divided(behind, _needed_between(track, request.left, first, end))
        if useless:
            self._free(request, track, useless)
        left = [run._replace(is_left=True) for run in behind]
        return sorted([*kept, *left], key=_first_page)

    def give_back_all(self, request: Request) -> None:
        """Free every slot the request owns (H8)."""
        for track, runs, states in zip(self.tree.tracks, request.runs, request.states):
            for run in runs:
                track.device.give_private(run.device)
                if run.host is not None and track.host is not None:
                    track.host.give_private(run.host)
            if states is not None:
                for slots in states.owned():
                    track.device.give_private(slots)
        request.runs, request.states = [], []

    def owners(self, request: Request) -> list[SlotOwner]:
        """Every slot the request owns, for integrity checks."""
        found: list[SlotOwner] = []
        who = f"the request of {request.prompt} tokens"
        for track, runs, states in zip(self.tree.tracks, request.runs, request.states):
            for run in runs:
                found.append((track.name, Tier.DEVICE, who, run.device))
                if run.host is not None:
                    found.append((track.name, Tier.HOST, who, run.host))
            if states is not None:
                found += [(track.name, Tier.DEVICE, who, slots) for slots in states.owned()]
        return found


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


def _needed_between(track: Track, boundaries: Collection[int], first: int, end: int) -> list[Span]:
    """Pages between `first` and `end` that a component needs at any of `boundaries`.

    In order and disjoint.
    """
    merged: list[Span] = []
    named = [
        span
        for boundary in boundaries
        if boundary > first
        for span in track.reach_pages.spans(boundary)
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
