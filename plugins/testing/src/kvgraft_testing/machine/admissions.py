"""Checks of admission's answers, and that refusals change nothing (A5 to A10)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvgraft.admission import Outcome
from kvgraft.cache import Cache
from kvgraft.tree.keys import TokenKey
from kvgraft.types import PointKind
from kvgraft_testing.machine.bench import Bench
from kvgraft_testing.machine.comparing import LEASE, check_unchanged, pins
from kvgraft_testing.machine.judging import as_violation
from kvgraft_testing.machine.live import Live
from kvgraft_testing.machine.setups import engine_for, open_cache

__all__ = ["Admissions"]


class Admissions:
    """Compares decisions and chunks with the request's demands."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cache, self.model, self.judge = bench.cache, bench.model, bench.judge
        self._empty: Cache | None = None

    def left_alone(
        self, live: Live, standing: dict[str, Any], pinned: list[tuple[Any, ...]] | None
    ) -> None:
        """A refused request is unchanged, and so is the tree; `pinned` if not matched again.

        If it may be admitted later, a chunk that could never fit has shrunk to whole pages (A6),
        and points whose states could never fit are left out of its demand.
        """
        request, name, size = live.request, live.name, self.model.page_size
        free = (
            {"chunk", "checkpoints", "points_left_out", "keeps_decoded", "draft_pages"}
            if pinned is not None
            else set(LEASE)
        )
        if live.waits or standing["deferred"]:
            free |= {"deferred", "deferrals_left"}
        check_unchanged(self.judge, "A9", standing, request, name, free)
        if pinned is None:
            return
        chunk = standing["chunk"]
        shrunk = 0 < request.chunk < chunk and not request.chunk % size
        self.judge.expect(
            shrunk or request.chunk == chunk,
            "A6",
            None,
            lambda: f"{name} was not admitted, its chunk went from {chunk} to {request.chunk}",
        )
        self._kept(live, "A9")
        now = pins(self.cache)
        self.judge.expect(
            now == pinned, "A9", None, lambda: f"refusing {name} moved pins: {pinned} to {now}"
        )

    def admitted(self, live: Live, skipped: Counter[PointKind]) -> None:
        """A request was admitted; `skipped` points were counted before."""
        request = live.request
        live.admitted = True
        kept = self._kept(live, "A10")
        demands = {part.component.name: part.demand for part in request.components}
        for component in self.bench.states:
            # The live state, copied from the prefix if there is one (M8), and one per boundary.
            demand, least = demands[component.name], 1 + len(kept)
            if demand.now + demand.later < least:
                said = f"{demand}, {live.name} takes {least} states"
                self.judge.fail("A10", component.name, said)
        self._give_up(live, kept, skipped)
        self._check_drafts(live)
        chunk = request.chunk
        self.judge.expect(chunk >= 1, "A6", None, lambda: f"a chunk of {chunk} tokens")
        if chunk < min(live.chunk, live.prompt - live.computed):
            self.judge.expect(
                chunk % self.model.page_size == 0,
                "A6",
                None,
                lambda: f"a chunk of {chunk} tokens, not whole pages",
            )
            self.bench.counts["chunk shrunk"] += 1

    def _kept(self, live: Live, rule: str) -> set[int]:
        """The boundaries that states will be captured at: all, or those of most use.

        To a repetition that is the deepest, and the prompt's end is of none.
        """
        kept = set(live.request.checkpoints)
        repeat = (live.prompt - 1) // self.model.page_size
        useful = sorted(live.due, key=lambda page: (page <= repeat, page), reverse=True)
        self.judge.expect(
            kept == set(useful[: len(kept)]),
            rule,
            None,
            lambda: f"states due at {kept}, asked was {live.due}",
        )
        return kept

    def _give_up(self, live: Live, kept: set[int], skipped: Counter[PointKind]) -> None:
        """An admitted request is without points whose states could never fit, and says so (I11).

        One more would not fit: a pool is full with the request's own states and the one that its
        match pins.
        """
        # Matched again in this call, it may have been without some before the model saw them.
        live.kinds.update(live.request.skipped)
        left_out = live.due - kept | {page for page, _ in live.request.skipped}
        where = f"{live.name} is admitted without states at {left_out}"
        if self.bench.states:
            self.bench.publishing.check_skipped(live, skipped, left_out, where)
        live.own.points -= live.due - kept
        if kept != live.due and self.cache.arenas is None:
            demands = {part.component.name: part.demand for part in live.request.components}
            spare = [
                self.bench.seen.ceiling(state.name, "device", live.namespace)
                - demands[state.name].now
                - demands[state.name].later
                for state in self.bench.states
            ]
            self.judge.expect(
                min(spare) <= 1,
                "I11",
                None,
                lambda: f"{live.name} captures {kept} of {live.due} with {spare} slots to spare",
            )
        live.due = kept
        points = set(live.request.points)
        self.judge.expect(
            points == live.own.points,
            "I10",
            None,
            lambda: f"{live.name} keeps points {points} and captures states at {kept}",
        )

    def _check_drafts(self, live: Live) -> None:
        """A request that decodes is promised pages for drafts, unless they could never fit (G1)."""
        request, bench = live.request, self.bench
        pages = -(-bench.sizes.max_drafts // self.model.page_size) if live.reserve else 0
        fits = request.chunk == live.chunk and self.cache.arenas is None
        if request.draft_pages or not fits:
            pages = min(pages, request.draft_pages)
        elif pages:
            # Its own pages, and those of its prefix that it pins.
            needs = {
                part.component.name: part.demand.now + part.demand.later
                for part in request.components
            }
            lacking = [
                each.name
                for each in bench.paged
                for tier in (("device", "host") if each.home_is_host else ("device",))
                if needs[each.name] + (pages + live.anchor) * each.slots_per_page
                > bench.seen.ceiling(each.name, tier, live.namespace)
            ]
            pages = 0 if lacking else pages
        said = f"{live.name} is promised {request.draft_pages} pages for drafts, not {pages}"
        self.judge.expect(request.draft_pages == pages, "G1", None, lambda: said)

    def alone(self, live: Live) -> Outcome:
        """The answer of an empty cache of the same configuration to the request."""
        if self._empty is None:
            bench = self.bench
            self._empty = open_cache(bench.setup, bench.sizes, engine_for(bench.setup.device))
        try:
            request = self._empty.begin(
                TokenKey(live.tuple[: live.prompt], live.namespace),
                reserve=live.reserve,
                chunk=live.chunk,
            )
            outcome = self._empty.admit(request).outcome
            if outcome is Outcome.DEFERRED and self._empty.arenas is not None:
                self._empty.poll()
                outcome = self._empty.admit(request).outcome
            self._empty.abort(request)
        except Exception as error:
            raise as_violation(error, "admit in an empty cache") from error
        return outcome

    def end_of_chunk(self, live: Live, n_tokens: int) -> None:
        """A chunk ends the prompt or a page, if it reaches one, and passes no state to keep."""
        size, end = self.model.page_size, live.computed + n_tokens
        whole = end == live.prompt or not end % size or end // size * size <= live.computed
        said = f"{live.name} at {live.computed} of {live.prompt} gets a chunk of {n_tokens}"
        self.judge.expect(whole, "A6", None, lambda: f"{said}, with pages of {size}")
        passed = [page for page in live.due if live.computed < page * size < end]
        name = self.bench.states[0].name if self.bench.states else None
        self.judge.expect(
            not passed, "M5", name, lambda: f"{said}, states are to be kept at pages {passed}"
        )
