"""An engine that serves tenants, and watches who loses what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kvgraft import Cache, Request, TokenKey
from kvgraft.admission import Decision
from kvgraft.assembly import parts_of
from kvgraft.config import WritePolicy, parse_config
from kvgraft.errors import BudgetError, TransferError
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.types import Tier
from kvgraft_testing.stepped import SteppedTransferEngine

__all__ = ["OPTIONS", "PAGE", "LostError", "Player", "held", "rights"]

PAGE = 4

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"n_layers": 1},
    "swa": {"n_layers": 1, "window": 2 * PAGE, "device_tokens": 20 * PAGE},
    "mamba": {"n_layers": 1, "states": 9, "host_states": 9, "conv_dim": 8},
    "hisparse": {"n_layers": 1, "hot_tokens": 2 * PAGE, "max_running": 5, "host_tokens": 128},
}

Result = TypeVar("Result")

Books = dict[tuple[str, Tier, int], int]
"""Slots by component, tier and tenant."""


class LostError(AssertionError):
    """A tenant has less than its guarantee, for another's request."""


def held(cache: Cache) -> Books:
    """Slots by component, tier and tenant, counted from nodes and requests."""
    found: Books = {}

    def count(name: str, tier: Tier, tenant: int, slots: bytes | None) -> None:
        key = name, tier, tenant
        found[key] = found.get(key, 0) + len(slots or b"") // SLOT_BYTES

    for node in cache.tree.nodes():
        root = node
        while root.parent is not None:
            root = root.parent
        tenant = cache.tree.tenant_of(cache.tree.namespace(root))
        for component, cell in zip(cache.tree.components, node.cells):
            count(component.name, Tier.DEVICE, tenant, cell.device)
            count(component.name, Tier.HOST, tenant, cell.host)
            if cell.incoming is not None:
                tier = Tier.HOST if cell.incoming.to_host else Tier.DEVICE
                count(component.name, tier, tenant, cell.incoming.slots)
    for request in cache.requests.values():
        for part in request.components:
            for name, tier, _, slots, _ in part.owners("", 0):
                count(name, tier, cache.tree.tenant_of(request.namespace), slots)
    return found


def rights(cache: Cache, right: str) -> Books:
    """Guarantees or limits in slots, from the settings."""
    found: Books = {}
    settings = [*cache.config.tenants.values()]
    for component in cache.tree.components:
        for tier, ledger in ((Tier.DEVICE, component.device), (Tier.HOST, component.host)):
            for tenant, each in enumerate(settings if ledger is not None else ()):
                assert ledger is not None
                own = getattr(each, f"host_{right}") if tier is Tier.HOST else None
                share = getattr(each, right) if own is None else own
                found[component.name, tier, tenant] = int(share * ledger.capacity + 1e-6)
    return found


class Player:
    """One cache with a guard, its requests, and copies that end when it says so.

    Attributes:
        running: requests that were admitted and have not ended.
    """

    def __init__(
        self,
        components: Sequence[str],
        tenants: Mapping[str, Mapping[str, Any]],
        **settings: Any,
    ) -> None:
        config = parse_config(
            {
                "components": {name: OPTIONS[name] for name in components},
                "page_size": PAGE,
                "device_tokens": 32 * PAGE,
                "host_tokens": 32 * PAGE,
                "tenants": tenants,
                "guard": "on",
                "guard_full_check": 4,
                "transfer_timeout_s": 1e-3,
                "load": None,
                **settings,
            }
        )
        self.engine = SteppedTransferEngine()
        self.cache = Cache(config, transfers=self.engine, parts=parts_of(config))
        self.running: list[Request] = []
        self._guarantees = rights(self.cache, "guarantee")
        self._limits = rights(self.cache, "limit")
        self._fed = 0

    def _watched(self, tenant: int | None, call: Callable[[], Result]) -> Result:
        """Call for a tenant; nobody else may be below its guarantee by it (K4)."""
        cache = self.cache
        before, floor = held(cache), self._guarantees
        components = cache.tree.by_name
        result = call()
        now = held(cache)
        for (name, tier, owner), was in before.items():
            left = now.get((name, tier, owner), 0)
            if owner == tenant or tenant is None or left >= was:
                continue
            if tier is Tier.HOST and cache.config.write_policy is WritePolicy.WRITE_BACK:
                continue  # its own data from DEVICE may take the place of its own on HOST
            wider = [
                other
                for other in components.values()
                if components[name].index in other.narrower and other.name != name
            ]
            if any(
                now.get((other.name, tier, owner), 0) < before.get((other.name, tier, owner), 0)
                for other in wider
            ):
                continue  # it hung from data that had been borrowed
            if left < min(was, floor.get((name, tier, owner), 0)):
                raise LostError(
                    f"{name} {tier.value}: tenant {owner} had {was} and has {left} slots, its "
                    f"guarantee is {floor[name, tier, owner]}; the request is of tenant {tenant}"
                )
        for key, most in self._limits.items():
            assert now.get(key, 0) <= most, (key, now.get(key), most)
        return result

    def _with_room(self, tenant: int, call: Callable[[], Result]) -> Result:
        """Call; where copies that nobody has run hold the room, let them run and call again."""
        try:
            return self._watched(tenant, call)
        except TransferError:
            while self.engine.pending:
                self.engine.step()
            return self._watched(tenant, call)

    def tenant(self, namespace: object) -> int:
        return self.cache.tree.tenant_of(namespace)

    def begin(
        self, namespace: object, tokens: Sequence[int], reserve: int = 0, chunk: int | None = None
    ) -> tuple[Request | None, Decision]:
        """Begin and admit a request; it is aborted at once if it is refused."""
        cache, mine = self.cache, self.tenant(namespace)
        key = TokenKey(tokens, namespace)
        request = self._watched(mine, lambda: cache.begin(key, reserve=reserve, chunk=chunk))
        decision = self._watched(mine, lambda: cache.admit(request))
        if decision.admitted:
            self._with_room(mine, lambda: cache.load_back(request))
            self.running.append(request)
            return request, decision
        self._watched(mine, lambda: cache.abort(request))
        return None, decision

    def step(self, request: Request) -> None:
        """One prefill chunk, or one decoded token of those reserved; they fit (A7)."""
        cache, mine = self.cache, self.tenant(request.namespace)
        if request.load_failed:
            self.abort(request)
            return
        if not request.ready:
            return
        n_tokens = 1
        if request.computed < request.prompt:
            n_tokens = cache.next_chunk(request)
            assert n_tokens > 0, "an admitted chunk fits (A7)"
        elif request.computed >= request.total:
            self.finish(request)
            return
        else:
            self._fed += 1
            request.key.extend([10_000 + self._fed])
        assert self._with_room(mine, lambda: cache.allocate(request, n_tokens)), "it fits (A7)"
        self._watched(mine, lambda: cache.computed(request, n_tokens))

    def checkpoint(self, request: Request) -> None:
        self._watched(self.tenant(request.namespace), lambda: self.cache.checkpoint(request))

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self._watched(self.tenant(request.namespace), lambda: self.cache.finish(request))

    def abort(self, request: Request) -> None:
        self.running.remove(request)
        self._watched(self.tenant(request.namespace), lambda: self.cache.abort(request))

    def copy(self, *, fails: bool = False) -> None:
        """The oldest copy ends."""
        if self.engine.pending:
            (self.engine.fail if fails else self.engine.step)()
        self._watched(None, self.cache.poll)

    def pin(self, namespace: object, tokens: Sequence[int]) -> bool:
        """Pin the cached part of a prefix; whether its tenant may have that many slots (K6)."""
        key = TokenKey(tokens, namespace)
        try:
            self._watched(self.tenant(namespace), lambda: self.cache.pin(key, owner=str(namespace)))
        except BudgetError:
            return False
        return True

    def settle(self) -> None:
        """All copies end."""
        while self.engine.pending:
            self.copy()
        self.cache.poll()

    def serve(self, namespace: object, tokens: Sequence[int], reserve: int = 0) -> int:
        """A request from its beginning to its end; the tokens it reuses."""
        request, decision = self.begin(namespace, tokens, reserve)
        assert request is not None, str(decision)
        self.settle()
        reused = request.anchor_tokens
        while request in self.running:
            self.step(request)
        self.settle()
        self.cache.check_integrity()
        return reused

    def is_empty_after_all(self) -> bool:
        """End everything, evict everything; whether nothing is left."""
        for request in list(self.running):
            self.abort(request)
        for owner in self.cache.stats().pins:
            self.cache.unpin_all(owner)
        self.settle()
        for _ in range(2):
            for component in self.cache.tree.components:
                self.cache.evict(component.name, 1_000)
                self.settle()
                if component.host is not None:
                    self.cache.evict(component.name, 1_000, Tier.HOST)
        self.cache.check_integrity()
        return not self.cache.tree.n_nodes
