"""Requests served in a cache with one component, in a random order that is always the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kvgraft_testing.production.engine.asking import PAGES, digest
from kvgraft_testing.production.engine.timing import Note, Timed

__all__ = ["PLAYS", "Serving"]

STEPS = 40

PLAYS = (("write-through", 16), ("write-back", 6), ("write-through-selective", 1))
"""Write policies, with pages on HOST."""


class Serving:
    """A cache with the component alone, and a random but repeatable order of calls."""

    def __init__(
        self,
        plugin: Any,
        options: dict[str, Any],
        note: Note,
        timed: Timed,
        page_size: int,
        number: int,
    ) -> None:
        self.plugin, self.options, self.note, self.timed = plugin, options, note, timed
        self.page_size = page_size
        policy, host_pages = PLAYS[number]
        self.policy, self.host_pages = policy, host_pages
        self.draw = random.Random(f"{page_size} {number}")
        self.where = f"pages of {page_size}, {policy}, {host_pages} pages on HOST"
        self.live: list[Any] = []

    def run(self) -> None:
        """Every step, until one raises."""
        if not self._open():
            return
        for step in range(STEPS):
            if self.timed.blocked:
                return
            call = self.draw.choice(self._calls())
            done = f"{self.where}, call {step}, {call.__name__.strip('_')}"
            try:
                came = f"{call()}; {self._books()}"
                self.cache.check_integrity()
            except Exception as error:  # noqa: BLE001 - the state machine judges it
                self.note("seen", done, f"{type(error).__name__}: {error}")
                return
            self.note("seen", done, came)

    def _open(self) -> bool:
        """Open the smallest cache, of some, that admits a short request."""
        from kvgraft.errors import KvgraftError
        from kvgraft.tree.keys import TokenKey

        opened = False
        for scale in (1, 4, 16, 64):
            try:
                self._open_at(scale)
                opened = True
                request = self.cache.begin(TokenKey((9,) * self.page_size), reserve=1)
                admitted = self.cache.admit(request).admitted
                self.cache.abort(request)
                if admitted:
                    return True
            except KvgraftError as error:
                self.note("seen", f"{self.where}, open {scale}", str(error))
                if opened:
                    return False
        return opened

    def _open_at(self, scale: int) -> None:
        from kvgraft.cache import Cache
        from kvgraft.config import CacheConfig, WritePolicy
        from kvgraft_testing.stepped import SteppedTransferEngine

        self.transfers = SteppedTransferEngine()
        plugin = self.plugin
        config = CacheConfig(
            components={plugin.name: self.options},
            page_size=self.page_size,
            device_tokens=PAGES * scale * self.page_size,
            host_tokens=self.host_pages * scale * self.page_size,
            write_policy=WritePolicy(self.policy),
            load=None,
            transfer_timeout_s=1e-3,
        )
        self.cache = Cache(config, plugins=[plugin], transfers=self.transfers)
        self.name = plugin.name

    def _calls(self) -> list[Callable[[], str]]:
        calls = [self._evict, self._copies, self._begin, self._begin, self._begin]
        return calls + [self._go_on] * 5 if self.live else calls

    def _begin(self) -> str:
        from kvgraft.tree.keys import TokenKey

        if len(self.live) > 3:
            return self._abort()
        n_tokens = self.draw.randint(1, 7 * self.page_size)
        tokens = [1 + (at * at // 3) % 2 for at in range(n_tokens)]
        tokens += self.draw.choices((1, 2), k=self.draw.randint(0, 2))
        namespace = self.draw.choice((None, None, "tenant"))
        chunk = self.draw.choice((None, None, 2, 5))
        request = self.cache.begin(TokenKey(tokens, namespace), reserve=2, chunk=chunk)
        self.live.append(request)
        said = f"anchor {request.anchor_tokens}, {request.device_tokens} on DEVICE"
        loads = tuple(part.host_slots for part in request.components)
        return f"{said}, limited {request.limited}, loads {loads}; {self._go_on()}"

    def _abort(self) -> str:
        request = self.live.pop(self.draw.randrange(len(self.live)))
        self.cache.abort(request)
        return "aborted"

    def _go_on(self) -> str:
        """The next call of some request."""
        request = self.live[self.draw.randrange(len(self.live))]
        if request.stage.value == "leased":
            decision = self.cache.admit(request)
            demands = [part.demand for part in request.components]
            said = f"{_timeless(decision)}, demands {demands}"
            if not decision.admitted:
                self.live.remove(request)
                self.cache.abort(request)
                return said
            self.cache.load_back(request)
            return said
        if not request.ready:
            return self._copies()
        if request.load_failed:
            self.cache.restart(request)
            return "restarted"
        if request.computed < request.prompt:
            n_tokens = self.cache.next_chunk(request)
            self._compute(request, n_tokens)
            return f"computed {n_tokens}, {request.computed} in all"
        if self.draw.random() < 0.4:
            request.key.extend([self.draw.choice((1, 2))])
            if self.cache.allocate(request, 1):
                self._write(request)
                self.cache.computed(request, 1)
        if self.draw.random() < 0.5:
            return f"checkpoint {self.cache.checkpoint(request)}"
        self.live.remove(request)
        return f"finished, {self.cache.finish(request)} cached"

    def _compute(self, request: Any, n_tokens: int) -> None:
        if n_tokens and self.cache.allocate(request, n_tokens):
            self._write(request)
            self.cache.computed(request, n_tokens)

    def _write(self, request: Any) -> None:
        """Bytes for the tokens computed last."""
        (mounted,) = self.cache.mounted
        component = mounted.component
        value = request.computed % 100 + 1
        if component.reach.is_state:
            numbers = [self.cache.state_slot(request, self.name)]
        else:
            numbers = [int(slot) for slot in self.cache.table(request, self.name)[-1:] if slot >= 0]
        for lanes in component.device.lanes:
            for slot in numbers:
                lanes[slot] = value

    def _copies(self) -> str:
        self.transfers.run_all()
        return f"{self.cache.poll()} transfers ended"

    def _evict(self) -> str:
        from kvgraft.types import Tier

        tier = self.draw.choice((Tier.DEVICE, Tier.DEVICE, Tier.HOST))
        n_slots = self.draw.choice((1, 3, PAGES))
        return f"{self.cache.evict(self.name, n_slots, tier)} slots freed on {tier.value}"

    def _books(self) -> str:
        """The ledgers, the places of the requests' pages, and every byte, as text."""
        parts = []
        for component in self.cache.tree.components:
            for ledger in (component.device, component.host):
                if ledger is not None:
                    parts.append(f"{ledger.free}+{ledger.evictable}-{ledger.promised}")
            if not component.is_state:
                parts += [
                    str(self.cache.table(each, component.name).tolist()) for each in self.live
                ]
        (mounted,) = self.cache.mounted
        return f"{' '.join(parts)}; {digest(mounted.component)}"


def _timeless(decision: Any) -> Any:
    """A decision without what depends on the machine's speed: which copies are overdue."""
    waits_for = decision.waits_for
    if waits_for is None:
        return decision
    return decision._replace(waits_for=waits_for._replace(overdue=0))
