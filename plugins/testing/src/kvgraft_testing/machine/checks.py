"""Checks between two snapshots, for every operation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvgraft.requests.components import RequestState
from kvgraft.requests.request import ADMITTED
from kvgraft_testing.machine.brute_force import BruteForce, ModelComponent, Prefix
from kvgraft_testing.machine.engines import PromptedTransferEngine
from kvgraft_testing.machine.judging import Judge
from kvgraft_testing.machine.live import Live
from kvgraft_testing.machine.observing import ComponentView, Snapshot
from kvgraft_testing.machine.payloads import Payloads
from kvgraft_testing.machine.predicting import Adopted

__all__ = [
    "Gains",
    "check_accounts",
    "check_closure",
    "check_flights",
    "check_hits",
    "check_payloads",
    "check_promises",
]


@dataclass
class Gains:
    """Data that an operation may have brought.

    Attributes:
        inserted: the data the tree must have adopted.
        remade: it made room on DEVICE first, so an unpinned page may have gone and come back.
        loads_may_end: transfers to DEVICE may have been acknowledged.
        backups_may_end: the same of those to HOST; room may have been made there.
        goes_on: whether the inserting request runs on, and leaves the inserted data behind.
    """

    inserted: Adopted
    remade: bool
    loads_may_end: bool
    backups_may_end: bool
    goes_on: bool = False

    def check_moves(self, judge: Judge, before: Snapshot, after: Snapshot) -> None:
        """Data that stays does not move (I2, I4)."""
        for name, held in after.held.items():
            self._check_moves(judge, name, before.held[name], held)

    def check(self, judge: Judge, before: Snapshot, after: Snapshot) -> None:
        """Data appears by an insert or an acknowledged transfer (B3)."""
        for name, held in after.held.items():
            old = before.held[name]
            gained = held.device.keys() - old.device.keys()
            mine = self.inserted.get(name, {})
            allowed = old.arriving if self.loads_may_end else set()
            unasked = gained - mine.keys() - allowed
            if unasked:
                elsewhere = {tokens for _, tokens in mine} & {tokens for _, tokens in unasked}
                judge.fail(
                    "T11" if elsewhere else "B3",
                    name,
                    f"gained {unasked} on device, where {allowed or 'nothing'} was due",
                )
            self._check_adopted(judge, name, held, mine)
            if not self.backups_may_end:
                unasked = held.host.keys() - old.host.keys() - mine.keys()
                if unasked:
                    judge.fail("B3", name, f"gained {unasked} on host, where no copy had ended")

    def _check_moves(
        self, judge: Judge, name: str, old: ComponentView, held: ComponentView
    ) -> None:
        for tier, now, then, pinned in (
            ("device", held.device, old.device, old.device_pinned),
            ("host", held.host, old.host, old.host_pinned),
        ):
            for page, slots in then.items():
                if now.get(page, slots) == slots:
                    continue
                if self.remade and self.inserted and page not in old.device_pinned:
                    continue
                if self.backups_may_end and tier == "host" and page not in old.host_pinned:
                    continue
                judge.fail(
                    "I4" if page in pinned else "I2",
                    name,
                    f"{page} moved on {tier} from slots {slots} to {now[page]}",
                )

    def _check_adopted(
        self,
        judge: Judge,
        name: str,
        held: ComponentView,
        mine: dict[Prefix, tuple[int, ...] | None],
    ) -> None:
        for page, slots in mine.items():
            if page not in held.device:
                if not self.remade:
                    # A state has no slot of its own in the offer: it was to be donated.
                    rule = "I7" if slots is None else "I1"
                    if self.goes_on:
                        rule = "I10" if slots is None else "I9"
                    judge.fail(rule, name, f"{page} was offered and is not in the tree")
            elif slots is not None and held.device[page] != slots:
                judge.fail("I1", name, f"{page} came in slots {slots}, not {held.device[page]}")


def check_hits(judge: Judge, before: Snapshot, after: Snapshot) -> None:
    """Each part of a node that was split has been used as often as the whole (T10)."""
    old = {view.ident for view in before.nodes}
    new = [view for view in after.nodes if view.ident not in old]
    if not new:
        return
    kept = old & {view.ident for view in after.nodes}
    hits = {page: view.hits for view in before.nodes if view.ident in kept for page in view.pages}
    for view in new:
        was = hits.get(view.pages[-1], 0)
        if view.hits < was:
            said = f"split off {view.pages[-1]} with {view.hits} hits of {was}"
            judge.fail("T10", None, said)


def check_closure(judge: Judge, model: BruteForce, after: Snapshot, *, host_closed: bool) -> None:
    """Existing data implies the data it depends on (T4, T5, B1)."""
    for component in model.components:
        held = after.held[component.name]
        for wider in model.depends_on(component):
            loose = held.device.keys() - after.held[wider.name].device.keys()
            if loose:
                judge.fail("T4", component.name, f"holds {loose}, {wider.name!r} does not")
        if not component.is_prefix_closed:
            continue
        for tier, pages in (("device", held.device), ("host", held.host)):
            if tier == "host" and not (host_closed or component.home_is_host):
                continue
            for namespace, tokens in pages:
                above = tokens[: -model.page_size]
                if above and (namespace, above) not in pages:
                    judge.fail(
                        "T5" if tier == "device" else "B1",
                        component.name,
                        f"holds {tokens} on {tier}, not {above}",
                    )


def check_promises(
    judge: Judge, model: BruteForce, after: Snapshot, requests: Iterable[Live]
) -> None:
    """A lease's data is there and pinned until it is released (M7, L3, L5, L6, H4)."""
    on_device = {each.name: after.on_device(each) for each in model.components}
    readable = {each.name: after.readable(each) for each in model.components}
    for live in requests:
        for component in model.components:
            arrived = live.started or (live.loaded and not live.waiting)
            there = (on_device if arrived else readable)[component.name]
            pinned = after.held[component.name].device_pinned
            for page in promised(model, component, live):
                prefix = model.prefix(live.namespace, live.tuple, page)
                if prefix in there and prefix in pinned:
                    continue
                rule = "L3" if prefix not in pinned else "H4" if component.home_is_host else "M7"
                if rule != "L3" and prefix in readable[component.name]:
                    rule = "R6" if prefix in after.held[component.name].arriving else "R7"
                verb = "lost" if prefix not in there else "does not pin"
                judge.fail(
                    rule,
                    component.name,
                    f"{verb} page {page} of {prefix}, promised to {live.name}, which got to "
                    f"{live.computed} from the anchor at page {live.anchor}",
                )


def check_accounts(
    judge: Judge,
    model: BruteForce,
    after: Snapshot,
    requests: Iterable[Live],
    names: Sequence[str],
    own: Collection[str],
) -> None:
    """No request is promised more than it may still take (A11, I12), nor fewer states than it will.

    That is a slot for every page ahead and one in reserve, and the pages it has to load. Components
    with a budget of their own, `own`, may ask for more; `names` are in the cache's order.
    """
    running = [live for live in requests if live.request.stage is ADMITTED]
    admitted = [live.request for live in running]
    for index, name in enumerate(names):
        component = model.component(name)
        if name in own:
            continue
        if component.is_state:
            # The live state, the one a decode follows, and each one that is to be kept, once.
            most = sum(
                1
                - live.started
                + (live.request.total > live.request.prompt)
                + len(live.due)
                + bool(live.standing)
                + (0 if live.request.load_started else live.request.components[index].host_slots)
                for live in running
            )
            least = sum(
                (not _has_state(live, index))
                + len(live.due.intersection(live.request.checkpoints))
                + (bool(live.standing) and live.standing_as == "point")
                for live in running
            )
            promised_now = after.books[name, "device"].promised
            if not least <= promised_now <= most:
                said = f"{promised_now} states are promised, requests take {least} to {most}"
                judge.fail("I12", name, said)
            continue
        most = sum(
            max(
                0,
                -(-request.total // model.page_size) + 1 + request.draft_pages - request.allocated,
            )
            * component.slots_per_page
            + (0 if request.load_started else request.components[index].host_slots)
            for request in admitted
        )
        promised_now = after.books[name, "device"].promised
        if promised_now > most:
            said = f"{promised_now} device slots are promised, requests can take {most}"
            judge.fail("A11", name, said)


def _has_state(live: Live, index: int) -> bool:
    """Whether a running request has a live state of a component."""
    part = live.request.components[index]
    return isinstance(part, RequestState) and part.live is not None


def promised(model: BruteForce, component: ModelComponent, live: Live) -> frozenset[int]:
    """Pages of its prefix that a request relies on."""
    if component.is_state and live.started:
        return frozenset()  # it writes to a copy of its own (M8)
    if component.is_prefix_closed:
        return model.pages(component, max(live.anchor, live.own.based))
    pages = model.pages(component, live.anchor)
    position = live.computed // model.page_size
    if position <= live.anchor:
        return pages
    return frozenset() if component.is_state else pages & model.pages(component, position)


def check_flights(
    judge: Judge, payloads: Payloads, engine: PromptedTransferEngine, after: Snapshot
) -> None:
    """Rows a copy still reads or writes belong to nobody else (B3, L8, E5)."""
    for submission in engine.unfinished():
        for verb, rows in (("reads", submission.reads), ("writes", submission.writes)):
            for lanes, slots in rows:
                if lanes not in payloads.pool_of:
                    continue
                name, tier = payloads.pool_of[lanes]
                freed = slots & payloads.free(name, tier)
                if freed:
                    judge.fail(
                        "B3", name, f"{tier} slots {freed} are free while a copy {verb} them"
                    )
                if verb == "writes":
                    held = after.held[name]
                    cells = held.device if tier == "device" else held.host
                    used = {slot for numbers in cells.values() for slot in numbers} & slots
                    if used:
                        judge.fail("B3", name, f"{tier} slots {used} are in use while written")


def check_payloads(
    judge: Judge, model: BruteForce, payloads: Payloads, before: Snapshot, after: Snapshot
) -> None:
    """Every cell holds the bytes of its page (B3, R5, M8, T9)."""
    for component in model.components:
        held, old = after.held[component.name], before.held[component.name]
        wrong = payloads.wrong(component, "device", held.device)
        if wrong is not None:
            rule = "M8" if component.is_state else "T9"
            if wrong.prefix in old.arriving:
                rule = "R5"
            judge.fail(rule, component.name, f"device {wrong}")
        wrong = payloads.wrong(component, "host", held.host)
        if wrong is not None:
            rule = "T9" if wrong.prefix in old.host else "B3"
            judge.fail(rule, component.name, f"host {wrong}")
