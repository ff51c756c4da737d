"""What must hold between two snapshots whatever the operation was."""

from __future__ import annotations

from collections.abc import Iterable

from .brute_force import BruteForce, Prefix
from .engines import PromptedTransferEngine
from .live import Live
from .observing import Snapshot
from .payloads import Payloads

__all__ = ["check_closure", "check_flights", "check_gains", "check_payloads", "check_promises"]


def check_gains(
    before: Snapshot,
    after: Snapshot,
    *,
    inserted: dict[str, dict[Prefix, tuple[int, ...] | None]],
    remade: bool,
    loads_may_end: bool,
    backups_may_end: bool,
) -> None:
    """Data appears by an insert or an acknowledged transfer, and never moves (I2, I4, B3).

    Where an insert made room first (`remade`), or a backup made room on HOST, an unpinned page may
    have gone and come back.
    """
    for name, held in after.held.items():
        old = before.held[name]
        for tier, now, then in (
            ("device", held.device, old.device),
            ("host", held.host, old.host),
        ):
            for page in now.keys() & then.keys():
                if remade and inserted and page not in old.device_pinned:
                    continue
                if backups_may_end and tier == "host" and page not in old.host_pinned:
                    continue
                assert now[page] == then[page], (
                    f"I2/I4: {name} {page} moved on {tier}: {then[page]} to {now[page]}"
                )
        gained = held.device.keys() - old.device.keys()
        mine = inserted.get(name, {})
        arrived = {page for page in gained if page not in mine}
        assert arrived <= (old.arriving if loads_may_end else set()), (
            f"B3: {name} gained {arrived} on device, arriving were {old.arriving}"
        )
        for page, slots in mine.items():
            assert remade or page in held.device, f"I1: {name} did not adopt {page}"
            assert slots is None or held.device.get(page, slots) == slots, (
                f"I1: {name} adopted {held.device[page]} for {page}, not {slots}"
            )
        if not backups_may_end:
            gained = held.host.keys() - old.host.keys()
            assert gained <= mine.keys(), f"B3: {name} gained {gained} on host"


def check_closure(model: BruteForce, after: Snapshot, *, host_closed: bool) -> None:
    """What is held implies what it hangs from (T4, T5, B1)."""
    for component in model.components:
        held = after.held[component.name]
        for wider in model.strictly_wider(component):
            loose = held.device.keys() - after.held[wider.name].device.keys()
            assert not loose, f"T4: {component.name} holds {loose}, {wider.name} does not"
        if not component.is_everything:
            continue
        for tier, pages in (("device", held.device), ("host", held.host)):
            if tier == "host" and not (host_closed or component.home_is_host):
                continue
            for namespace, tokens in pages:
                above = tokens[: -model.page_size]
                assert not above or (namespace, above) in pages, (
                    f"T5: {component.name} holds {tokens} on {tier}, not {above}"
                )


def check_promises(model: BruteForce, after: Snapshot, requests: Iterable[Live]) -> None:
    """What a lease promised is there until it is released (M7, L3, L5, L6, H4)."""
    on_device = {each.name: after.on_device(each) for each in model.components}
    readable = {each.name: after.readable(each) for each in model.components}
    for live in requests:
        position = live.computed // model.page_size
        for component in model.components:
            pages = model.pages(component, live.anchor)
            if position > live.anchor:
                pages = pages & model.pages(component, position)
                if component.is_state:
                    continue
            there = (on_device if live.started else readable)[component.name]
            for page in pages:
                prefix = model.prefix(live.namespace, live.tuple, page)
                assert prefix in there, (
                    f"M7/L3: {component.name} lost page {page} of {prefix}, promised to a request "
                    f"at {live.computed} anchored at page {live.anchor}"
                )


def check_flights(payloads: Payloads, engine: PromptedTransferEngine, after: Snapshot) -> None:
    """Rows a copy still reads or writes belong to nobody else (B3, L8, E5)."""
    for submission in engine.unfinished():
        for verb, rows in (("reads", submission.reads), ("writes", submission.writes)):
            for lanes, slots in rows:
                name, tier = payloads.pool_of[lanes]
                freed = slots & payloads.free(name, tier)
                assert not freed, f"B3: {name} {tier} slots {freed} are free, a copy {verb} them"
                if verb == "writes":
                    held = after.held[name]
                    cells = held.device if tier == "device" else held.host
                    shown = {slot for numbers in cells.values() for slot in numbers} & slots
                    assert not shown, f"B3: {name} {tier} slots {shown} are read while written"


def check_payloads(model: BruteForce, payloads: Payloads, after: Snapshot) -> None:
    """Every cell holds the bytes of its page (B3, B4, B5, I4)."""
    for component in model.components:
        held = after.held[component.name]
        payloads.check(component, "device", held.device, "the tree")
        payloads.check(component, "host", held.host, "the tree")
