"""Checks that a match is the deepest possible and its lease minimal (M1, M3, L3, I10).

The guard computes the expected outcome before the match and compares it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from kvgraft.cache import Cache
from kvgraft.errors import ContractViolation
from kvgraft.requests.request import Limited, Request
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.node import Node
from kvgraft.tree.operations import Operation, operation_of
from kvgraft.types import Tier
from kvgraft_guard.hooks import HookGuard
from kvgraft_guard.paths import Shelf, deepest, look, needed

__all__ = ["Expected", "Matches"]

REPEATS_SAVE = 4
"""A state before a prompt's last page is kept if it saves repeats one part in this many."""

EXPLAINED_EVERY = 32
"""Matches between two checks of `explain` (M9)."""


class Expected(NamedTuple):
    """The outcome that a match must have.

    Attributes:
        best: the deepest boundary all components accept, in pages.
        device: that from DEVICE alone.
        limit: the deepest that was allowed.
        base: how far prefix-closed components have data on any tier.
    """

    shelf: Shelf
    best: int
    device: int
    limit: int
    base: int


class Matches:
    """Checks the matches of one cache."""

    def __init__(self, cache: Cache, hooks: Sequence[HookGuard]) -> None:
        self.cache = cache
        self.tree = cache.tree
        self.hooks = hooks
        self._own = [each.lock_hooks is not None for each in cache.mounted]
        self._explained = 0

    def expect(self, key: TokenKey, limit: int) -> Expected:
        """A match of at most `limit` pages begins."""
        for hook in self.hooks:
            hook.matches_begin()
        shelf = look(self.tree, key, limit)
        best = deepest(self.tree, shelf, limit, device_only=False)
        device = deepest(self.tree, shelf, best, device_only=True)
        base = shelf.n_pages
        for component in self.tree.prefix_closed:
            base = min(
                base, deepest(self.tree, shelf, limit, device_only=False, component=component)
            )
        return Expected(shelf, best, device, limit, base)

    def check(self, request: Request, expected: Expected, *, anew: bool) -> None:
        """The match found the expected outcome, and the lease pins it; `anew` for a renewed lease.

        Raises:
            ContractViolation: M1 or R8 for another anchor, M3 for another device anchor, L3 for
                other pins, M4 for other host hits, R6 for a load that is not waited for.
        """
        size = self.tree.page_size
        anchor = request.anchor_tokens // size
        lowered = any(hook.lowered for hook in self.hooks)
        for hook in self.hooks:
            if hook.limit is not None and anchor > hook.limit:
                raise ContractViolation(
                    "M1",
                    hook.name,
                    f"{_of(request)} resumes at page {anchor}, and the component accepts "
                    f"{hook.limit} at most",
                )
        if anchor > expected.best or (anchor < expected.best and not lowered):
            self._check_reason(request, expected, anchor, anew=anew)
        device = deepest(self.tree, expected.shelf, anchor, device_only=True)
        if request.device_tokens != device * size:
            raise ContractViolation(
                "M3",
                None,
                f"{_of(request)} can resume from DEVICE up to {device * size} tokens, the match "
                f"says {request.device_tokens}",
            )
        self._check_segments(request, anchor)
        if request.limited is not Limited.CROWDED:
            self._check_used(request)
        missing = self._missing(request)
        self._check_host_slots(request, missing)
        self._check_waits(request, missing)
        if not anew:
            self.check_points(request, expected)
        if anchor > device and not lowered:
            self._check_load(request, missing, loads=True, tokens=(anchor - device) * size)

    def _check_reason(
        self, request: Request, expected: Expected, anchor: int, *, anew: bool
    ) -> None:
        """A match that is not as deep as it could be says why, and it is so."""
        limited = request.limited
        if anchor < expected.best:
            if anew and not anchor:
                return
            if limited is Limited.NO_COPY and not anchor:
                if any(
                    component.is_state and not component.can_copy
                    for component in self.tree.components
                ):
                    return
            elif limited is Limited.RECOMPUTE and anchor == expected.device:
                self._check_skipped(request, expected)
                return
            elif limited is Limited.CROWDED and not anchor:
                self._check_crowded(request, expected, anew=anew)
                return
        self._raise_other(request, expected, anchor)

    def _raise_other(self, request: Request, expected: Expected, anchor: int) -> NoReturn:
        size = self.tree.page_size
        raise ContractViolation(
            "M1",
            None,
            f"{_of(request)} resumes at {anchor * size} tokens; the deepest boundary all "
            f"components accept is {expected.best * size}, nodes follow it for "
            f"{expected.shelf.n_pages * size}, limit {expected.limit * size}",
        )

    # -- slots of a load-back

    def _missing(self, request: Request, boundary: int | None = None) -> list[list[Node]]:
        """Per component, the nodes it needs at a boundary and lacks on DEVICE, root first."""
        receipt, found = request.receipt, []
        if boundary is None:
            path, node = [], receipt.anchor
            while node.parent is not None:
                path.append(node)
                node = node.parent
            path.reverse()
            boundary = receipt.anchor.end
            segments = [
                tuple((low, high) for low, high in receipt.segments[component.index])
                if self._own[component.index]
                else needed(component, boundary, self.tree.page_size)
                for component in self.tree.components
            ]
        else:
            path = look(self.tree, request.key, boundary).nodes
            segments = [
                needed(component, boundary, self.tree.page_size)
                for component in self.tree.components
            ]
        for component, segment in zip(self.tree.components, segments):
            wanted = (
                path[-1:]
                if component.is_state
                else [
                    node
                    for node in path
                    if any(node.start < high and node.end > low for low, high in segment)
                ]
            )
            found.append([node for node in wanted if node.cells[component.index].device is None])
        return found

    def _check_segments(self, request: Request, anchor: int) -> None:
        """Pins cover the reaches at the anchor, no less and no more (L3)."""
        for component, segment in zip(self.tree.components, request.receipt.segments):
            if self._own[component.index]:
                continue
            wanted: list[tuple[int, int]] = list(needed(component, anchor, self.tree.page_size))
            if component.is_state and anchor:
                wanted = [(anchor, anchor)]
            if [tuple(span) for span in segment] != wanted:
                raise ContractViolation(
                    "L3",
                    component.name,
                    f"{_of(request)} resumes at page {anchor} and pins {segment}; the reach needs "
                    f"{wanted}",
                )

    def _check_used(self, request: Request) -> None:
        """Pages that a match pins count as used just now (T7, T12)."""
        anchor, clock = request.receipt.anchor, self.tree.clock
        lifetimes = self.tree.lifetimes
        term = lifetimes.of(clock) if lifetimes is not None else None
        if anchor.parent is not None and term != request.use_retention:
            raise ContractViolation(
                "T7",
                None,
                f"{_of(request)} uses its prefix at {clock} as {term}; it asks for "
                f"{request.use_retention}",
            )
        for component, segment in zip(self.tree.components, request.receipt.segments):
            node, low = anchor, segment[0][0] if segment else anchor.end
            while segment and node.parent is not None and (node.end > low or node is anchor):
                inside = any(a < node.end and node.start < b for a, b in segment)
                stamp = node.cells[component.index].stamp
                if (inside or component.is_state) and stamp != clock:
                    raise ContractViolation(
                        "T7",
                        component.name,
                        f"{_of(request)} uses {node!r} at {clock}, which counts as used at {stamp}",
                    )
                if component.is_state or component.is_prefix_closed:
                    break  # further up it counts lazily
                node = node.parent

    def _check_host_slots(self, request: Request, missing: list[list[Node]]) -> None:
        """Host hits equal the load-back's slots (M4), counted once for all requests (R6)."""
        loads = request.receipt.host_from is not None and request.device_tokens < (
            request.anchor_tokens
        )
        for part, nodes in zip(request.components, missing):
            component, said = part.component, part.host_slots
            slots = 0
            for node in nodes:
                cell = node.cells[component.index]
                if loads and cell.host is not None and cell.incoming is None:
                    slots += (
                        1
                        if component.is_state
                        else (node.end - node.start) * component.slots_per_page
                    )
            if slots != said:
                raise ContractViolation(
                    "M4",
                    component.name,
                    f"a load-back for {_of(request)} takes {slots} slots, the match said {said}",
                )

    def _check_waits(self, request: Request, missing: list[list[Node]]) -> None:
        """The request waits for pages of its prefix that others are loading (R6)."""
        operations: dict[int, Operation] = {}
        for component, nodes in zip(self.tree.components, missing):
            for node in nodes:
                incoming = node.cells[component.index].incoming
                if incoming is not None and not incoming.to_host:
                    operations[incoming.operation] = operation_of(node, incoming)
        waited = {id(each.operation) for each in request.waits if each.operation is not None}
        if not operations.keys() <= waited:
            raise ContractViolation(
                "R6",
                None,
                f"{_of(request)} needs the data of {len(operations)} load-backs and waits for "
                f"{len(waited)} transfers",
            )

    def check_waits(self, request: Request) -> None:
        """The same once its own load-back was started."""
        self._check_waits(request, self._missing(request))

    def check_points(self, request: Request, expected: Expected) -> None:
        """Points are decided for all components at once, and states captured at them (I10).

        They are the prompt's end, the page at which an identical prompt resumes, the branches, and
        the points that components and the engine named; where states need a cut, none is too close
        to another.
        """
        tree, size = self.tree, self.tree.page_size
        bounded = [component for component in tree.components if not component.is_prefix_closed]
        states = [component for component in bounded if component.is_state]
        wanted: list[int] = []
        if bounded:
            anchor, last = request.anchor_tokens // size, request.prompt // size
            asked = set(request.resume_at).union(*(hook.captures for hook in self.hooks))
            pages = {last, (request.prompt - 1) // size, expected.base, *asked}
            config, before = self.cache.config, anchor
            for page in sorted(page for page in pages if anchor < page <= last):
                costs_a_cut = page * size < request.prompt
                gain = page - before
                if states and costs_a_cut and gain * size < config.cut_tokens and page not in asked:
                    continue
                # A state that only repetitions use pays where prompts are repeated, or far behind.
                alone = (page + 1) * size == request.prompt and expected.base < page
                alone = alone and page not in asked
                if states and alone and gain * REPEATS_SAVE < page:
                    continue
                wanted.append(page)
                before = page
        captures = wanted if states else []
        if sorted(request.points) != wanted or request.checkpoints != captures:
            raise ContractViolation(
                "I10",
                None,
                f"{_of(request)} has points at pages {sorted(request.points)} and captures states "
                f"at {request.checkpoints}; wanted are {wanted} and {captures}",
            )

    # -- why a match is shorter

    def _check_load(
        self, request: Request, missing: list[list[Node]], *, loads: bool, tokens: int
    ) -> None:
        """Whichever is estimated to be faster is done (R8)."""
        model = self.cache.config.load
        if model is None:
            return
        nbytes, boundary = 0, (request.device_tokens + tokens) // self.tree.page_size
        for component, nodes, each in zip(self.tree.components, missing, self.cache.mounted):
            if component.is_state and nodes:
                if not loads:
                    self._raise_weighed(request, f"state of {component.name!r} is on HOST")
                return
            # Pages that a component pins beside its reach come along, and are not weighed.
            pages = needed(component, boundary, self.tree.page_size)
            for node in nodes:
                if node.cells[component.index].incoming is None:
                    inside = [min(node.end, high) - max(node.start, low) for low, high in pages]
                    n_slots = sum(max(0, n) for n in inside) * component.slots_per_page
                    nbytes += n_slots * each.component.device.slot_nbytes
        rest = request.key.n_tokens - request.device_tokens - tokens
        load_s = model.latency_s + nbytes / model.bandwidth_bytes_s
        compute_s = model.compute_s(tokens, rest)
        if (compute_s < load_s) is loads:
            self._raise_weighed(
                request, f"loading takes {load_s:.6f} s and computing {compute_s:.6f} s"
            )

    def _raise_weighed(self, request: Request, why: str) -> NoReturn:
        what = "computes again" if request.limited is Limited.RECOMPUTE else "loads"
        raise ContractViolation(
            "R8", None, f"{_of(request)} {what} from {request.device_tokens} tokens on: {why}"
        )

    def _check_skipped(self, request: Request, expected: Expected) -> None:
        missing = self._missing(request, expected.best)
        tokens = (expected.best - expected.device) * self.tree.page_size
        self._check_load(request, missing, loads=False, tokens=tokens)

    def _check_crowded(self, request: Request, expected: Expected, *, anew: bool) -> None:
        """Pinning the data found would have taken slots that are promised (A12)."""
        if anew or any(self._own):
            return
        boundaries = [expected.best]
        if self.cache.config.load is not None:
            boundaries.append(expected.device)  # if computing the rest is faster (R8)
        if not any(self._is_crowded(request, each) for each in boundaries):
            self._raise_other(request, expected, 0)

    def _is_crowded(self, request: Request, boundary: int) -> bool:
        """Whether pins at a boundary take more slots of a pool than are not promised."""
        nodes = look(self.tree, request.key, boundary).nodes
        for component in self.tree.components:
            segment = needed(component, boundary, self.tree.page_size)
            wanted = (
                nodes[-1:]
                if component.is_state
                else [
                    node
                    for node in nodes
                    if any(node.start < high and node.end > low for low, high in segment)
                ]
            )
            for tier in (Tier.DEVICE, Tier.HOST):
                ledgers = component.devices if tier is Tier.DEVICE else component.hosts
                ledger = ledgers[request.root.tenant]
                moved = 0
                for node in wanted:
                    cell = node.cells[component.index]
                    slots = cell.device if tier is Tier.DEVICE else cell.host
                    pins = cell.device_pins if tier is Tier.DEVICE else cell.host_pins
                    if slots is not None and not pins:
                        moved += component.n_slots(node)
                if ledger is not None and moved > ledger.headroom:
                    return True
        return False

    # -- explanations

    def check_explained(self, key: TokenKey, limit: int) -> None:
        """Now and then: the claims of `explain` are true (M9)."""
        self._explained += 1
        if self._explained % EXPLAINED_EVERY != 1:
            return
        tree, size = self.tree, self.tree.page_size
        shelf = look(tree, key, limit)
        said = self.cache.explain(key)
        anchor = deepest(tree, shelf, limit, device_only=False)
        ends = (anchor, deepest(tree, shelf, anchor, device_only=True))
        if (said.anchor, said.device_anchor) != (ends[0] * size, ends[1] * size):
            raise ContractViolation(
                "M9",
                None,
                f"explain says a match ends at {said.anchor} tokens, {said.device_anchor} from "
                f"DEVICE; it ends at {ends[0] * size} and {ends[1] * size}",
            )
        for component, each in zip(tree.components, said.components):
            alone = [
                size * deepest(tree, shelf, limit, device_only=device_only, component=component)
                for device_only in (False, True)
            ]
            if [each.accepts, each.device_accepts] != alone:
                raise ContractViolation(
                    "M9",
                    component.name,
                    f"explain says it accepts {each.accepts} tokens, {each.device_accepts} from "
                    f"DEVICE; it accepts {alone[0]} and {alone[1]} of {shelf.n_pages * size}",
                )


def _of(request: Request) -> str:
    return f"the request of {request.prompt} tokens"
