"""The slots a running request owns: taken from promises, given back or offered to the tree."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.dispatch import Mounted
from kvgraft.errors import TransferError
from kvgraft.request import Request, StateSlots
from kvgraft.room import Room
from kvgraft.slots import SLOT_BYTES
from kvgraft.tree.inserting import Holding, Run
from kvgraft.tree.integrity import SlotOwner
from kvgraft.tree.track import Track
from kvgraft.tree.tree import Tree
from kvgraft.types import Span, Tier

__all__ = ["PrivateSlots"]


class PrivateSlots:
    """Moves slots between pools, running requests and the tree's insert.

    Attributes:
        copies_on_write: states copied from the tree for a request that writes to them (M8).
    """

    def __init__(self, tree: Tree, mounted: Sequence[Mounted], room: Room) -> None:
        self.tree = tree
        self.room = room
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

    def give_back_behind(self, request: Request, page: int) -> None:
        """Free private pages that bounded reaches at boundary `page` no longer cover (L6, I3)."""
        for track in self.bounded_tracks:
            runs = request.runs[track.index]
            if not runs:
                continue
            spans = track.reach_pages.spans(page)
            trailing = len(spans) == 1 and spans[0].end >= page
            if trailing and len(runs) == 1 and runs[0].first >= spans[0].start:
                continue
            kept: list[Run] = []
            freed: list[Run] = []
            for run in runs:
                position = run.first
                for span in (*spans, Span(page, run.end)):
                    start, end = max(position, span.start), min(run.end, span.end)
                    if start >= end:
                        continue
                    if start > position:
                        freed.append(run.cut(position, start))
                    _append(kept, run.cut(start, end))
                    position = end
                if position < run.end:
                    freed.append(run.cut(position, run.end))
            if freed:
                request.runs[track.index] = kept
                self._free(request, track, freed)

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
        wanted = page in request.checkpoints
        if wanted:
            request.checkpoints.remove(page)
        elif request.computed < request.prompt or request.total <= request.prompt:
            page = 0
        for track in self.state_tracks:
            states = request.states[track.index]
            assert states is not None
            states.due, states.due_is_checkpoint = page, wanted

    def keep_due(self, request: Request, track: Track, states: StateSlots) -> None:
        """Copy the live state if it is due, as a checkpoint or as the decode's last boundary.

        Without a slot the checkpoint is skipped; nothing fails for want of one.

        Raises:
            TransferError: copies of evicted data did not end in time; the state is due still.
        """
        if not states.due or states.live is None:
            return
        page = states.due
        if states.due_is_checkpoint:
            slot = self._take_state(request, track)
            if slot is not None:
                self._copy(track, states.live, slot)
                states.captured[page] = slot
        else:
            if states.tracked is None:
                states.tracked = self._take_state(request, track)
            if states.tracked is not None:
                self._copy(track, states.live, states.tracked)
                states.tracked_page = page
        # Last: where room is still being made, the engine calls again and the state is due still.
        states.due = 0

    def offered_page(self, request: Request, track: Track) -> int:
        """The deepest boundary at which an ending request has a state to donate; 0 if none."""
        states = request.states[track.index]
        assert states is not None
        page, rest = divmod(request.computed, self.tree.page_size)
        if not rest and states.live is not None:
            return page
        tracked = states.tracked_page if states.tracked is not None else 0
        return max(tracked, *states.captured, 0)

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

    def take_out(self, request: Request, page: int) -> list[Holding]:
        """What the request offers to the tree up to boundary `page`; the rest stays private."""
        holdings: list[Holding] = []
        for track in self.tree.tracks:
            account = request.accounts[track.index]
            states = request.states[track.index]
            if states is not None:
                offered = states.captured
                states.captured = {}
                if offered and max(offered) > page:
                    states.captured = {p: s for p, s in offered.items() if p > page}
                    offered = {p: s for p, s in offered.items() if p <= page}
                account.part(len(offered))
                holdings.append(Holding([], offered))
                continue
            runs = request.runs[track.index]
            if len(runs) == 1 and runs[0].end == page:
                below, request.runs[track.index] = runs, []
            else:
                below = [run.cut(run.first, min(run.end, page)) for run in runs if run.first < page]
                request.runs[track.index] = [
                    run.cut(max(run.first, page), run.end) for run in runs if run.end > page
                ]
            n_slots = sum([len(run.device) for run in below]) // SLOT_BYTES
            account.part(n_slots)
            host_account = request.host_accounts[track.index]
            if host_account is not None:
                host_account.part(n_slots)
            holdings.append(Holding(below, {}))
        return holdings

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


def _append(runs: list[Run], run: Run) -> None:
    """Add a run behind those held already, joining it to the last if they are adjacent."""
    if runs and runs[-1].end == run.first:
        last = runs[-1]
        host = None if run.host is None or last.host is None else last.host + run.host
        runs[-1] = Run(last.first, run.end, last.device + run.device, host)
    else:
        runs.append(run)
