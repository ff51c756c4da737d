"""Pinned prefixes: they stay, cost no promise and keep to their bound (K6)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvgraft.errors import ContractViolation
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.node import Node
from kvgraft_guard.books import FREE, IN_FLIGHT, Reading
from kvgraft_guard.paths import needed
from kvgraft_guard.watched import After, Watched
from kvgraft_retention.pins import Pin

__all__ = ["Pinning"]


class Pinning:
    """Checks `Cache.pin`, `Cache.unpin`, and existing pins."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.tree = watched.tree
        self.books = watched.books

    def pin(self, key: TokenKey, *, owner: str, max_tokens: int | None = None) -> After:
        """It takes no slot, holds a request's data there, and leaves promises covered."""
        del key, owner, max_tokens
        self.watched.rooms.expect(self.watched.nothing, host_too=False)

        def after(pin: Pin, was: Reading, now: Reading) -> None:
            for at, (before, later) in enumerate(zip(was.counts, now.counts)):
                if before[FREE] != later[FREE] or before[IN_FLIGHT] != later[IN_FLIGHT]:
                    pool = self.books.pools[at]
                    raise ContractViolation(
                        "K6",
                        pool.component,
                        f"pinning took {pool.name} slots: free went from {before[FREE]} to "
                        f"{later[FREE]}, in flight from {before[IN_FLIGHT]} to {later[IN_FLIGHT]}",
                    )
            self.check(pin)
            self._check_bounds(pin)

        return after

    def unpin(self, given: Any) -> After:
        """Unpinning frees no slot."""
        del given
        self.watched.rooms.expect(self.watched.nothing, host_too=False)
        return self._after

    def _after(self, result: Any, was: Reading, now: Reading) -> None:
        """The other pins are still in place, and their slots are counted once."""
        for pin in self.watched.cache.pins:
            self.check(pin)
        for component in self.tree.components:
            self._check_counted(component)

    def _check_counted(self, component: TreeComponent) -> None:
        """The slots that count against the bound are those that pins hold; each counts once."""
        pins = self.watched.cache.pins
        if self.watched.cache.mounted[component.index].lock_hooks is not None:
            return
        held = self._held(component)
        counted = 0 if isinstance(pins, tuple) else pins.held(component.device)
        if held != counted:
            raise ContractViolation(
                "K6",
                component.name,
                f"{len(pins)} pins hold {held} device slots, {counted} are counted against the "
                "bound",
            )

    def _held(self, component: TreeComponent) -> int:
        """Slots of the pages that components need at pins' ends, cached or not."""
        pages = {page for each in self.watched.cache.pins for page in self._pages(each, component)}
        return len(pages) * (1 if component.is_state else component.slots_per_page)

    def check(self, pin: Pin) -> None:
        """The data that components need at a pin's end is there, and held."""
        end = pin.tokens // self.tree.page_size
        for component in self.tree.components:
            node: Node | None = pin.receipt.anchor
            pages = needed(component, end, self.tree.page_size)
            while node is not None and node.parent is not None:
                inside = any(low < node.end and node.start < high for low, high in pages)
                if inside or (component.is_state and node.end == end):
                    self._check_node(pin, component, node)
                node = node.parent

    def _check_node(self, pin: Pin, component: TreeComponent, node: Node) -> None:
        cell = node.cells[component.index]
        there = cell.device is not None or cell.host is not None
        held = cell.device_pins > 0 and (cell.device is not None or cell.host_pins > 0)
        if not there or not held:
            raise ContractViolation(
                "K6",
                component.name,
                f"{pin!r} does not hold {node!r}: device {cell.device is not None} with "
                f"{cell.device_pins} pins, host {cell.host is not None} with {cell.host_pins}",
            )

    def _check_bounds(self, pin: Pin) -> None:
        """With a new pin all stay within their share of every pool, counted from their pages."""
        others = [each for each in self.watched.cache.pins if each is not pin]
        for component in self.tree.components:
            before = {page for each in others for page in self._pages(each, component)}
            if before.issuperset(self._pages(pin, component)):
                continue  # it adds nothing, and a pool that shrank may hold more
            held = self._held(component)
            most = component.device.capacity * self.watched.cache.config.pin_share
            if held > most:
                raise ContractViolation(
                    "K6",
                    component.name,
                    f"pins hold {held} device slots of {component.device.capacity}, the bound is "
                    f"{most:g}",
                )

    def _pages(self, pin: Pin, component: TreeComponent) -> Iterator[tuple[int, int]]:
        """The pages that a component needs at a pin's end: their nodes, and places."""
        end = pin.tokens // self.tree.page_size
        ranges = needed(component, end, self.tree.page_size)
        if component.is_state:
            ranges = [(end - 1, end)] if end else []
        node: Node | None = pin.receipt.anchor
        while node is not None and node.parent is not None:
            for low, high in ranges:
                for page in range(max(low, node.start), min(high, node.end)):
                    yield id(node), page
            node = node.parent
