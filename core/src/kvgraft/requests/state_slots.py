"""The states a running request owns: the live one, captured ones, and the decode's last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvgraft.compiled import mypyc_attr
from kvgraft.errors import ConfigError
from kvgraft.packages.dispatch import Mounted
from kvgraft.packages.hook_results import shown
from kvgraft.refusals import of_type
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.parts import DECODED, POINT, Due, StatePart
from kvgraft.requests.request import Request
from kvgraft.requests.resume_points import GRID, ResumePoints
from kvgraft.tree import eviction
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.tree import Tree

if TYPE_CHECKING:
    import torch

__all__ = ["InnerStates", "StateSlots"]

InnerStates = Mapping[str, Mapping[int, Sequence["torch.Tensor"]]]
"""Per state component, by boundary in tokens, the planes of its state there."""


@mypyc_attr(allow_interpreted_subclasses=True)
class StateSlots:
    """Moves slots of states between pools and running requests, and copies their data.

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

    def set_up_states(self, request: Request) -> None:
        """Give the request live states, copied from its anchor (M8); keep due states first."""
        if request.state_parts[0].due:
            self.settle_due(request)
        for part in request.state_parts:
            if part.live is not None:
                if part.due:
                    self.keep_due(request, part)
                continue
            part.live = self._take_state(request, part)
            assert part.live is not None
            anchor = request.receipt.anchor
            if anchor.parent is not None:
                source = anchor.cells[part.component.index].device
                assert source is not None
                self.copy(part.component, source, part.live)
                self.copies_on_write += 1

    def note_boundary(self, request: Request, page: int) -> None:
        """The live states stand at boundary `page`: due to be kept before the model goes on.

        The copy waits until then, because a request that ends here donates the state itself (I7).
        Page 0 stands for no boundary: a state that was due and not kept has been overwritten.
        """
        due_as = DECODED
        parts = request.state_parts
        for part in parts:
            if part.due and part.due_as is POINT:
                # It was promised and never kept, and the model has written over it (I11).
                self.points.skip(request, part.due, "the engine computed past it")
                part.account.forgo(1)
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
        elif request.total <= request.prompt or page % self.points.decode_pages:
            page = 0
        for part in parts:
            part.due, part.due_as = page, due_as

    def check_inner(self, request: Request, end: int, states: object) -> None:
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
                    f"computed: states of component {name!r} are {of_type(by_position)}; "
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
        or a pool has no slot to spare, it is skipped.
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
                slot = self._take_state(request, part)
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
        """Why there is no state of every component to take, promised or of the headroom."""
        for part in request.state_parts:
            mine = part.account.promised if promised else 0
            if mine < 1 and part.account.ledger.headroom < 1:
                return _no_headroom(part.component)
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
            component, ledger = part.component, part.account.ledger
            spare = ledger.headroom > 0
            if due_as is Due.LEFT:
                spare = spare and (
                    ledger.room > 0
                    or eviction.has_left_behind(self.tree, component, request.root.tenant)
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
        """
        if not part.due or part.live is None:
            return
        page, component = part.due, part.component
        if part.due_as is DECODED:
            if part.tracked is None:
                part.tracked = self._take_state(request, part)
            if part.tracked is not None:
                self.copy(component, part.live, part.tracked)
                part.tracked_page = page
        else:
            slot = self._take_state(request, part)
            if slot is None:
                self.points.skip(request, page, _no_headroom(component))
            else:
                self.copy(component, part.live, slot)
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
            part.account.ledger.give_private(duplicate)
            part.account.held -= 1
        part.captured[page] = slot

    def _take_state(self, request: Request, part: StatePart) -> bytes | None:
        """One promised state slot, or one from the headroom; None if there is neither."""
        account = part.account
        if account.promised < 1 and account.ledger.headroom < 1:
            return None
        if account.ledger.room < 1:
            self.evictor.make_room(part.component, 1, request.root.tenant, account.promised)
        return account.take(1)

    def copy(self, component: TreeComponent, source: bytes, target: bytes) -> None:
        """Copy states, one or several at once."""
        self.mounted[component.index].component.device.copy_slots(source, target)


def _no_headroom(component: TreeComponent) -> str:
    """Why a state that was not promised a slot is not kept."""
    capacity = component.device.capacity
    return f"component {component.name!r}: all {capacity} states are in use or promised"
