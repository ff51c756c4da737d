"""Pinned prefixes: as deep as the model says, within their bound, and there until unpinned (K6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvgraft.errors import BudgetError, LeaseError
from kvgraft.tree.keys import TokenKey
from kvgraft_retention.pins import Pin
from kvgraft_testing.machine.bench import Bench
from kvgraft_testing.machine.brute_force import ModelComponent, Prefix
from kvgraft_testing.machine.hooks import locks, matches
from kvgraft_testing.machine.observing import Snapshot
from kvgraft_testing.machine.trace import shown

__all__ = ["Kept", "Pinning"]

OWNERS = ("router", "tenant")


@dataclass
class Kept:
    """A pin as the model follows it.

    Attributes:
        pin: the cache's own.
        name: in traces.
        owner: whose it is.
        namespace: of its sequence.
        pages: per component, the pages that must stay.
    """

    pin: Pin
    name: str
    owner: str
    namespace: object
    pages: dict[str, list[Prefix]]


class Pinning:
    """Pins and unpins prefixes of one cache."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cache, self.model, self.judge = bench.cache, bench.model, bench.judge
        self.kept: list[Kept] = []
        self._made = 0

    def pin(self, sequence: Prefix) -> None:
        """Pin the cached part of a sequence, or be refused for a reason."""
        bench, (namespace, tokens) = self.bench, sequence
        self._made += 1
        owner = OWNERS[self._made % len(OWNERS)]
        bench.trace.call(f"pin {shown(tokens)} of namespace {namespace!r} for {owner}")
        before, limit = bench.seen, len(tokens) // self.model.page_size
        key = TokenKey(tokens, namespace)

        def attempt() -> Pin | BudgetError:
            try:
                pin: Pin = self.cache.pin(key, owner=owner)
                return pin
            except BudgetError as refusal:
                return refusal

        result = bench.act("pin", attempt)
        boundary, device = self._expected(before, sequence, limit)
        kept = self._pages(before, sequence, boundary)
        if isinstance(result, BudgetError):
            bench.trace.outcome(str(result))
            bench.counts["pin refused"] += 1
            on_host = boundary > device or any(each.home_is_host for each in self.model.components)
            self._check_refused(before, kept, on_host, namespace)
            return
        size = self.model.page_size
        bench.trace.outcome(f"{result.tokens} tokens")
        self.judge.expect(
            (result.tokens, result.device_tokens) == (boundary * size, device * size),
            "K6",
            None,
            lambda: (
                f"{result!r} with {result.device_tokens} on DEVICE; the model says pages "
                f"{boundary}, {device}"
            ),
        )
        had = {each.name: self._held(each) for each in self.model.components}
        self.kept.append(Kept(result, f"p{self._made}", owner, namespace, kept))
        for each in self.model.components:
            held, most = self._held(each), self._most(before, each.name, "device")
            if held > had[each.name] and held > most:  # a pool that shrinks takes none back
                self.judge.fail("K6", each.name, f"pins hold {held} slots, the bound is {most}")

    def unpin(self, kept: Kept) -> None:
        """Unpin one; a second time is refused."""
        self.bench.trace.call(f"unpin {kept.name}")
        self.kept.remove(kept)
        self.bench.act("unpin", lambda: self.cache.unpin(kept.pin))
        try:
            self.cache.unpin(kept.pin)
        except LeaseError:
            return
        self.judge.fail("K6", None, f"{kept.name} was unpinned twice")

    def unpin_all(self) -> None:
        """Unpin everything of every owner."""
        for owner in OWNERS:
            mine = [each for each in self.kept if each.owner == owner]
            if not mine:
                continue
            self.bench.trace.call(f"unpin all of {owner}")
            self.kept = [each for each in self.kept if each.owner != owner]
            n_pins = self.bench.act(
                "unpin all",
                lambda: self.cache.unpin_all(owner),  # noqa: B023 - called at once
            )
            if n_pins != len(mine):
                self.judge.fail("K6", None, f"{n_pins} of {owner}'s {len(mine)} were unpinned")

    def cleared(self, namespaces: Iterable[object]) -> int:
        """Their pins end; returns how many there were."""
        gone = [each for each in self.kept if each.namespace in namespaces]
        self.kept = [each for each in self.kept if each not in gone]
        return len(gone)

    def check(self, after: Snapshot) -> None:
        """All pinned data is there."""
        for each in self.kept:
            for component in self.model.components:
                readable = after.readable(component)
                pinned = after.held[component.name].device_pinned
                for page in each.pages[component.name]:
                    if page not in readable or page not in pinned:
                        verb = "lost" if page not in readable else "does not hold"
                        self.judge.fail("K6", component.name, f"{each.name} {verb} {page}")

    # -- the expected outcome

    def _expected(self, before: Snapshot, sequence: Prefix, limit: int) -> tuple[int, int]:
        predictor = self.bench.predictor
        if predictor.cannot_copy:
            return 0, 0
        limits = [answer.limit_pages for _, _, answer in matches(self.bench.calls) if answer]
        found = predictor.found(before, sequence, min([limit, *limits]))
        return found.deepest, found.device

    def _pages(self, before: Snapshot, sequence: Prefix, boundary: int) -> dict[str, list[Prefix]]:
        """Pages needed at a boundary, and others that components ask to hold and that are there."""
        pages: dict[str, list[Prefix]] = {}
        locked = locks(self.bench.calls, boundary)
        for component in self.model.components:
            mine = list(self.model.prefixes(component, sequence, boundary))
            there = before.readable(component)
            for page in sorted(locked.get(component.name, ())):
                prefix = self.model.prefix(*sequence, page)
                if prefix not in mine and prefix in there:
                    mine.append(prefix)
            pages[component.name] = mine
        return pages

    def _held(self, component: ModelComponent, more: Iterable[Prefix] = ()) -> int:
        """Slots of a component that pins hold, each once, with those of some more pages."""
        pages = {page for each in self.kept for page in each.pages[component.name]}
        return len(pages | set(more)) * component.slots_per_page

    def _most(self, seen: Snapshot, name: str, tier: str) -> int:
        return int(seen.books[name, tier].capacity * self.cache.config.pin_share)

    def _check_refused(
        self,
        before: Snapshot,
        pages: dict[str, list[Prefix]],
        on_host: bool,  # noqa: FBT001 - passed on
        namespace: object,
    ) -> None:
        """It would go beyond a bound, or take slots that are promised."""
        for component in self.model.components:
            name, held = component.name, before.held[component.name]
            for tier, cells, pinned in (
                ("device", held.device, held.device_pinned),
                ("host", held.host, held.host_pinned),
            ):
                books = before.books.get((name, tier))
                if books is None or (tier == "host" and not on_host):
                    continue
                if self._held(component, pages[name]) > self._most(before, name, tier):
                    return
                taken = sum(page in cells and page not in pinned for page in pages[name])
                room = before.headroom(name, tier, namespace)
                if taken * component.slots_per_page > room:
                    return
        self.judge.fail("K6", None, f"a pin of {pages} is refused, there is room for it")
