"""Admission decisions: demands against headroom, pool by pool (A1 to A13).

A request's demand is opened as promises on the ledgers. Pins, admissions and checkpoints that would
take headroom below zero are refused, so a promise can always be turned into slots: slots that are
not free are evictable. So A7 holds without looking at any component.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvgraft.admission.decision import (
    SLACK_PAGES,
    Decision,
    Outcome,
    Shortage,
    default_demand,
    pages_up,
)
from kvgraft.compiled import mypyc_attr
from kvgraft.errors import ContractViolation
from kvgraft.packages.dispatch import Mounted
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.components import RequestComponent
from kvgraft.requests.request import LeftOut, Request
from kvgraft.requests.resume_points import ResumePoints
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.operations import segment_nodes
from kvgraft.tree.tree import Tree
from kvgraft.types import Demand, DemandQuery, new_query

_ADMITTED = Decision(Outcome.ADMITTED)


class Boundaries(Protocol):
    """The boundaries between pools that share a budget, as admission sees them."""

    def could_hold(self, name: str, needs: Mapping[str, int]) -> bool:
        """Whether the DEVICE pools of `name` and others could have so many slots each, at once."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Budget:
    """Admission over the pools of one cache.

    Args:
        tree: the books of the pools.
        mounted: the components.
        private: the books of their private pools.
        points: the states a request keeps.
        boundaries: the boundaries between pools that can move; None where all stay.
    """

    def __init__(
        self,
        tree: Tree,
        mounted: Sequence[Mounted],
        private: Sequence[tuple[Ledger, ...]],
        points: ResumePoints,
        boundaries: Boundaries | None = None,
    ) -> None:
        self.tree = tree
        self.boundaries = boundaries
        self.points = points
        self.mounted = mounted
        self.private = private
        self._hooks = [each.budget_contribution for each in mounted]

    def _ask(self, request: Request, chunk: int) -> None:
        """Note the request's demand on every component."""
        step = min(chunk, request.prompt - request.computed)
        sizes = self.tree.page_size, request.computed, step, request.prompt, request.total
        query = new_query((*sizes, 0, len(request.checkpoints)))
        decodes = request.total > request.prompt
        late = self.points.late_pages + request.draft_pages if decodes else 0  # G1
        for part, hook in zip(request.components, self._hooks):
            component = part.component
            asked = query._replace(host_slots=part.host_slots) if part.host_slots else query
            if component.is_state and not request.keeps_decoded:
                asked = asked._replace(total=request.prompt)
            demand = hook(asked) if hook is not None else None
            if demand is None:
                demand = default_demand(component, asked)
            else:
                self._check_demand(component, asked, demand)
            if late and not component.is_state:
                more = late * component.slots_per_page
                rest = self._remaining(request, part) + part.host_slots - demand.now - demand.later
                demand = demand._replace(later=demand.later + max(0, min(more, rest)))
            part.demand = demand

    def _asked(self, request: Request, chunk: int) -> tuple[Shortage, ...]:
        """Note its demand with chunks of that length; the pools that are short of it."""
        self._ask(request, chunk)
        return self._shortages(request)

    def _check_demand(self, component: TreeComponent, query: DemandQuery, demand: Demand) -> None:
        """Refuse a component's own demand that is below the slots about to be taken (A1, A3)."""
        pools = len(self.mounted[component.index].component.private)
        if len(demand.private) != pools:
            raise ContractViolation(
                "A1",
                component.name,
                f"budget_contribution returned {demand!r}; it returns a Demand with one entry for "
                f"each of its {pools} private pools",
            )
        step = 1
        if not component.is_state:
            held = pages_up(query.computed, query.page_size)
            end = pages_up(query.computed + query.chunk, query.page_size)
            step = component.stored_between(held, end) * component.slots_per_page
        if min(demand.now, demand.later, *demand.private) < 0:
            raise ContractViolation(
                "A1", component.name, f"budget_contribution {demand} asks for fewer than 0 slots"
            )
        if demand.now < query.host_slots + step:
            raise ContractViolation(
                "A3" if query.host_slots else "A1",
                component.name,
                f"budget_contribution {demand} does not hold the next step({step}) + "
                f"host hits({query.host_slots})",
            )

    def _remaining(self, request: Request, part: RequestComponent) -> int:
        """Slots the request takes until its reservation ends, give-backs not counted."""
        component = part.component
        if component.is_state:
            return part.demand.now + part.demand.later - part.host_slots
        end = pages_up(request.total, self.tree.page_size) + SLACK_PAGES + request.draft_pages
        return component.stored_between(request.allocated, end) * component.slots_per_page

    def decide(self, request: Request) -> Decision:
        """Whether every pool can promise the request's demand; changes nothing (A9).

        Points whose states could never fit are left out (I11), the state that follows a decode
        last, then drafts, without which its passes go on (G1). The chunk is made smaller only if
        the full one could never fit (A6). A request that is rejected nonetheless keeps its points
        and its chunk; the pools named are those that are too small for the least it can run with.
        The demand decided on is kept on the request for `open`.
        """
        #   needed <= headroom, in every pool           admitted
        #   needed + own prefix <= capacity             deferred: it fits once others have ended
        #   else    fewer points, no state behind the decode, no drafts, a smaller chunk (A6, I11)
        #   nothing helps                               never fits (A8)
        if request.points_left_out is not None:
            request.checkpoints, request.points_left_out = list(request.points), None
        request.keeps_decoded = True
        request.draft_pages = self.points.draft_pages if request.total > request.prompt else 0
        self._ask(request, request.chunk)
        shortages = self._shortages(request)
        if not shortages:
            return _ADMITTED
        never = None if request.fits else self._never(request, shortages)
        if never is None:
            request.fits = not request.needs_load_back
            return Decision(Outcome.DEFERRED, shortages)
        wanted = request.checkpoints
        if wanted and self._lacks_states(never):
            self._leave_points_out(request)
            never = self._never(request, self._asked(request, request.chunk))
        if request.total > request.prompt and self._lacks_states(never):
            request.keeps_decoded = False
            never = self._never(request, self._asked(request, request.chunk))
        if never is not None and request.draft_pages:
            request.draft_pages = 0
            never = self._never(request, self._asked(request, request.chunk))
        chunk = self._largest_chunk(request) if never is not None else request.chunk
        if not chunk and self.boundaries is not None and self.tree.has_state:
            chunk = self._chunk_without_points(request)
        if not chunk:
            request.checkpoints, request.keeps_decoded = [], False
            least = min(request.chunk, self.tree.page_size)
            short = self._nevers(request, self._asked(request, least))
            request.checkpoints, request.points_left_out, request.keeps_decoded = wanted, None, True
            self._ask(request, request.chunk)
            return Decision(Outcome.NEVER_FITS, short or shortages)
        request.chunk = chunk
        shortages = self._asked(request, chunk)
        return Decision(Outcome.DEFERRED, shortages) if shortages else _ADMITTED

    def _lacks_states(self, shortage: Shortage | None) -> bool:
        """Whether a shortage is one of states; `_never` names those first."""
        return shortage is not None and self.tree.by_name[shortage.component].is_state

    def _leave_points_out(self, request: Request) -> None:
        """Keep as many of the points ahead as states could ever fit, the most useful ones."""
        useful = self.points.most_useful(request)
        low, high = 0, len(useful)
        while low < high:
            middle = (low + high) // 2
            request.checkpoints = sorted(useful[: middle + 1])
            never = self._never(request, self._asked(request, request.chunk))
            if never is not None and self._lacks_states(never):
                request.points_left_out = LeftOut(never.component, never.needed, never.capacity)
                high = middle
            else:
                low = middle + 1
        request.checkpoints = sorted(useful[:low])

    def _chunk_without_points(self, request: Request) -> int:
        """The largest chunk that could ever fit if states of points left their memory to pages.

        That is so where pools share a budget (K7). 0 if none.
        """
        state = next(part for part in request.components if part.component.is_state)
        needed = state.demand.now + state.demand.later
        capacity = state.component.device.capacity
        request.checkpoints, request.keeps_decoded = [], False
        request.points_left_out = LeftOut(state.component.name, needed, capacity)
        if self._never(request, self._asked(request, request.chunk)) is None:
            return request.chunk
        return self._largest_chunk(request)

    def _largest_chunk(self, request: Request) -> int:
        """The largest page-aligned chunk that could ever fit; 0 if none."""
        page_size = self.tree.page_size
        low, high = 1, (request.chunk - 1) // page_size
        best = 0
        while low <= high:
            middle = (low + high) // 2
            if self._never(request, self._asked(request, middle * page_size)) is not None:
                high = middle - 1
            else:
                best, low = middle, middle + 1
        return best * page_size

    def _shortages(self, request: Request) -> tuple[Shortage, ...]:
        found: list[Shortage] = []
        for part in request.components:
            component, demand = part.component, part.demand
            ledger = part.account.ledger
            need = demand.now + demand.later
            if need > ledger.headroom:
                found.append(_short(ledger, need, ledger.headroom))
            if part.host_account is not None:
                ledger = part.host_account.ledger
                need -= part.host_slots
                room = ledger.headroom
                if need > room:
                    found.append(_short(ledger, need, room))
            if demand.private:
                found += self._private_shortages(component, demand)
        return tuple(found)

    def _private_shortages(self, component: TreeComponent, demand: Demand) -> list[Shortage]:
        pools = self.mounted[component.index].component.private
        return [
            Shortage(component.name, pool.name, need, books.free, books.capacity)
            for pool, need, books in zip(pools, demand.private, self.private[component.index])
            if need > books.free
        ]

    def _never(self, request: Request, shortages: tuple[Shortage, ...]) -> Shortage | None:
        """One of `_nevers`; of states before others: there are points to do without."""
        found: Shortage | None = None
        for shortage in self._nevers(request, shortages):
            if found is None or self._lacks_states(shortage):
                found = shortage
        return found

    def _nevers(self, request: Request, shortages: tuple[Shortage, ...]) -> tuple[Shortage, ...]:
        """The shortages that would remain in a cache holding nothing but the request's prefix."""
        found: list[Shortage] = []
        for shortage in shortages:
            component, pool = self.tree.by_name[shortage.component], shortage.pool
            is_trees = pool in ("device", "host")
            pinned = _own_slots(request, component, host=pool == "host") if is_trees else 0
            if shortage.needed + pinned <= shortage.capacity:
                continue
            if pool != "device" or not self._could_move(request, component):
                found.append(shortage)
        return tuple(found)

    def _could_move(self, request: Request, component: TreeComponent) -> bool:
        """Whether the request fits once the boundary between pools is elsewhere."""
        boundaries = self.boundaries
        return boundaries is not None and boundaries.could_hold(component.name, self.needs(request))

    def needs(self, request: Request) -> dict[str, int]:
        """DEVICE slots that a request demands or pins, by component."""
        return {
            part.component.name: part.demand.now
            + part.demand.later
            + _own_slots(request, part.component, host=False)
            for part in request.components
        }

    def open(self, request: Request) -> None:
        """Promise an admitted request the demand it was decided on, and its private slots."""
        if request.points_left_out is not None:
            self.points.skip_left_out(request)
        if request.receipt.anchor.points:
            self.points.used_at(request.receipt.anchor)
        for part in request.components:
            demand, load = part.demand, part.host_slots
            peak = demand.now + demand.later - load
            remaining = self._remaining(request, part)
            part.account.open(peak, remaining, load)
            if part.host_account is not None:
                part.host_account.open(peak, remaining, 0)
            if demand.private:
                part.private = self._take_private(part.component, demand)

    def _take_private(self, component: TreeComponent, demand: Demand) -> tuple[bytes, ...]:
        taken = []
        for need, books in zip(demand.private, self.private[component.index]):
            slots = books.take_private(need)
            assert slots is not None
            taken.append(slots)
        return tuple(taken)

    def close(self, parts: Sequence[RequestComponent]) -> None:
        """Take promises and private slots back (H8)."""
        for part in parts:
            part.close_accounts()
            if part.private:
                for books, slots in zip(self.private[part.component.index], part.private):
                    books.give_private(slots)
                part.private = ()

    def next_chunk(self, request: Request, limit: int | None) -> int:
        """Tokens the next prefill step may compute: to a checkpoint, whole pages, as promised."""
        page_size = self.tree.page_size
        left = request.prompt - request.computed
        tokens = request.chunk if limit is None else limit
        if tokens >= left:
            tokens = left if left > 0 else 0
        for page in request.checkpoints:
            boundary = page * page_size
            if request.computed < boundary < request.computed + tokens:
                tokens = boundary - request.computed
                break
        if tokens < left and (request.computed + tokens) % page_size:
            aligned = (request.computed + tokens) // page_size * page_size - request.computed
            tokens = aligned if aligned > 0 else tokens
        if tokens <= request.chunk and request.allocated * page_size == request.anchor_tokens:
            return tokens  # it has no slots yet: its first chunk was promised at admission
        return self.fitting_chunk(request, tokens)

    def fitting_chunk(self, request: Request, tokens: int) -> int:
        """`tokens`, or the largest page-aligned part that the pools can give; 0 if none (A5).

        Slots promised at admission need no check.
        """
        page_size = self.tree.page_size
        for part in request.components:
            component = part.component
            if component.is_state or tokens <= 0:
                continue
            for account in (part.account, part.host_account):
                if account is None:
                    continue
                end = -(-(request.computed + tokens) // page_size)
                pages = component.stored_between(request.allocated, end)
                if pages * component.slots_per_page <= account.promised:
                    continue
                spare = account.promised + max(0, account.ledger.headroom)
                room = spare // component.slots_per_page
                if pages > room:
                    fits = (request.allocated + room) * page_size
                    tokens = max(0, min(tokens, fits - request.computed))
        return tokens


def _short(ledger: Ledger, need: int, room: int) -> Shortage:
    """A pool of the tree that has too little room for a request."""
    tier, room = ledger.tier.value, max(0, room)
    return Shortage(ledger.component, tier, need, room, ledger.ceiling, ledger.rights)


def _own_slots(request: Request, component: TreeComponent, *, host: bool) -> int:
    """Slots of the request's own prefix that its pins keep in a pool."""
    total = 0
    for node in segment_nodes(component, request.receipt):
        cell = node.cells[component.index]
        slots = cell.host if host else cell.device
        if slots is None and cell.incoming is not None:
            # Another request loads it back; it will be pinned anyway.
            slots = cell.incoming.slots if cell.incoming.to_host is host else None
        if slots is not None:
            total += len(slots) // SLOT_BYTES
    return total
