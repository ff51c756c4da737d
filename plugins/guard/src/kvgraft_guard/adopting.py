"""Checks of slots that an engine takes, gives back, and that requests adopt (N2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvgraft.errors import ContractViolation
from kvgraft.requests.request import Request
from kvgraft_guard.books import FREE, PRIVATE, PROMISED, Reading
from kvgraft_guard.paths import check_not_cleared
from kvgraft_guard.watched import After, Watched
from kvgraft_scheduling.engine_slots import EngineSlots

__all__ = ["Adopting", "GuardedEngineSlots"]


class Adopting:
    """Checks of one cache's `engine_slots`."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.cache, self.tree = watched.cache, watched.tree

    def take(self, component: str, n_slots: int) -> After:
        """The slots come out of the headroom, and are counted (N2, A12)."""
        part = self.tree.by_name.get(component)
        needs = list(self.watched.nothing)
        if part is not None and isinstance(n_slots, int):
            needs[part.index] = n_slots
        self.watched.rooms.expect(needs, host_too=self.watched.write_back)
        before = self._taken()

        def after(slots: Any, was: Reading, now: Reading) -> None:
            given = 0 if slots is None else len(slots)
            if slots is not None and len(np.unique(slots)) != n_slots:
                said = f"{n_slots} slots were asked for, {len(np.unique(slots))} are taken"
                raise ContractViolation("N2", component, said)
            self._check({component: given}, before, was, now)

        return after

    def give_back(self, component: str, slots: Any) -> After:
        """The slots are free, and nothing else is (N2)."""
        self.watched.rooms.expect(self.watched.nothing, host_too=False)
        before = self._taken()

        def after(result: Any, was: Reading, now: Reading) -> None:
            self._check({component: -len(slots)}, before, was, now)
            at = self.tree.by_name[component].index
            if now.counts[at][FREE] - was.counts[at][FREE] != len(slots):
                said = (
                    f"{len(slots)} slots given back, free {was.counts[at]} became {now.counts[at]}"
                )
                raise ContractViolation("N2", component, said)

        return after

    def admit_unpromised(self, request: Request) -> After:
        """It is promised nothing, and gets nothing."""
        self.watched.rooms.expect(self.watched.nothing, host_too=False)
        before = self._taken()

        def after(result: Any, was: Reading, now: Reading) -> None:
            self._check({}, before, was, now)
            check_not_cleared(self.tree, request)
            self.watched.promises.unpromised(request)
            self.watched.shares.remember(request)

        return after

    def adopt(self, request: Request, n_pages: int, slots: Mapping[str, Any]) -> After:
        """The request's next pages are in the slots given, once, of all components (N2)."""
        self.watched.rooms.expect(self.watched.nothing, host_too=False)
        before, first = self._taken(), request.allocated
        tables = self.watched.shares.tables(request)
        given = {name: np.asarray(each, np.int32) for name, each in slots.items()}

        def after(result: Any, was: Reading, now: Reading) -> None:
            self._check({name: -len(each) for name, each in given.items()}, before, was, now)
            later = self.watched.shares.tables(request)
            for component in self.tree.components:
                own = given.get(component.name, np.zeros(0, np.int32))
                had, has = tables[component.index], later[component.index]
                new = has[first * component.slots_per_page :]
                lacks = len(new) - len(own)
                if (
                    not np.array_equal(new[lacks:], own)
                    or (new[:lacks] >= 0).any()
                    or not np.array_equal(has[: len(had)], had)
                ):
                    said = f"a request of {request.prompt} tokens adopted {len(own)} slots for its "
                    said += f"pages from {first} on, and reads {new.tolist()[:8]} there"
                    raise ContractViolation("N2", component.name, said)
            self.watched.shares.remember(request)

        return after

    def allocate_at(self, request: Request, n_tokens: int) -> After:
        """The request's next pages have slots where its reaches need them at their end (N2, I3)."""
        watched, size = self.watched, self.tree.page_size
        first, end = request.allocated, -(-(request.computed + n_tokens) // size)
        boundary = (request.computed + n_tokens) // size
        needs = [
            1
            if component.is_state
            else component.stored_between(first, end) * component.slots_per_page
            for component in self.tree.components
        ]
        watched.rooms.expect(needs, host_too=watched.write_back or watched.homes)
        before = self._taken()
        tables = watched.shares.tables(request)

        def after(given: bool, was: Reading, now: Reading) -> None:  # noqa: FBT001 - a result
            later = watched.shares.tables(request)
            for component in self.tree.components:
                if component.is_state or not given:
                    continue
                size = component.slots_per_page
                had, has = tables[component.index], later[component.index]
                needed = np.zeros(end * size, np.bool_)
                for low, high in (*component.reach_pages.spans(boundary), (boundary, end)):
                    needed[low * size : high * size] = True
                new, wanted = has[len(had) :], needed[len(had) :]
                slots = new[wanted]
                if (
                    not np.array_equal(has[: len(had)], had)
                    or (new[~wanted] >= 0).any()
                    or (slots < 0).any()
                    or len(np.unique(slots)) < len(slots)
                ):
                    said = f"pages [{first}, {end}) have slots {new.tolist()[:8]}, and boundary "
                    said += f"{boundary} needs {np.flatnonzero(needed).tolist()[:8]}"
                    raise ContractViolation("N2", component.name, said)
            if self._taken() != before:
                raise ContractViolation("N2", None, "the engine's own slots changed meanwhile")
            watched.shares.remember(request)

        return after

    def _taken(self) -> list[int]:
        slots = self.cache.engine_slots
        return [slots.n_taken(each.name) for each in self.tree.components]

    def _check(
        self, moved: Mapping[str, int], before: list[int], was: Reading, now: Reading
    ) -> None:
        """The engine has so many slots more of each component; requests keep theirs.

        A promise may fall where a request adopts slots, never rise.
        """
        for component, then, has in zip(self.tree.components, before, self._taken()):
            expected = then + moved.get(component.name, 0)
            counts, later = was.counts[component.index], now.counts[component.index]
            adopted = max(0, then - has) if counts[FREE] == later[FREE] else 0
            private = later[PRIVATE] - counts[PRIVATE]
            if has != expected or private != has - then + adopted:
                said = f"the engine had {then} slots and has {has}, {expected} are right; private "
                said += f"slots went from {counts[PRIVATE]} to {later[PRIVATE]}"
                raise ContractViolation("N2", component.name, said)
            if not 0 <= counts[PROMISED] - later[PROMISED] <= adopted:
                said = f"promises went from {counts[PROMISED]} to {later[PROMISED]}"
                raise ContractViolation("A12", component.name, said)


class GuardedEngineSlots(EngineSlots):
    """An engine's slots, with the guard around each call."""

    def take(self, component: str, n_slots: int) -> Any:
        return self._look("take", super().take, component, n_slots)

    def give_back(self, component: str, slots: Any) -> None:
        self._look("give_back", super().give_back, component, slots)

    def admit(self, request: Request) -> None:
        self._look("admit_unpromised", super().admit, request)

    def adopt(self, request: Request, n_pages: int, slots: Mapping[str, Any]) -> None:
        self._look("adopt", super().adopt, request, n_pages, slots)

    def allocate_at(self, request: Request, n_tokens: int) -> bool:
        given: bool = self._look("allocate_at", super().allocate_at, request, n_tokens)
        return given

    def _look(self, name: str, call: Any, *given: Any) -> Any:
        guard = self.cache.guard
        return call(*given) if guard is None else guard.look(name, call, *given)
