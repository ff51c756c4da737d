"""Steps of all running requests: those on the fast path, and the step's tensors (T9).

Two of three requests go through `computed` and `allocate`, which have checks of their own. The
others take the fast path, unless more is due for them: their expected results are computed here
from their earlier data and the call's arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from kvgraft.errors import ContractViolation
from kvgraft.parts import Step
from kvgraft.requests.request import Request
from kvgraft.requests.tables import state_number
from kvgraft.tree.component import TreeComponent
from kvgraft_guard.decoding import decode_pages
from kvgraft_guard.watched import Watched
from kvgraft_scheduling.rows import Rows
from kvgraft_scheduling.stepping import PADDING

__all__ = ["Steps"]

Table = npt.NDArray[np.int32]


class _Promise(NamedTuple):
    """A request's promised and held slots of one component."""

    promised: int
    held: int


class _State(NamedTuple):
    """A request's states of one component."""

    live: bytes | None
    tracked: bytes | None
    tracked_page: int


class _Before(NamedTuple):
    """A request before a step.

    Attributes:
        request: the request.
        computed, allocated: its tokens and pages.
        noted: tokens of it that the step notes; None if that is not known.
        tables: its slots, by paged component.
        promises: by component.
        states: by state component.
    """

    request: Request
    computed: int
    allocated: int
    noted: int | None
    tables: dict[int, Table]
    promises: list[_Promise]
    states: dict[int, _State]


class Steps:
    """Checks the steps of one cache.

    Args:
        watched: the cache.
        rows: its requests' rows.
    """

    def __init__(self, watched: Watched, rows: Rows) -> None:
        self.watched = watched
        self.rows = rows
        self.size = watched.tree.page_size
        self.every_tokens = decode_pages(watched.cache) * self.size
        self._until: dict[int, tuple[Request, int]] = {}
        self._asked: object = None
        self._known: set[int] = set()
        self._before: list[_Before] = []
        self._mirrors: dict[str, Table] = {}

    def cut(self, request: Request, end: int) -> None:
        """Its key was cut: slots behind are of tokens that count in no step."""
        known, until = self._until.get(id(request), (None, 0))
        if known is request and end >= max(request.prompt, request.computed):
            self._until[id(request)] = request, min(until, end)

    def asked(self, requests: object, n_computed: object) -> None:
        """A step begins: note its arguments, and requests with new rows."""
        self._asked, self._before = n_computed, []
        given = requests if isinstance(requests, (list, tuple)) else ()
        self._known = {id(each) for each in given if isinstance(each, Request) and each.row >= 0}

    def begins(self, requests: Sequence[Request], common: npt.NDArray[np.bool_]) -> None:
        """`common` are the requests that are not checked one by one."""
        counts: Sequence[int] | None = None
        if self._asked is not None:
            counts = np.broadcast_to(np.asarray(self._asked), (len(requests),)).tolist()
        self._before = [
            self._read(requests[at], None if counts is None else counts[at])
            for at in np.flatnonzero(common).tolist()
        ]

    def _read(self, request: Request, noted: int | None) -> _Before:
        if noted is None and id(request) in self._known:
            known, until = self._until.get(id(request), (None, 0))
            noted = max(0, until - request.computed) if known is request else None
        return _Before(
            request,
            request.computed,
            request.allocated,
            noted,
            self.watched.shares.tables(request),
            [_Promise(part.account.promised, part.account.held) for part in request.components],
            {
                part.component.index: _State(part.live, part.tracked, part.tracked_page)
                for part in request.state_components
            },
        )

    def ends(self, slow: npt.NDArray[np.bool_], batch: Sequence[Request], step: Step) -> None:
        """The step is over: `slow` of its requests took the slow path.

        Raises:
            ContractViolation: G4 for drafts behind a state that is to be kept, T9 for other tokens,
                slots or rows than those of the request, I7 for a state that was not kept, A1 for
                slots beside the promise.
        """
        if step.n_tokens is not None:
            widths = step.n_tokens.tolist()
            self._check_widths(step, widths)
        else:
            n_tokens = int(step.seq_lens[0]) - step.requests[0].computed if step.requests else 0
            widths = [n_tokens] * len(step.requests)
        given = {id(each): n for each, n in zip(step.requests, widths)}
        own = {id(batch[at]) for at in np.flatnonzero(slow).tolist()}
        before, self._before = self._before, []
        for each in before:
            if id(each.request) not in own:
                self._check_common(each, given.get(id(each.request), 0))
        for request in batch:
            pass_end = request.computed + given.get(id(request), 0)
            if self.rows.given[request.row] != pass_end:
                self._raise(
                    request,
                    f"its next pass may note tokens up to {self.rows.given[request.row]}, slots "
                    f"were given up to {pass_end}",
                )
        for request in step.requests:
            self.watched.shares.remember(request)
        self._check_told(step, widths)
        self._until = {ident: held for ident, held in self._until.items() if held[0].row >= 0} | {
            id(each): (each, each.computed + given.get(id(each), 0)) for each in batch
        }

    def _check_widths(self, step: Step, widths: Sequence[int]) -> None:
        every = self.every_tokens
        for request, width in zip(step.requests, widths):
            if self.watched.tree.has_state and request.computed % every + width > every:
                raise ContractViolation(
                    "G4",
                    None,
                    f"a pass of {width} tokens from {request.computed} of {request!r} goes beyond "
                    f"a multiple of {every}, where its state is to be kept",
                )

    # -- requests on the fast path

    def _check_common(self, was: _Before, n_tokens: int) -> None:
        request, size = was.request, self.size
        computed = was.computed + (was.noted or 0)
        if was.noted is not None and request.computed != computed:
            self._raise(request, f"{was.noted} more tokens were computed of {was.computed}")
        pages = max(was.allocated, -(-(request.computed + n_tokens) // size))
        if request.allocated != pages:
            self._raise(
                request,
                f"{n_tokens} more tokens need {pages} pages, of which it had {was.allocated}; it "
                f"has {request.allocated}",
            )
        now = self.watched.shares.tables(request)
        for component, promise, part in zip(
            self.watched.tree.components, was.promises, request.components
        ):
            taken = 0
            if not component.is_state:
                taken = self._check_pages(was, component, now[component.index])
            account = part.account
            if (account.promised, account.held) != (promise.promised - taken, promise.held + taken):
                raise ContractViolation(
                    "A1",
                    component.name,
                    f"a step gave {taken} slots to {request!r}, which held {promise.held} and was "
                    f"promised {promise.promised}; it holds {account.held} and is promised "
                    f"{account.promised}",
                )
        self._check_states(was, n_tokens)
        if request.computed // size > was.computed // size:
            self.watched.leases.check_loosened(request)

    def _check_pages(self, was: _Before, component: TreeComponent, table: Table) -> int:
        """Pages that had slots keep them, the others have new ones; how many slots are new."""
        before, request = was.tables[component.index], was.request
        size = component.slots_per_page
        stored = component.stored_between(0, request.allocated) * size
        fresh = table[len(before) : max(stored, len(before))]
        if len(table) < len(before) or (table[: len(before)] != before).any():
            self._raise(request, f"{component.name!r}: its pages are in other slots than before")
        if (fresh < 0).any() or len(np.unique(fresh)) < len(fresh):
            self._raise(
                request,
                f"{component.name!r}: {len(fresh) // size} new pages have "
                f"{len(np.unique(fresh[fresh >= 0]))} slots",
            )
        held = before[before >= 0]
        if len(fresh) and np.isin(fresh, held).any():
            self._raise(request, f"{component.name!r}: a new page is in the slot of another")
        return len(fresh)

    def _check_states(self, was: _Before, n_tokens: int) -> None:
        """The state at a boundary that a decode passes is kept, and no other (I7)."""
        request = was.request
        noted = request.computed - was.computed
        stands = noted > 0 and n_tokens > 0 and not request.computed % self.every_tokens
        for part in request.state_components:
            before = was.states[part.component.index]
            if part.live != before.live or part.tracked != before.tracked:
                self._raise(request, f"{part.component.name!r}: its states are in other slots")
            kept = stands and part.tracked is not None and request.total > request.prompt
            page = request.computed // self.size if kept else before.tracked_page
            if part.tracked_page != page:
                raise ContractViolation(
                    "I7",
                    part.component.name,
                    f"{request!r} keeps the state of page {part.tracked_page}; wanted is that of "
                    f"page {page}",
                )
            if kept and part.live is not None and part.tracked is not None:
                self.watched.shares.check_copy(
                    part.component, part.live, part.tracked, f"the state kept at page {page} is"
                )

    def _raise(self, request: Request, what: str) -> NoReturn:
        raise ContractViolation("T9", None, f"a step: {request!r}: {what}")

    # -- what the engine is told

    def _check_told(self, step: Step, widths: Sequence[int]) -> None:
        """Lengths, slots, states and changed entries are those of the requests."""
        mirrors = {each.name: self._mirrored(step, each) for each in self.rows.paged}
        if not step.requests:
            return
        rows = [each.row for each in step.requests]
        lengths = [each.computed + n for each, n in zip(step.requests, widths)]
        if step.rows.tolist() != rows or step.seq_lens.tolist() != lengths:
            self._raise(step.requests[0], f"rows {step.rows.tolist()} are told, of {rows}")
        for component in self.rows.paged:
            self._check_entries(step, component, mirrors[component.name], widths)
        for component in self.rows.state_components:
            told = step.state_slots[component.name].tolist()
            for request, slot in zip(step.requests, told):
                part = request.state_component(component.index)
                live = -1 if part is None or part.live is None else state_number(part.live)
                if slot != live:
                    self._raise(request, f"{component.name!r}: state {slot} is told, not {live}")

    def _check_entries(
        self, step: Step, component: TreeComponent, mirror: Table, widths: Sequence[int]
    ) -> None:
        mapping = step.slot_mapping.get(component.name)
        most = 0 if mapping is None else len(mapping) // len(widths)
        for at, (request, n_tokens) in enumerate(zip(step.requests, widths)):
            table = self.watched.shares.tables(request)[component.index]
            row = mirror[request.row, : len(table)]
            if (row != table).any():
                self._raise(
                    request,
                    f"{component.name!r}: by the changes that were told, entry "
                    f"{int((row != table).argmax())} is another than its own",
                )
            if mapping is None or not n_tokens:
                continue
            places = np.arange(request.computed, request.computed + n_tokens)
            pages = table[np.minimum(places // self.size, len(table) - 1)].astype(np.int64)
            wanted = np.where(pages < 0, PADDING, pages * self.size + places % self.size)
            told = mapping[at * most : (at + 1) * most].numpy()
            if (told[:n_tokens] != wanted).any() or (told[n_tokens:] != PADDING).any():
                self._raise(request, f"{component.name!r}: tokens are written to other slots")

    def _mirrored(self, step: Step, component: TreeComponent) -> Table:
        """A copy of a table that is changed by what steps tell alone."""
        table = self.rows.tables[component.index]
        if table is None:  # no request so far
            return np.zeros((0, 0), np.int32)
        mirror, changes = self._mirrors.get(component.name), step.changes[component.name]
        if mirror is None or mirror.shape != table.shape:
            mirror = self._mirrors[component.name] = table.copy()
        mirror.reshape(-1)[changes.places.numpy()] = changes.slots.numpy()
        return mirror
