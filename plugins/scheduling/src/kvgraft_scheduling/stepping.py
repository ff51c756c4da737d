"""One step of all running requests, between two passes of the model.

Most requests begin no page in a step: for them it is array operations over all rows. Requests that
begin one take its slots together. A request takes the slow path, `computed` and `allocate`, when
more is due: data behind its reaches leaves, a state is set up, a page lies beyond its reservation,
or other calls changed it. `Rows` notes how far each can go without.

The fast path exists because those calls take three to twelve times as long for decoding requests.
The slow path consists of them, so their work is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvgraft.compiled import mypyc_attr
from kvgraft.errors import ConfigError, KvgraftError, LeaseError
from kvgraft.parts import Step
from kvgraft.reach import FAR
from kvgraft.refusals import of_type
from kvgraft.requests.components import DECODED
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.publishing import Publisher
from kvgraft.requests.request import Request, no_request
from kvgraft.requests.slots import StateSlots, took_pages
from kvgraft.sizes import expect_count
from kvgraft.tree.keys import TOKEN_BYTES, expect_sequence, shown_start, token_ids
from kvgraft.tree.pinning import NO_PAGE
from kvgraft.tree.tree import Tree
from kvgraft_scheduling.rows import NO_EVICT_FIRST, Rows, evict_first_schedule, slides_from

__all__ = ["Batch", "Stepper", "stepper_of"]

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

NO_ROWS: frozenset[int] = frozenset()
NO_REQUESTS: list[Request] = []

MOST_TOKENS = 2**31 - 1
"""Lengths of sequences are int32."""

PADDING = -1
"""The slot of a token for which a component keeps no data."""


class Batch:
    """The requests of a step, and how far it takes each.

    Attributes:
        requests: all of them.
        rows: int64 `[n]`.
        tokens: the tokens to append, int32 `[n, m]` as bytes; None for none.
        keys: the data of the requests' keys, to which the tokens are appended.
        noted: tokens that were computed, by request.
        length: tokens after that.
        n_tokens: tokens to give slots to, at most.
        n_drafts: how many of them are drafts.
        widths: how many of each request; None for all of them.
        first: pages that have slots.
        end: pages that will have slots.
        slow: whether it takes the slow path.
        n_slow: how many take it.
        n_noted: tokens that were computed, of all of them.
        stale: rows that other calls changed before.
    """

    def __init__(self, requests: list[Request], rows: Ints, n_tokens: int, n_drafts: int) -> None:
        self.requests = requests
        self.rows = rows
        self.n_tokens = n_tokens
        self.n_drafts = n_drafts
        self.widths: Ints | None = None
        self.tokens: bytes | None = None
        self.keys: list[bytearray] = []
        self.stale: frozenset[int] = NO_ROWS
        self.n_noted = self.n_slow = 0
        self.noted: Ints
        self.length: Ints
        self.first: Ints
        self.end: Ints
        self.slow: Bools

    def to_note(self) -> list[tuple[Request, int]]:
        """Requests whose computed tokens are noted one by one, and how many."""
        if not self.n_slow:
            return []
        due = np.flatnonzero(self.slow & (self.noted > 0))
        return [(self.requests[at], n) for at, n in zip(due.tolist(), self.noted[due].tolist())]

    def width(self, at: int) -> int:
        """Tokens of one request that the next pass computes."""
        return self.n_tokens if self.widths is None else int(self.widths[at])


@mypyc_attr(allow_interpreted_subclasses=True)
class Stepper:
    """Takes running requests one pass of the model further, all together.

    Args:
        tree: the components.
        rows: the requests' rows.
        publisher: counts computed tokens.
        states: copies states that are kept.
        evictor: makes room.
        max_drafts: most drafts of one request in a pass.
    """

    def __init__(
        self,
        tree: Tree,
        rows: Rows,
        publisher: Publisher,
        states: StateSlots,
        evictor: Evictor,
        max_drafts: int,
    ) -> None:
        self.tree = tree
        self.max_drafts = max_drafts
        self.rows = rows
        self.publisher = publisher
        self.states = states
        self.evictor = evictor
        self.matter = publisher.points.matter
        self.state_tokens = publisher.points.decode_pages * tree.page_size
        self.n_splits = 0
        self.keys_held_drafts = False
        self.shares_pools = any(len(each.devices) > 1 for each in tree.components)
        every_page = FAR // tree.page_size
        self.partial = [each for each in rows.paged if each.stored_pages < every_page]
        self.simple = not self.partial and not tree.homes_on_host
        self.mapped = [each for each in rows.paged if each.slots_per_page == 1]
        self.no_places = torch.zeros(0, dtype=torch.int64)
        size = tree.page_size
        self.page_bits = size.bit_length() - 1 if not size & size - 1 else -1
        """The base-2 logarithm of the page size; -1 where that is no whole number."""

    def chosen(self, requests: Sequence[Request]) -> Bools | None:
        """Requests that a subclass sends down the slow path in this step; None for none."""
        del requests
        return None

    # -- what is asked

    def begin(
        self,
        requests: Sequence[Any],
        tokens: object,
        n_tokens: Any,
        n_computed: object,
        enter: Callable[[Request], None],
        n_drafts: Any = 0,
    ) -> Batch:
        """The requests with their rows; refuses wrong arguments before anything changes.

        Args:
            requests: admitted ones, each once.
            tokens: see `Cache.step`.
            n_tokens: see `Cache.step`.
            n_computed: see `Cache.step`.
            enter: refuses requests that cannot run, of those that have no row yet.
            n_drafts: see `Cache.step`.

        Raises:
            ConfigError: arguments of wrong types, or more tokens than the tables are made for, or
                more drafts than the cache allows.
            LeaseError: a request that cannot run, one that is there twice, one whose pass
                computed more tokens than there are slots for, or one whose key ends elsewhere than
                those tokens.
        """
        rows = self.rows
        try:
            requests = list(requests)
        except TypeError:
            raise LeaseError(f"step: {of_type(requests)} is no list; give [request, ...]") from None
        at, new = rows.known(requests), NO_REQUESTS
        known = at is not None
        if at is None:
            at, new = self._rows_of(requests)
            for request in new:
                enter(request)
        if type(n_tokens) is not int or not 0 <= n_tokens <= MOST_TOKENS:
            n_tokens = expect_count("step: n_tokens", n_tokens, most=MOST_TOKENS)
        if type(n_drafts) is not int or n_drafts:
            n_tokens = self._with_drafts(n_tokens, n_drafts)
        data = None if tokens is None else token_rows(tokens, len(requests))
        counts = None if n_computed is None else _counts(n_computed, len(requests))
        if rows.stale or rows.cuts:
            rows.resync()
        if not new:
            batch = Batch(requests, at, n_tokens, n_drafts)
            self._measure(batch, counts, data)
        else:
            rows.room_for(len(new), 0)
            for request in new:
                rows.take(request)
            rows.resync()
            at = np.array([each.row for each in requests], np.int64)
            batch = Batch(requests, at, n_tokens, n_drafts)
            try:
                self._measure(batch, counts, data)
            except KvgraftError:
                for request in new:
                    rows.give_back(request)
                raise
        if not known:
            rows.know(requests, batch.rows)
        self._find_slow(batch)
        return batch

    def _rows_of(self, requests: Sequence[Any]) -> tuple[Ints, list[Request]]:
        """The rows of requests, and those of them that have none so far.

        Raises:
            LeaseError: one that is none, or is there twice.
        """
        owners = self.rows.request
        try:
            numbers = [request.row for request in requests]
            new = [
                request
                for request, row in zip(requests, numbers)
                if row < 0 or row >= len(owners) or owners[row] is not request
            ]
        except (AttributeError, TypeError):
            none = next(each for each in requests if not isinstance(each, Request))
            raise no_request(none) from None
        n_distinct = len(set(numbers))
        if new:
            n_distinct = len({id(request) for request in requests})
        if n_distinct < len(requests):
            raise LeaseError("step: a request is there twice; give each once")
        return np.array(numbers, np.int64), new

    def _with_drafts(self, n_tokens: int, n_drafts: Any) -> int:
        """Tokens of a pass that verifies drafts behind the one sampled last (G1)."""
        n = expect_count("step: n_drafts", n_drafts)
        if n > self.max_drafts:
            raise ConfigError(
                f"step: n_drafts={n}, max_drafts={self.max_drafts}; give fewer, or open the "
                "cache with more"
            )
        if n and n_tokens != 1:
            raise ConfigError(
                f"step: n_drafts={n} with n_tokens={n_tokens}; drafts go behind one token"
            )
        return n_tokens + n

    def _measure(self, batch: Batch, counts: Ints | None, tokens: bytes | None) -> None:
        """Find out how far each request goes, and make the tables wide enough for that."""
        rows, at, size = self.rows, batch.rows, self.tree.page_size
        length = rows.length[at]
        batch.noted = rows.given[at] - length if counts is None else counts
        batch.n_noted = int(np.add.reduce(batch.noted))
        batch.length = length + batch.noted
        batch.first = rows.allocated[at]
        if counts is not None:
            room = rows.given[at] - batch.length
            if np.count_nonzero(room < 0):
                short = batch.requests[int(room.argmin())]
                raise LeaseError(
                    f"step: n_computed is more than the last step gave slots for of {short!r}; "
                    "give the tokens of its last pass"
                )
            if self.keys_held_drafts:
                self._expect_cut(batch, room)
        if tokens is not None:
            n_given = len(tokens) // (TOKEN_BYTES * max(1, len(batch.requests)))
            if n_given > batch.n_tokens:
                raise ConfigError(
                    f"step: {n_given} tokens of each request for n_tokens={batch.n_tokens}; give "
                    "those that the next pass computes"
                )
            self._expect_at_end(batch, counts)
            batch.tokens = tokens
        elif counts is None and self.max_drafts:
            self._expect_verified(batch)
        if batch.n_tokens:
            if batch.n_drafts and self.tree.has_state:
                batch.widths = self._up_to_states(batch)
            most = batch.n_tokens if batch.widths is None else batch.widths
            until = batch.length + (most + (size - 1))
            pages = until >> self.page_bits if self.page_bits >= 0 else until // size
            batch.end = np.maximum(pages, batch.first)
        else:
            batch.end = batch.first
        if batch.requests:
            n_pages = int(np.maximum.reduce(batch.end))
            if n_pages > rows.n_pages and rows.most_pages is None:
                # More than the pools have is refused, and needs no table.
                n_pages = min(n_pages, int(batch.first.max()) + self._most_pages())
            if rows.most_pages is not None and n_pages > rows.most_pages:
                longest = batch.requests[int(batch.end.argmax())]
                raise ConfigError(
                    f"step: {batch.n_tokens} tokens more of {longest!r}, which is at "
                    f"{int(batch.length[batch.end.argmax()])}, max_tokens="
                    f"{rows.most_pages * size}; end it, or open the cache with more"
                )
            rows.room_for(0, n_pages)

    def _up_to_states(self, batch: Batch) -> Ints | None:
        """Tokens of passes with drafts: each ends where a state is kept (G4); None for all."""
        left = self.state_tokens - batch.length % self.state_tokens
        if not np.count_nonzero(left < batch.n_tokens):
            return None
        return np.minimum(left, batch.n_tokens)

    def _expect_at_end(self, batch: Batch, counts: Ints | None) -> None:
        """Refuse tokens for a key that ends elsewhere than its computed ones (T11)."""
        batch.keys = keys = [request.key.data for request in batch.requests]
        if list(map(len, keys)) == (batch.length * TOKEN_BYTES).tolist():
            return
        for request, length, n in zip(batch.requests, batch.length.tolist(), batch.noted.tolist()):
            end = request.key.n_tokens
            if end == length:
                continue
            said = f"step: tokens go behind the {length} computed ones, the key holds {end}, of "
            if length < request.prompt:
                instead = "compute the prompt first, or give no tokens"
            elif end > length:
                instead = "give tokens to step or to key.extend, not to both"
            elif counts is None and n > 1 and self.max_drafts:
                instead = f"give n_computed, how many of the last pass's {n} tokens count"
            else:
                instead = "extend the key with the tokens that were computed first"
            raise LeaseError(f"{said}{request!r}; {instead}")

    def _expect_cut(self, batch: Batch, room: Ints) -> None:
        """Refuse to count some of a pass whose rejected drafts the key still holds (G2)."""
        edits = self.rows.draft_edits[batch.rows]
        for at in np.flatnonzero((edits >= 0) & (room > 0) & (batch.noted > 0)).tolist():
            request, end = batch.requests[at], int(batch.length[at])
            holds = edits[at] == request.key.edits and request.key.n_tokens > end
            if holds and end >= request.prompt:
                raise LeaseError(
                    f"step: {room[at]} tokens of the last pass do not count, and the key "
                    f"still holds them, of {request!r}; cut it first, key.truncate({end})"
                )

    def _expect_verified(self, batch: Batch) -> None:
        """Refuse to count drafts that the key does not hold: rejected ones are no tokens (G2)."""
        for at in np.flatnonzero(batch.noted > 1).tolist():
            request, n, length = batch.requests[at], int(batch.noted[at]), int(batch.length[at])
            if request.key.n_tokens < length:
                raise LeaseError(
                    f"step: all {n} tokens of the last pass would count, up to {length}, and the "
                    f"key holds {request.key.n_tokens}, of {request!r}; give n_computed, how many "
                    "of them are right"
                )

    def _most_pages(self) -> int:
        """Pages that a request can take in a step where all slots are free."""
        whole = [each for each in self.rows.paged if each not in self.partial]
        return min([each.device.capacity // each.slots_per_page for each in whole], default=FAR)

    def _find_slow(self, batch: Batch) -> None:
        """Find the requests for which something is due; most have nothing but tokens to count."""
        rows, at = self.rows, batch.rows
        if rows.stale:
            self._read_stale(batch)
        if self.tree.n_splits != self.n_splits:
            # Pins are loosened by whole nodes, and there are smaller ones now.
            self.n_splits = self.tree.n_splits
            size = self.tree.page_size
            sliding = rows.slides
            next_page = (rows.length[sliding] // size + 1) * size
            rows.next_event_tokens[sliding] = np.minimum(rows.next_event_tokens[sliding], next_page)
        #   fast while   length < next_event_tokens       a boundary that matters is ahead
        #          and   end <= promised                  its pages are promised
        slow = batch.length >= rows.next_event_tokens[at]
        if batch.n_tokens:
            slow |= batch.end > rows.promised[at]
        if self.tree.has_state and not batch.n_tokens:
            # Its states are due, and kept when it goes on.
            slow |= rows.tracks[at] & (batch.length % self.state_tokens == 0)
        chosen = self.chosen(batch.requests)
        batch.slow = slow if chosen is None else slow | chosen
        batch.n_slow = int(np.count_nonzero(batch.slow))

    # -- tokens that were computed

    def note(self, batch: Batch) -> None:
        """Count the computed tokens of requests on the fast path."""
        if not batch.n_noted:
            return
        if not batch.n_slow:
            self.rows.length[batch.rows] = batch.length
            for request, length in zip(batch.requests, batch.length.tolist()):
                request.computed = length
            self.publisher.tokens += batch.n_noted
            return
        fast = np.flatnonzero(~batch.slow)
        self.rows.length[batch.rows[fast]] = batch.length[fast]
        requests = batch.requests
        for at, length in zip(fast.tolist(), batch.length[fast].tolist()):
            requests[at].computed = length
        self.publisher.tokens += int(np.add.reduce(batch.noted[fast]))

    # -- slots

    def take(
        self, batch: Batch, allocate: Callable[[Request, int], bool]
    ) -> tuple[list[int], list[int]]:
        """Give all requests their slots; returns which got some, by their places in the batch.

        `allocate` serves requests on the slow path. Room is made in the order of the requests.

        Returns:
            Those that have slots, and those that are refused.
        """
        if not batch.n_tokens:
            return list(range(len(batch.requests))), []
        n_pages = int(np.add.reduce(batch.end - batch.first))
        refused: list[int] = []
        if not n_pages and not batch.n_slow:
            self._keep_states(batch, None)
        elif not self.shares_pools and self._has_room(n_pages):
            self._take(batch, np.flatnonzero(~batch.slow))
            for at in np.flatnonzero(batch.slow).tolist():
                if not allocate(batch.requests[at], batch.width(at)):
                    refused.append(at)
        else:
            refused = self._take_in_order(batch, allocate)
        if not refused:
            return list(range(len(batch.requests))), []
        gone = set(refused)
        return [at for at in range(len(batch.requests)) if at not in gone], refused

    def _has_room(self, n_pages: int) -> bool:
        """Whether so many pages of every component are free."""
        return all(n_pages * each.slots_per_page <= each.device.room for each in self.rows.paged)

    def _take_in_order(self, batch: Batch, allocate: Callable[[Request, int], bool]) -> list[int]:
        """Serve requests one by one where room has to be made, and those between them together."""
        refused: list[int] = []
        together: list[int] = []
        needed = 0

        def take_together() -> None:
            self._take(batch, np.array(together, np.int64))
            together.clear()

        for at, (is_slow, n) in enumerate(
            zip(batch.slow.tolist(), (batch.end - batch.first).tolist())
        ):
            request = batch.requests[at]
            if is_slow:
                take_together()
                needed = 0
                if not allocate(request, batch.width(at)):
                    refused.append(at)
                continue
            if n and (self.shares_pools or not self._has_room(needed + n)):
                take_together()
                needed = 0
                self._ensure_free(request, n)
            together.append(at)
            needed += n
        take_together()
        return refused

    def _ensure_free(self, request: Request, n_pages: int) -> None:
        """Room for a request's promised pages."""
        tenant = request.root.tenant
        for component in self.rows.paged:
            n = n_pages * component.slots_per_page
            if n > component.devices[tenant].room:
                self.evictor.ensure_promised(component, n, tenant, n)

    def _take(self, batch: Batch, fast: Ints) -> None:
        """Slots out of the promises of requests of one tenant for which nothing else is due."""
        self._keep_states(batch, fast)
        n_pages = batch.end[fast] - batch.first[fast]
        begins = np.flatnonzero(n_pages)
        if not len(begins):
            return
        at, n_pages = fast[begins], n_pages[begins]
        rows = batch.rows[at]
        first, end = batch.first[at], batch.end[at]
        self.rows.allocated[rows] = end
        requests = [batch.requests[each] for each in at.tolist()]
        firsts, ends = first.tolist(), end.tolist()
        for request, n in zip(requests, ends):
            request.allocated = n
        self._take_slots(requests, firsts, ends, (rows, first, n_pages))

    def _take_slots(
        self,
        requests: list[Request],
        firsts: list[int],
        ends: list[int],
        where: tuple[Ints, Ints, Ints],
    ) -> None:
        """Slots of every paged component, promised and free; of one tenant."""
        rows, first, n_pages = where
        total = int(n_pages.sum())
        for component in self.rows.paged:
            index, per_page = component.index, component.slots_per_page
            ledger = requests[0].components[index].account.ledger
            slots = ledger.take_private(total * per_page)
            assert slots is not None
            ledger.promised -= total * per_page
            width = self.rows.n_pages * per_page
            took_pages(requests, index, firsts, ends, slots)
            numbers = np.frombuffer(slots, np.int32)
            places = rows * width + first * per_page
            self.rows.write(component, places, n_pages * per_page, numbers)

    def _keep_states(self, batch: Batch, fast: Ints | None) -> None:
        """Copy the live states that are worth it, each over its request's last one (I7).

        Of the requests at these places in the batch; None for all.
        """
        if not self.tree.has_state or not batch.n_noted:
            return
        stands = batch.length % self.state_tokens == 0
        if not np.count_nonzero(stands):
            return
        size = self.tree.page_size
        stands &= self.rows.tracks[batch.rows] & (batch.noted > 0)
        standing = np.flatnonzero(stands) if fast is None else fast[np.flatnonzero(stands[fast])]
        if not len(standing):
            return
        rows = batch.rows[standing]
        pages = (batch.length[standing] // size).tolist()
        for at, page in zip(standing.tolist(), pages):
            for part in batch.requests[at].state_components:
                part.tracked_page = page
        for component in self.rows.state_components:
            live = self.rows.states[component.index][rows]
            tracked = self.rows.tracked[component.index][rows]
            self.states.copy(component, live.tobytes(), tracked.tobytes())

    # -- the rows afterwards

    def end(self, batch: Batch, given: list[int], refused: list[int]) -> Step:
        """The keys have the new tokens; the rows and the tables are up to date."""
        if batch.tokens is not None and given:
            self._append(batch, given)
        if batch.n_slow:
            self._look_ahead(batch, np.flatnonzero(batch.slow).tolist())
        rows = batch.rows
        if refused:
            refusing = batch.rows[np.array(refused, np.int64)]
            self.rows.given[refusing] = self.rows.length[refusing]
            rows = batch.rows[np.array(given, np.int64)]
        length = self.rows.length[rows]
        widths = batch.widths
        if widths is not None and refused:
            widths = widths[np.array(given, np.int64)]
        until = length + (batch.n_tokens if widths is None else widths)
        self.rows.given[rows] = until
        requests = [batch.requests[at] for at in given] if refused else batch.requests
        if batch.n_tokens > 1:
            edits = self._draft_edits(batch, requests, until)
            if edits or self.keys_held_drafts:
                self.keys_held_drafts = True
                self.rows.draft_edits[rows] = edits or -1
        told: torch.Tensor | None = None
        if batch.n_drafts:
            most = np.full(len(rows), batch.n_tokens, np.int64)
            told = torch.from_numpy(most if widths is None else widths)
        return Step(
            requests,
            [batch.requests[at] for at in refused],
            torch.from_numpy(rows.copy()),
            torch.from_numpy(until.astype(np.int32)),
            self._slot_mapping(rows, length, batch.n_tokens, widths),
            {
                component.name: torch.from_numpy(
                    self.rows.states[component.index][rows].astype(np.int64)
                )
                for component in self.rows.state_components
            },
            self.rows.take_changes(),
            told,
        )

    def _draft_edits(self, batch: Batch, requests: list[Request], until: Ints) -> list[int]:
        """The edits of keys that hold their pass's tokens by now; below 0 of others.

        Empty where none does, as where each was given one token.
        """
        if batch.tokens is not None and len(batch.tokens) == TOKEN_BYTES * len(batch.requests):
            return []
        keys = [request.key for request in requests]
        held = np.array([len(key.data) for key in keys]) >= until * TOKEN_BYTES
        if not np.count_nonzero(held):
            return []
        return [key.edits if holds else -1 for key, holds in zip(keys, held.tolist())]

    def _append(self, batch: Batch, given: list[int]) -> None:
        data, keys = batch.tokens, batch.keys
        assert data is not None
        n = len(data) // len(keys)
        if batch.widths is None or n == TOKEN_BYTES:
            for at in given:
                key = keys[at]
                key += data[at * n : at * n + n]
            return
        widths = (batch.widths * TOKEN_BYTES).tolist()
        for at in given:
            key = keys[at]
            key += data[at * n : at * n + min(n, widths[at])]

    def _slot_mapping(
        self, rows: Ints, length: Ints, n_tokens: int, widths: Ints | None
    ) -> dict[str, torch.Tensor]:
        """Where the next `n_tokens` tokens of each request are written; of some fewer."""
        size, inside = self.tree.page_size, length
        beyond: Bools | None = None
        if not n_tokens:
            return {each.name: self.no_places for each in self.mapped}
        if n_tokens != 1:
            rows = rows.repeat(n_tokens)
            each = np.arange(n_tokens if len(rows) else 0)
            length = (length[:, None] + each).reshape(-1)
            if widths is not None:
                beyond = (each >= widths[:, None]).reshape(-1)
                length[beyond] = 0
        pages = length
        if size > 1 and self.page_bits >= 0:  # several times as fast
            pages, inside = length >> self.page_bits, length & size - 1
        elif size > 1:
            pages = length // size
            inside = length - pages * size
        places = rows * self.rows.n_pages + pages
        found: dict[str, torch.Tensor] = {}
        for component in self.mapped:
            table = self.rows.tables[component.index]
            if table is None:  # no request so far
                mapping = np.zeros(0, np.int64)
            else:
                mapping = table.reshape(-1).take(places).astype(np.int64)
                nowhere = mapping < 0 if component in self.partial else None
                if size > 1:
                    mapping *= size
                    mapping += inside
                if nowhere is not None:
                    mapping[nowhere] = PADDING
                if beyond is not None:
                    mapping[beyond] = PADDING
            found[component.name] = torch.from_numpy(mapping)
        return found

    def _read_stale(self, batch: Batch) -> None:
        """Read the rows that other calls changed, where nothing is due but tokens to count.

        These requests go with the others then: most that join a batch do. The rest are read once
        they have taken the slow path.
        """
        rows = self.rows
        batch.stale = frozenset(rows.stale)
        changed = np.flatnonzero(rows.next_event_tokens[batch.rows] == 0).tolist()
        read = [at for at in changed if self._counts_only(batch.requests[at])]
        if read:
            self._look_ahead(batch, read)
            batch.stale = frozenset(rows.stale)

    def _counts_only(self, request: Request) -> bool:
        """Whether a request was changed by other calls, and needs nothing but to count tokens."""
        if request.row not in self.rows.stale or request.receipt.host_from is not None:
            return False
        following = request.computed // self.tree.page_size + 1
        return self._next_event_page(request, following) > 0

    def _look_ahead(self, batch: Batch, places: list[int]) -> None:
        """Read the rows of requests at these places anew, and how far they go now."""
        rows, at = self.rows, batch.rows[places]
        seen = [self._look_at(batch.requests[each], batch) for each in places]
        found = np.array(seen, np.int64)
        rows.length[at], rows.allocated[at], rows.promised[at] = (
            found[:, 0],
            found[:, 1],
            found[:, 2],
        )
        rows.tracks[at], rows.slides[at] = found[:, 3], found[:, 4]
        rows.next_event_tokens[at] = found[:, 5] * self.tree.page_size
        rows.write_entered()

    def _look_at(self, request: Request, batch: Batch) -> tuple[int, ...]:
        """A request's numbers, in the order in which `_look_ahead` writes them; its row is read."""
        rows, row = self.rows, request.row
        first = int(rows.allocated[row])
        for component in rows.paged:
            if component.home_is_host or row in batch.stale:
                rows.read(component, request, 0)
            elif component.is_prefix_closed:
                rows.append(component, request, first)
            else:
                rows.follow(component, request, first)
        rows.read_states(request)
        rows.stale.discard(row)
        following = request.computed // self.tree.page_size + 1
        slides, evict_first = NO_PAGE, NO_EVICT_FIRST
        if self.matter:
            slides = slides_from(self.tree, request.receipt, following)
            evict_first = evict_first_schedule(request, following, self.tree.page_size)
        due = min(slides, evict_first.page)
        if self.publisher.points.late_pages and due > request.prompt // self.tree.page_size:
            due += -due % self.publisher.points.decode_pages  # they go with the next state
        return (
            request.computed,
            request.allocated,
            self._promised(request),
            self.tree.has_state and request.total > request.prompt,
            slides < NO_PAGE,
            min(self._next_event_page(request, following), due, evict_first.low),
        )

    def _promised(self, request: Request) -> int:
        """Pages up to which a request's slots of every component are promised."""
        if not self.simple:
            return request.allocated  # some have fewer pages, or pages on HOST as well
        pages = min(
            [
                request.components[each.index].account.promised // each.slots_per_page
                for each in self.rows.paged
            ],
            default=NO_PAGE,
        )
        return request.allocated + max(0, pages)

    def _next_event_page(self, request: Request, following: int) -> int:
        """The page from which on a request's prompt or states need more than to be counted.

        0 for at once; `following` is the next boundary.
        """
        if request.computed < request.prompt or request.checkpoints:
            return 0
        page, decode_pages = NO_PAGE, self.publisher.points.decode_pages
        for part in request.state_components:
            if part.live is None or part.due or part.captured or part.due_as is not DECODED:
                return 0
            if part.tracked is None and request.total > request.prompt:
                page = -(-following // decode_pages) * decode_pages
        return page


def stepper_of(cache: Any, make: Callable[..., Stepper]) -> Stepper:
    """Steps of a cache's requests, in tables as large as its settings say.

    `make` is the cache's `PartsFactory.make`.
    """
    config = cache.config
    pinned = config.device.startswith("cuda") and config.payload
    most = None if config.max_tokens is None else config.max_tokens + config.max_drafts
    rows = Rows(cache.tree, config.max_requests, most, pinned=pinned)
    given = cache.publisher, cache.states, cache.evictor, config.max_drafts
    return make(Stepper, cache.tree, rows, *given)


def token_rows(tokens: object, n_rows: int) -> bytes:
    """The token ids of several sequences of equal length, one sequence after the other, as int32.

    Args:
        tokens: integers `[n_rows]` or `[n_rows, n]`: an array, a tensor on the CPU, or lists.
        n_rows: how many sequences.

    Raises:
        ConfigError: token ids that a key refuses, or another number of sequences.
    """
    expect_sequence(tokens)
    try:
        array = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        said = "several sequences have different numbers of them; give as many for each"
        raise ConfigError(
            f"token ids {shown_start(tokens)} are no array of integers: "
            f"{said if 'inhomogeneous' in str(error) else error}"
        ) from error
    if array.ndim not in (1, 2) or len(array) != n_rows:
        raise ConfigError(
            f"token ids of shape {array.shape} for {n_rows} sequences; give as many for each, "
            f"[{n_rows}] or [{n_rows}, n]"
        )
    return token_ids(array.reshape(-1)).astype(np.int32).tobytes()


def _counts(n_computed: object, n_requests: int) -> Ints:
    """A number of tokens per request, or one for all.

    Raises:
        ConfigError: it is none, or there are not as many as requests.
    """
    if type(n_computed) is int and 0 <= n_computed <= MOST_TOKENS:
        return np.full(n_requests, n_computed, np.int64)
    try:
        counts = np.asarray(n_computed)
    except (TypeError, ValueError, RuntimeError):  # lists of several lengths, tensors elsewhere
        counts = np.array(None)
    is_whole = counts.dtype.kind in "iu" or not counts.size
    if (
        not is_whole
        or counts.shape not in ((), (n_requests,))
        or np.minimum.reduce(counts, axis=None, initial=0) < 0
        or np.maximum.reduce(counts, axis=None, initial=0) > MOST_TOKENS
    ):
        raise ConfigError(
            f"step: n_computed {n_computed!r:.40}; give a whole number, 0 or more, or one for each "
            f"of {n_requests} requests"
        )
    return counts.astype(np.int64) if counts.shape else np.full(n_requests, counts, np.int64)
