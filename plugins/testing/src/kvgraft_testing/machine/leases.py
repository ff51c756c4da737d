"""Checks of leases: the deepest boundary, or the reason for less (M1 to M9, A12, R8)."""

from __future__ import annotations

from kvgraft.requests.request import Limited, Request
from kvgraft_observe.explaining import Explanation
from kvgraft_testing.machine.bench import Bench
from kvgraft_testing.machine.brute_force import Prefix
from kvgraft_testing.machine.hooks import HookCall, locks, matches
from kvgraft_testing.machine.live import Live
from kvgraft_testing.machine.observing import Snapshot
from kvgraft_testing.machine.predicting import Prediction

__all__ = ["Leases"]


class Leases:
    """Compares leases with the model's."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.model, self.judge = bench.model, bench.judge
        self.predictor = bench.predictor
        self._finalizers = sum(
            each.finalize_match_result is not None for each in bench.cache.mounted
        )

    def limit(self, tokens: int) -> int:
        """The deepest boundary a prompt may resume from: one token is left to compute (M2)."""
        return (tokens - 1) // self.model.page_size

    def matched(self, calls: list[HookCall]) -> list[HookCall]:
        """Of the hook calls of one operation, those about its first match.

        All hooks are called in turn, and again as long as one of them shortens it.
        """
        asked = [call for call in calls if call.hook == "finalize_match_result"]
        said: list[HookCall] = []
        while asked:
            turn, asked = asked[: self._finalizers], asked[self._finalizers :]
            said += turn
            if not any(
                call.answer and call.answer.limit_pages < call.query.anchor for call in turn
            ):
                break
        return said

    def predict(
        self, before: Snapshot, sequence: Prefix, limit: int, calls: list[HookCall]
    ) -> Prediction:
        """The boundary a request gets, with components' answers taken into account."""
        limits = [answer.limit_pages for _, _, answer in matches(self.matched(calls)) if answer]
        return self.predictor.lease(before, sequence, limit, limits)

    def check(self, live: Live, before: Snapshot, limit: int, calls: list[HookCall]) -> None:
        """The lease is the model's (M1 to M5), or says why not."""
        request, size, expect = live.request, self.model.page_size, self.judge.expect
        self._check_hooks(live, before, limit, calls)
        found = self.predict(before, live.sequence, limit, calls)
        locked = locks(calls, found.anchor)
        if request.limited is Limited.CROWDED:
            self.bench.counts["crowded"] += 1
            expect(
                not request.anchor_tokens, "M7", None, lambda: f"crowded at {request.anchor_tokens}"
            )
            self._check_crowded(live, before, found, locked)
            return
        anchor, on_device = request.anchor_tokens, request.device_tokens
        says = f"the model says {found._asdict()}, in pages of {size}"
        expect(anchor % size == 0, "M2", None, lambda: f"anchored at {anchor}, not a whole page")
        expect(anchor < live.prompt, "M2", None, lambda: f"anchored at {anchor} of {live.prompt}")
        expect(
            (request.limited is Limited.NO_COPY) == found.no_copy,
            "M8",
            None,
            lambda: f"limited: {request.limited}; {says}",
        )
        expect(
            (request.limited is Limited.RECOMPUTE) == found.recomputes,
            self._rule_of_choice(request, found),
            None,
            lambda: f"limited: {request.limited}, {on_device} on device; {says}",
        )
        rule = "T11" if self._elsewhere(before, live, found.anchor, anchor) else "M1"
        expect(anchor == found.anchor * size, rule, None, lambda: f"anchored at {anchor}; {says}")
        expect(
            on_device == found.device * size, "M3", None, lambda: f"{on_device} on device; {says}"
        )
        wanted = dict.fromkeys(self.predictor.slot_nbytes, 0)
        if found.anchor > found.device:
            live.locked = locked
            missing = self.predictor.missing_pages(before, live.sequence, found.anchor, locked)
            wanted = self.predictor.slots(missing)
            self.bench.counts["host hits"] += 1
        for part in request.components:
            name, n_slots = part.component.name, part.host_slots
            if n_slots != wanted[name]:
                said = f"{n_slots} host hits at {anchor}, the model counts {wanted[name]}"
                self.judge.fail("M4", name, said)

    def _rule_of_choice(self, request: Request, found: Prediction) -> str:
        """The rule broken where a load is skipped, or not, against the model.

        That is the choice itself only if it was between the right boundaries.
        """
        if request.device_tokens != found.device * self.model.page_size:
            return "M3"
        return "R8" if found.device < found.deepest else "M1"

    def _elsewhere(self, before: Snapshot, live: Live, known: int, anchor: int) -> bool:
        """Whether a request resumes at data that only another namespace has."""
        tokens = live.tuple[:anchor]
        return anchor > known * self.model.page_size and any(
            page[1] == tokens and page[0] != live.namespace for page in before.known()
        )

    def check_boundaries(
        self, live: Live, before: Snapshot, limit: int, calls: list[HookCall]
    ) -> None:
        """The resume points ahead are those of the model, and states are captured there (I10)."""
        size, resuming = self.model.page_size, self.bench.resuming
        anchor = live.request.anchor_tokens // size
        asked = {live.mark // size} if live.mark else set()
        for _, _, answer in matches(self.matched(calls)):
            if answer is not None:
                asked.update(answer.checkpoint_pages)
        known = self.known(before, live.sequence, limit)
        due = resuming.ahead(live.prompt, anchor, known, asked)
        given = set(live.request.points)
        said = f"resuming at {anchor}, known are {known}, asked is {asked}, in pages"
        self.judge.expect(
            given == due,
            "I10",
            None,
            lambda: f"resume points of {live.name} are at {given}, not {due}; {said}",
        )
        captured = set(live.request.checkpoints)
        self.judge.expect(
            captured == (due if resuming.states else set()),
            "M5",
            None,
            lambda: f"states are captured at {captured}, resume points are at {due}; {said}",
        )

    def known(self, seen: Snapshot, sequence: Prefix, limit: int) -> int:
        """The depth, in pages, to which others have computed a sequence, with every page there."""
        pages = seen.known()
        there = [seen.readable(each) for each in self.bench.resuming.prefix_closed]
        page = 0
        while page < limit:
            prefix = self.model.prefix(*sequence, page)
            if prefix not in pages or any(prefix not in each for each in there):
                break
            page += 1
        return page

    def _check_hooks(self, live: Live, before: Snapshot, limit: int, calls: list[HookCall]) -> None:
        """Hooks get right arguments, and no answer lengthens the match (M4, M5)."""
        asked = matches(self.matched(calls))
        live.views = [view for _, view, _ in asked]
        if not asked:
            return
        found = self.predictor.found(before, live.sequence, limit)
        if self.predictor.cannot_copy:
            found = Prediction(0, 0, 0)
        for name, view, answer in asked:
            hits = 0
            if found.device < found.deepest:
                missing = self.predictor.missing_pages(before, live.sequence, found.deepest, {})
                hits = self.predictor.slots(missing)[name]
            told = (view.anchor, view.device_anchor, view.limit, view.host_slots)
            true = (found.deepest, found.device, limit, hits)
            if told != true:
                rule = "M4" if told[:3] == true[:3] else "M1"
                said = f"finalize_match_result was told {view}; the model says {true}"
                self.judge.fail(rule, name, said)
            if answer is None:
                continue
            if min((answer.limit_pages, *answer.checkpoint_pages)) < 0:
                self.judge.fail("M5", name, f"finalize_match_result answered {answer} to {view}")
            if not 0 <= answer.limit_pages <= found.deepest:
                said = f"finalize_match_result answered {answer} to {view}"
                self.judge.fail("M5", name, said)
            if answer.limit_pages < found.deepest:
                self.bench.counts["shortened by a hook"] += 1
                found = self.predictor.found(before, live.sequence, answer.limit_pages)

    def _check_crowded(
        self, live: Live, before: Snapshot, found: Prediction, locked: dict[str, set[int]]
    ) -> None:
        """Pinning the match would really have taken promised slots (A12)."""
        for component in self.model.components:
            held = before.held[component.name]
            pages = set(self.model.prefixes(component, live.sequence, found.anchor))
            for page in locked.get(component.name, ()):
                pages.add(self.model.prefix(live.namespace, live.tuple, page))
            for tier, cells, pinned in (
                ("device", held.device, held.device_pinned),
                ("host", held.host, held.host_pinned),
            ):
                books = before.books.get((component.name, tier))
                if books is None:
                    continue
                moved = sum(page in cells and page not in pinned for page in pages)
                room = before.headroom(component.name, tier, live.namespace)
                if moved * component.slots_per_page > room:
                    return
        self.judge.fail("A12", None, f"limited: {live.request.limited}, but no pool lacks headroom")

    # -- explain

    def check_explanation(
        self, sequence: Prefix, seen: Snapshot, limit: int, told: Explanation
    ) -> None:
        """`explain` agrees with the model, component by component (M9)."""
        size = self.model.page_size
        found = self.predictor.found(seen, sequence, limit)
        self.judge.expect(
            (told.anchor, told.device_anchor) == (found.deepest * size, found.device * size),
            "M9",
            None,
            lambda: f"explain says {told}; the model says {found._asdict()}, in pages of {size}",
        )
        known_pages = seen.known()
        known = 0
        while known < limit and self.model.prefix(*sequence, known) in known_pages:
            known += 1
        self.judge.expect(
            told.known == known * size,
            "M9",
            None,
            lambda: f"explain knows {told.known} tokens, the model {known * size}",
        )
        for reason in told.components:
            component = self.model.component(reason.component)
            for accepts, present in (
                (reason.accepts, seen.readable(component)),
                (reason.device_accepts, seen.on_device(component)),
            ):
                deepest = next(
                    boundary
                    for boundary in range(known, -1, -1)
                    if self.model.accepts(component, present, sequence, boundary)
                )
                if accepts != deepest * size:
                    said = f"explain says {reason}; the model says {deepest * size}"
                    self.judge.fail("M9", reason.component, said)
