"""A step of the running model: it reads the right data, and its writes stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from kvgraft.errors import LeaseError
from kvgraft.parts import Step
from kvgraft.types import PointKind
from kvgraft_testing.machine.bench import Bench
from kvgraft_testing.machine.brute_force import ModelComponent, Prefix, needed_tokens
from kvgraft_testing.machine.comparing import check_unchanged, plain
from kvgraft_testing.machine.engines import Point
from kvgraft_testing.machine.judging import as_violation
from kvgraft_testing.machine.legality import Pressure
from kvgraft_testing.machine.live import Live, Using
from kvgraft_testing.machine.observing import Snapshot
from kvgraft_testing.machine.predicting import Adopted
from kvgraft_testing.machine.publishing import Tables
from kvgraft_testing.machine.trace import demanded

__all__ = ["Form", "Steps"]

Pages = dict[Prefix, tuple[int, ...]]


MOST_REJECTED = 3
"""Most steps in a row of which nothing is kept."""

EVERY = 3
"""Of so many passes of a request that steps alone, one is given up before it runs."""


class Form(NamedTuple):
    """Tokens that a step gives each request slots for, and how many of them are kept.

    A pass that ends where a state is kept has fewer. Drafts that are `handed` over are in the key
    until the pass is verified; else it gets the accepted ones afterwards.

    A step begins at most one page: the model's evictions do not follow several evict-first pages in
    one call.
    """

    width: int = 1
    accepted: int = 1
    handed: bool = False

    @property
    def has_drafts(self) -> bool:
        """Whether some are rejected."""
        return self.accepted < self.width

    def kept(self, width: int) -> int:
        """Tokens that are kept of a pass of this many."""
        return min(self.accepted, width)

    def n_steps(self, n_tokens: int) -> int:
        """Steps for which the slots of this many tokens suffice."""
        left = max(0, n_tokens - (self.width - self.accepted))
        return left // self.accepted if self.accepted else min(left, 1) * MOST_REJECTED


class Steps:
    """Prefill and decode steps; nothing is computed but stamps."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cache, self.model = bench.cache, bench.model
        self.judge, self.payloads = bench.judge, bench.payloads
        self.publishing = bench.publishing

    def advance(
        self,
        live: Live,
        n_tokens: int,
        *,
        promised_by: str | None,
        fenced: bool = True,
    ) -> bool:
        """Allocate, read the step's inputs, write its results; False if refused.

        `promised_by` is the rule that guarantees room; None if none does. If it is not `fenced`,
        the request ends or is shared at once, which names the fence (B4).
        """
        if not self.open(live, n_tokens, promised_by):
            return False
        self.go_on(live, n_tokens, fenced=fenced)
        return True

    def go_on(self, live: Live, n_tokens: int, *, fenced: bool = True) -> None:
        """The model computes tokens that have slots."""
        live.started = True
        self.bench.steps += 1
        self._read(live)
        self._write(live, live.computed + n_tokens)
        self._computed(live, n_tokens, self.bench.fence if fenced else None)

    def together(self, lives: list[Live], tokens: Sequence[int], form: Form) -> None:
        """One step after the other gives some decoding requests slots for tokens.

        Each but the first notes the tokens of the one before, and takes the next ones' slots: the
        promised ones, and more where there is room. The requests have only the tree's pages in
        common; those of several namespaces have room without evictions.
        """
        kept: list[int] | None = None
        if form.handed:  # all the same: a key has the drafts of the pass before
            tokens = [tokens[0]] * len(tokens)
        for token in tokens:
            widths = self._step(lives, token, form, kept)
            if widths is None:
                return
            # The engine extended some keys before the first step: those refused wait with that.
            goes_on = [
                at
                for at, live in enumerate(lives)
                if widths[at] or len(live.tuple) == live.computed
            ]
            lives = [lives[at] for at in goes_on]
            kept = [form.kept(widths[at]) for at in goes_on]
            if not lives:
                return
        for live, n_tokens in zip(lives, kept or ()):
            self._verify(live, tokens[-1], form, n_tokens)
            if n_tokens:
                self.go_on(live, n_tokens)

    def has_room(self, lives: list[Live], n_tokens: int) -> bool:
        """Whether requests of any namespaces can take so many tokens without an eviction."""
        wanted = Counter[str]()
        for live in lives:
            wanted.update(self._wanted(live, n_tokens))
        room = self.bench.seen.room
        return not any(each.home_is_host for each in self.bench.paged) and all(
            n <= room(name, "device", live.namespace)
            for name, n in wanted.items()
            for live in lives
        )

    def _step(
        self, lives: list[Live], token: int, form: Form, kept: list[int] | None
    ) -> list[int] | None:
        """A step of several, which notes the tokens kept of the one before if there was one.

        Returns the tokens of each that have slots, 0 of those refused; None if one was refused that
        was promised them.
        """
        bench, notes = self.bench, kept is not None
        before, wanted = bench.seen, Counter[str]()
        tables = {live.name: self.publishing.tables(live) for live in lives}
        firsts = {live.name: live.request.allocated for live in lives}
        lasts = {live.name: (live.computed, live.own.last_point) for live in lives}
        skipped = self.publishing.skipped
        promised = [live for live in lives if self._has_slots_left(live, form)]
        widths = []
        for live, n_kept in zip(lives, kept or [0] * len(lives)):
            if notes:
                self._verify(live, token, form, n_kept)
            if n_kept:
                self._pass(live, n_kept)
            widths.append(self._width(live, form))
            if not form.has_drafts:
                live.tuple = (*live.tuple, *[token] * form.width)
                if not notes:
                    live.request.key.extend([token] * form.width)
            wanted.update(self._wanted(live, widths[-1]))
        host: dict[str, int | None] = {
            each.name: wanted[each.name] for each in bench.paged if each.home_is_host
        }

        def opened(step: Step) -> Adopted:
            taken: Adopted = {each.name: {} for each in self.model.components}
            for live in lives:
                was, last_point = lasts[live.name]
                if notes and bench.waited_in_vain:
                    self._skipped(live, was // self.model.page_size, last_point)
                if live.request in step.refused:
                    adopted = self.publishing.went(live, before, tables[live.name], made_room=True)
                else:
                    adopted = self._opened(
                        live, before, tables[live.name], firsts[live.name], skipped
                    )
                for name, pages in (adopted or {}).items():
                    taken[name].update(pages)
            return taken

        step = bench.act(
            "allocate",
            lambda: self._ask(lives, token, form, kept),
            pressure=Pressure(wanted, host, unpins=notes, asks=lives[0].namespace),
            uses=opened,
            by=[
                Using(namespace, tuple(each.retention for each in there))
                for namespace, there in groupby(lives, key=attrgetter("namespace"))
            ],
        )
        kinds = {
            "steps of several": 1,
            "steps across namespaces": len({live.namespace for live in lives}) > 1,
            "drafts": self.has_promised(form),
            "refused in a step of several": len(step.refused),
        }
        bench.counts.update(kinds)
        for at, live in enumerate(lives):
            if live.request in step.refused:
                if live in promised:
                    said = f"a step refused {live.name} of {len(lives)} requests with slots left"
                    self.judge.fail("A7", None, said)
                    return None
                self._refused(live, form.width if notes else 0)
                widths[at] = 0
        self._check_pass(lives, step, widths, form)
        for live, width in zip(lives, widths):
            self._check_taken(live, firsts[live.name], width)
        self._check_rows(lives, step, widths, form)
        for live in lives if bench.resuming.matters else ():
            if live.computed // self.model.page_size > lasts[live.name][0] // self.model.page_size:
                self._check_loosened(live)
        return widths

    def _check_rows(self, lives: list[Live], step: Step, widths: list[int], form: Form) -> None:
        """The step names the slots of those that have some, in their order."""
        having = [(live, width) for live, width in zip(lives, widths) if width]
        for place, (live, width) in enumerate(having):
            self._check_step(live, step, width, place * form.width, form.width)

    def _check_taken(self, live: Live, first: int, width: int) -> None:
        """A pass takes pages for its own tokens: those of rejected drafts are used again (G2)."""
        told, end = live.request.allocated, live.computed + width
        pages = max(first, -(-end // self.model.page_size))
        if told != pages:
            said = f"{live.name} has {told} pages for {end} tokens, and had {first} before"
            self.judge.fail("G2", None, said)

    def _has_slots_left(self, live: Live, form: Form) -> bool:
        """Whether the next step's slots are promised to a request."""
        return form.has_drafts or len(live.tuple) + form.width <= live.prompt + live.reserve

    def _refused(self, live: Live, width: int) -> None:
        """A request without slots in a step, which was to extend its key, is as it was (A5)."""
        live.tuple = live.tuple[: len(live.tuple) - width]
        told, true = live.request.key.n_tokens, len(live.tuple)
        if (told, live.request.computed) != (true, live.computed):
            said = f"{live.request.computed} tokens computed of {told} in its key"
            self.judge.fail("A5", None, f"{live.name} was refused, and has {said}, not {true}")

    def _ask(self, lives: list[Live], token: int, form: Form, kept: list[int] | None) -> Step:
        """The call of a step; the first of some notes nothing."""
        requests, width = [live.request for live in lives], form.width
        named: dict[str, Any] = {"n_tokens": width}
        if self.has_promised(form):
            named = {"n_drafts": width - 1}
        if form.handed:
            named["tokens"] = [[token] * width for _ in requests]
        if kept is None:
            return self.cache.step(requests, n_computed=0, **named)
        if form.has_drafts:
            return self.cache.step(requests, n_computed=kept, fence=self.bench.fence, **named)
        given = [[token] * width for _ in requests]
        return self.cache.step(requests, given, n_tokens=width, fence=self.bench.fence)

    def _check_pass(self, lives: list[Live], step: Step, widths: list[int], form: Form) -> None:
        """It ends where states are kept (G4), and the verified tokens alone are counted (G2)."""
        for live in lives:
            counted = live.request.computed
            if counted != live.computed:
                said = f"{live.name} computed {live.computed} verified tokens, {counted} count"
                self.judge.fail("G2", None, said)
        told = None if step.n_tokens is None else step.n_tokens.tolist()
        wide = widths if self.has_promised(form) else None
        said = f"a step of {form} takes {told} tokens, {wide} up to where states are kept"
        self.judge.expect(told == wide, "G4", None, lambda: said)
        for live, n_tokens in zip(lives, widths if form.handed else ()):
            held = live.request.key.n_tokens - live.computed
            if held != n_tokens:
                said = f"the key of {live.name} has {held} tokens of a pass of {n_tokens}"
                self.judge.fail("G4", None, said)

    def has_promised(self, form: Form) -> bool:
        """Whether slots for the drafts of a step are promised, and it names them as such (G1)."""
        return form.has_drafts and 1 < form.width <= 1 + self.bench.sizes.max_drafts

    def _width(self, live: Live, form: Form) -> int:
        """Tokens of a pass: one with drafts ends where the states of a decode are kept (G4)."""
        if not self.bench.states or not self.has_promised(form):
            return form.width
        apart = self.bench.resuming.decode_pages * self.model.page_size
        return min(form.width, apart - live.computed % apart)

    def _verify(self, live: Live, token: int, form: Form, n_tokens: int) -> None:
        """Of a pass with drafts the key has the accepted tokens alone afterwards."""
        if form.has_drafts:
            self._probe(live, form, n_tokens)
            live.tuple = (*live.tuple, *[token] * n_tokens)
            if form.handed:
                live.request.key.truncate(len(live.tuple))
                if not n_tokens:
                    self._cut_again(live)
            else:
                live.request.key.extend([token] * n_tokens)

    def _probe(self, live: Live, form: Form, n_kept: int) -> None:
        """More tokens than the pass had do not count, nor does a key with rejected drafts (T11)."""
        request, width = live.request, self._width(live, form)
        wrong = {"more tokens than the pass had": width + 1}
        if form.handed and 0 < n_kept < width:
            wrong["drafts in the key that do not count"] = n_kept
        for what, n_computed in wrong.items():
            standing = plain(request)
            try:
                self.cache.step([request], n_tokens=0, n_computed=n_computed)
            except LeaseError:
                check_unchanged(self.judge, "T11", standing, request, live.name)
                continue
            except Exception as error:
                raise as_violation(error, "step") from error
            self.judge.fail("T11", None, f"{what}: a step of {live.name} counts {n_computed}")

    def _cut_again(self, live: Live) -> None:
        """Tokens behind the first cut do not count, where a key grew and was cut again (G2)."""
        request, end = live.request, len(live.tuple)
        request.key.extend([1, 1])
        request.key.truncate(end + 1)
        standing = plain(request)
        try:
            self.cache.step([request], n_tokens=0, n_computed=1)
        except LeaseError:
            check_unchanged(self.judge, "G2", standing, request, live.name)
        except Exception as error:
            raise as_violation(error, "step") from error
        else:
            said = f"{live.name} was cut to {end} tokens, and counts one behind"
            self.judge.fail("G2", None, said)
        request.key.truncate(end)

    def _pass(self, live: Live, n_tokens: int) -> None:
        """The model computes tokens, which the next step notes."""
        live.started = True
        self.bench.steps += 1
        self._read(live)
        self._write(live, live.computed + n_tokens)
        live.computed += n_tokens
        page, rest = divmod(live.computed, self.model.page_size)
        if self.bench.states:
            self._stand(live, 0 if rest else page)

    def _wanted(self, live: Live, n_tokens: int) -> dict[str, int]:
        """Slots that a request takes for its next tokens, states included."""
        bench, size, first = self.bench, self.model.page_size, live.request.allocated
        end = max(first, -(-(live.computed + n_tokens) // size))
        wanted = {
            each.name: each.stored_pages(first, end, size) * each.slots_per_page
            for each in bench.paged
        }
        # The live state at first; later the copy of a state that is due to be kept.
        return wanted | {each.name: 1 for each in bench.states}

    def open(self, live: Live, n_tokens: int, promised_by: str | None) -> bool:
        """Slots for the next tokens; whether there are. `promised_by` as in `advance`."""
        bench, request = self.bench, live.request
        standing = plain(request) if promised_by is None else None
        given = self._allocate(live, n_tokens)
        if given and self._is_stepped(live) and bench.steps % EVERY == 0:
            self._give_up(live, n_tokens)
            given = self._allocate(live, n_tokens)
        if not given:
            if promised_by is not None:
                said = (
                    f"{n_tokens} tokens of {live.name} refused, for which there was room; "
                    f"it was admitted with {demanded(live.request)}"
                )
                self.judge.fail(promised_by, None, said)
            bench.counts["beyond reservation refused"] += 1
            check_unchanged(self.judge, "A5", standing, request, live.name)
        return given

    def _allocate(self, live: Live, n_tokens: int) -> bool:
        """Slots for the next tokens; states kept go to the tree (I10)."""
        bench, own = self.bench, live.own
        first, wanted = live.request.allocated, self._wanted(live, n_tokens)
        host: dict[str, int | None] = {
            each.name: wanted[each.name] for each in bench.paged if each.home_is_host
        }
        pressure = Pressure(device=wanted, host=host, asks=live.namespace)
        before, tables = bench.seen, self.publishing.tables(live)
        skipped = self.publishing.skipped

        def opened(given: object) -> Adopted | None:
            if given is None:
                return None
            if not given:
                return self.publishing.went(live, before, tables, made_room=True)
            return self._opened(live, before, tables, first, skipped)

        given = bench.act(
            "allocate",
            lambda: self._slots(live, n_tokens),
            pressure=pressure,
            uses=opened,
            by=[live.using],
        )
        if bench.resuming.matters:
            self.publishing.check(live, live.anchor, own.based)
        return given

    def _opened(
        self, live: Live, before: Snapshot, tables: Tables, first: int, skipped: Counter[PointKind]
    ) -> Adopted | None:
        """A request has slots from page `first` on; what it left for them."""
        adopted = self.publishing.went(live, before, tables, made_room=True)
        size, new = self.model.page_size, range(first, live.request.allocated)
        for each in self.bench.paged:
            live.own.private[each.name] |= {
                page for page in new if each.stored_pages(page, page + 1, size)
            }
        self.publishing.settle(live, before, skipped)
        return adopted

    def _computed(self, live: Live, n_tokens: int, fence: Point | None) -> None:
        """Tokens exist: pages now behind the reaches go to the tree (I9, I12)."""
        bench, own, resuming = self.bench, live.own, self.bench.resuming
        request, size = live.request, self.model.page_size
        before, tables = bench.seen, self.publishing.tables(live)
        was, last_point = live.computed // size, own.last_point
        live.computed += n_tokens
        page, rest = divmod(live.computed, size)
        if bench.states:
            self._stand(live, 0 if rest else page)

        def uses(result: object) -> Adopted | None:
            del result
            if bench.waited_in_vain:
                self._skipped(live, was, last_point)
            return self.publishing.went(live, before, tables)

        bench.act(
            "computed",
            lambda: self._note(live, n_tokens, fence),
            pressure=Pressure(device={}, asks=live.namespace),
            uses=uses,
            by=[live.using],
        )
        for (name, tier), books in bench.seen.books.items():
            cost = self._joined(before, name, tier)
            was_room = before.headroom(name, tier, live.namespace)
            if bench.seen.headroom(name, tier, live.namespace) + cost < was_room:
                said = f"{tier}: {before.books[name, tier]} became {books} as {live.name} went on"
                self.judge.fail("I12", name, said)
        if page > was and live.computed <= live.prompt and live.computed < request.total:
            for name, pages in resuming.behind(own, page).items():
                if pages:
                    said = f"{live.name} keeps pages {pages} behind its reach at page {page}"
                    self.judge.fail("I9", name, said)
        if resuming.matters:
            bench.counts["left behind"] += page > was
            if page > was:
                self._check_loosened(live)
            self.publishing.check(live, live.anchor, own.based)
        told = f"{live.name} computed {live.computed} verified tokens, {request.computed} count"
        self.judge.expect(live.computed == request.computed, "G2", None, lambda: told)

    def _check_loosened(self, live: Live) -> None:
        """Nodes that a bounded reach has passed whole are not pinned for it any longer (L7)."""
        receipt = live.request.receipt
        page = self.bench.resuming.reached_from(live.prompt, live.computed)
        for component, segment in zip(self.model.components, receipt.segments):
            needed, node = self.model.pages(component, page), receipt.anchor
            while segment and node.parent is not None:
                pages = range(node.start, node.end)
                if component.is_state:
                    held = node is receipt.anchor
                else:
                    held = any(low < node.end and node.start < high for low, high in segment)
                if held and needed.isdisjoint(pages):
                    said = f"{live.name} is at page {page} and still pins pages {pages}: {segment}"
                    self.judge.fail("L7", component.name, said)
                node = node.parent

    def _slots(self, live: Live, n_tokens: int) -> bool:
        """Slots by `allocate`, taken and adopted, or in a step of a request alone.

        In a step its key has the tokens already.
        """
        if not self._is_stepped(live):
            return self._adopted(live, n_tokens) or self.cache.allocate(live.request, n_tokens)
        step = self.cache.step([live.request], n_tokens=n_tokens, n_computed=0)
        if step.refused:
            self.cache.step([live.request], n_tokens=0)  # nothing of a refused pass is computed
            return False
        self._check_step(live, step, n_tokens, 0, n_tokens)
        return True

    def _adopted(self, live: Live, n_tokens: int) -> bool:
        """Slots that the engine took and the request adopts, if there is room for both (N2)."""
        bench, size, first = self.bench, self.model.page_size, live.request.allocated
        end = -(-(live.computed + n_tokens) // size)
        pages = {each.name: each.stored_pages(first, end, size) for each in bench.paged}
        needs = {each.name: pages[each.name] * each.slots_per_page for each in bench.paged}
        headroom = {name: self.cache.tree.component(name).device.headroom for name in needs}
        if (
            not live.adopts
            or end <= first
            or any(needs[name] + 1 > headroom[name] for name in needs)
        ):
            return False
        slots = self.cache.engine_slots
        given: dict[str, Any] = {name: slots.take(name, needs[name]) for name in needs}
        for name, own in given.items():
            if own is None:
                said = f"{needs[name]} slots are in the headroom, none are taken"
                self.judge.fail("N2", name, said)
                return False
        self.cache.check_integrity()
        slots.adopt(live.request, end - first, given)
        for name, own in given.items():
            has = self.cache.table(live.request, name, first).tolist()
            if has[: len(own)] != own.tolist() or slots.n_taken(name):
                said = f"{live.name} adopted {own.tolist()} and reads {has}"
                self.judge.fail("N2", name, said)
        self._refuses_twice(live, end - first, given)
        bench.counts["adopted"] += 1
        return True

    def _refuses_twice(self, live: Live, n_pages: int, given: dict[str, Any]) -> None:
        """Adopted slots are the request's: the engine cannot give them back or adopt them again."""
        slots, name = self.cache.engine_slots, max(given, key=lambda name: len(given[name]))
        wrong: dict[str, Callable[[], object]] = {
            "give_back": lambda: slots.give_back(name, given[name]),
            "adopt": lambda: slots.adopt(live.request, n_pages, given),
        }
        for call, run in wrong.items():
            try:
                run()
            except LeaseError:
                continue
            except Exception as error:
                raise as_violation(error, call) from error
            self.judge.fail("N2", name, f"{call} of slots that {live.name} adopted before")

    def _give_up(self, live: Live, n_tokens: int) -> None:
        """The pass does not run, and a larger one is refused: no token of both counts (A5, G2)."""
        request, size = live.request, self.model.page_size
        pools = {
            each: self.bench.seen.books[each.name, "device"].capacity for each in self.bench.paged
        }
        more, first = 1 + max(pools.values(), default=0), request.allocated
        if not any(
            each.stored_pages(first, first + more, size) * each.slots_per_page > capacity
            for each, capacity in pools.items()
        ):
            return
        refused = self.cache.step([request], n_tokens=n_tokens + more * size, n_computed=0).refused
        self.judge.expect(
            refused == [request], "A5", None, lambda: f"{more} pages more of {live.name} fit"
        )
        self.cache.step([request], n_tokens=0)
        counted = f"{live.name} computed {live.computed} tokens, {request.computed} count"
        self.judge.expect(request.computed == live.computed, "G2", None, lambda: counted)

    def _note(self, live: Live, n_tokens: int, fence: Point | None) -> None:
        """Tokens exist, by `computed` or in a step."""
        if self._is_stepped(live):
            self.cache.step([live.request], n_tokens=0, n_computed=n_tokens, fence=fence)
        else:
            self.cache.computed(live.request, n_tokens, fence)

    def _is_stepped(self, live: Live) -> bool:
        """Whether a request decodes in steps, and has come that far."""
        return live.steps and live.request.computed >= live.prompt

    def _check_step(self, live: Live, step: Step, n_tokens: int, first: int, width: int) -> None:
        """The step names the slots that the tables name (T9), from entry `first` on; then none."""
        size, start = self.model.page_size, live.request.computed
        for component in self.bench.paged:
            table = self.cache.table(live.request, component.name)
            row = self.cache.table_rows(component.name)[live.request.row, : len(table)]
            mapping = step.slot_mapping.get(component.name)
            if mapping is not None:
                mapping = mapping[first : first + width]
            slots = [
                int(table[at // size * component.slots_per_page])
                for at in range(start, start + n_tokens)
            ]
            wanted = [
                -1 if slot < 0 else slot * size + (start + at) % size
                for at, slot in enumerate(slots)
            ] + [-1] * (width - n_tokens)
            self.judge.expect(
                row.tolist() == table.tolist() and (mapping is None or mapping.tolist() == wanted),
                "T9",
                component.name,
                lambda: f"the row of {live.name} is {row.tolist()}, its table {table.tolist()}",  # noqa: B023
            )
        for component in self.bench.states:
            slot = self.cache.state_slot(live.request, component.name)
            told = int(step.state_slots[component.name][first // width])
            self.judge.expect(
                told == slot,
                "T9",
                component.name,
                lambda: f"a step says that {live.name} has state {told}, it has {slot}",  # noqa: B023
            )

    def _skipped(self, live: Live, page: int, last_point: int) -> None:
        """Where a wait for room was in vain, states behind `page` are no points (I11)."""
        own = live.own
        skipped = {at for at in own.captured if at > page and at not in live.request.points}
        own.points -= skipped
        own.captured -= skipped
        own.last_point = max([last_point, *(at for at in own.captured if at > page)])

    def _joined(self, before: Snapshot, name: str, tier: str) -> int:
        """Slots of others' pages that a request pins beside its own of the same tokens.

        Its tables stay as they are; so those pages cost headroom, though no promise.
        """
        component = self.model.component(name)
        if not component.is_prefix_closed:
            return 0
        was, held = before.held[name], self.bench.seen.held[name]
        if tier == "device":
            pages = was.device.keys() & (held.device_pinned - was.device_pinned)
        else:
            pages = was.host.keys() & (held.host_pinned - was.host_pinned)
        return len(pages) * component.slots_per_page

    def _stand(self, live: Live, page: int) -> None:
        """The live states stand at a boundary, or between two: are they to be kept?"""
        own, resuming = live.own, self.bench.resuming
        live.standing = 0
        if page in live.due:
            live.due.discard(page)
            own.last_point = page
            live.standing, live.standing_as = page, "point"
        elif page and live.computed < live.prompt:
            if resuming.is_on_grid(own, page):
                live.standing, live.standing_as = page, "grid"
            elif page - max(own.last_point, own.last_left) >= resuming.state_spacing:
                live.standing, live.standing_as = page, "left"
        elif page and live.request.total > live.prompt and not page % resuming.decode_pages:
            live.tracked = page

    def _read(self, live: Live) -> None:
        """The data that the next token attends to is there and right (M7, M8, R5, L6)."""
        size = self.model.page_size
        for component in self.bench.paged:
            tokens = needed_tokens(component.parts, live.computed)
            numbers = sorted({token // size for token in tokens})
            tiers = ("device", "host") if component.home_is_host else ("device",)
            for tier in tiers:
                table = self.publishing.table(live, component, tier)
                pages: Pages = {}
                for page in numbers:
                    slots = table[page] if page < len(table) else ()
                    if min(slots, default=-1) < 0:
                        self._lacks(live, component, page, tier)
                        continue
                    end = min((page + 1) * size, live.computed)
                    pages[live.namespace, live.tuple[:end]] = slots
                self._check(live, component, pages, tier)
        for component in self.bench.states:
            if live.computed:
                slot = self.cache.state_slot(live.request, component.name)
                self._check(live, component, {self._here(live): (slot,)}, "device")

    def _here(self, live: Live) -> Prefix:
        return (live.namespace, live.tuple[: live.computed])

    def _lacks(self, live: Live, component: ModelComponent, page: int, tier: str) -> None:
        rule = "R5" if page < live.anchor else "L6"
        said = f"{live.name} has no {tier} slot for page {page}, which it needs at {live.computed}"
        self.judge.fail(rule, component.name, said)

    def _check(self, live: Live, component: ModelComponent, pages: Pages, tier: str) -> None:
        self.payloads.read(component, tier, [slot for slots in pages.values() for slot in slots])
        wrong = self.payloads.wrong(component, tier, pages)
        if wrong is None:
            return
        anchor = live.anchor * self.model.page_size
        if component.is_state:
            rule = "M8" if live.computed == anchor else "T9"
        else:
            rule = "M7" if len(wrong.prefix[1]) <= anchor else "T9"
        self.judge.fail(rule, component.name, f"{live.name}: {tier} {wrong}")

    def _write(self, live: Live, end: int) -> None:
        """Compute tokens up to `end` into the request's slots."""
        size = self.model.page_size
        for component in self.bench.paged:
            tiers = ("device", "host") if component.home_is_host else ("device",)
            for tier in tiers:
                table = self.publishing.table(live, component, tier)
                for page in range(live.computed // size, -(-end // size)):
                    prefix = (live.namespace, live.tuple[: min((page + 1) * size, end)])
                    slots = table[page] if page < len(table) else ()
                    if not component.stored_pages(page, page + 1, size):
                        if max(slots, default=0) >= 0:
                            said = f"{live.name} has {tier} slots {slots} for page {page}, which "
                            self.judge.fail("A1", component.name, f"{said}no boundary needs")
                        continue
                    if len(slots) != component.slots_per_page or min(slots) < 0:
                        self._lacks(live, component, page, tier)
                        continue
                    self.payloads.write(component, tier, prefix, slots, self.bench.steps)
        for component in self.bench.states:
            slot = self.cache.state_slot(live.request, component.name)
            prefix = (live.namespace, live.tuple[:end])
            self.payloads.write(component, "device", prefix, [slot], self.bench.steps)
