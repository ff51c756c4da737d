"""One cache beside its model: a call, and everything that must hold after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from kvgraft.config import WritePolicy
from kvgraft.errors import ContractViolation, KvgraftError
from kvgraft.testing.machine.brute_force import BruteForce
from kvgraft.testing.machine.checks import (
    Gains,
    check_closure,
    check_flights,
    check_payloads,
    check_promises,
)
from kvgraft.testing.machine.deriving import model_components
from kvgraft.testing.machine.engines import PromptedTransferEngine
from kvgraft.testing.machine.hooks import HookCall, Hooks
from kvgraft.testing.machine.judging import HOOK_RULES, Judge, Stopped
from kvgraft.testing.machine.legality import Pressure, check_losses
from kvgraft.testing.machine.live import Live
from kvgraft.testing.machine.observing import observe
from kvgraft.testing.machine.payloads import Payloads
from kvgraft.testing.machine.predicting import Adopted, Predictor
from kvgraft.testing.machine.recency import Recency
from kvgraft.testing.machine.setups import Setup, open_cache
from kvgraft.testing.machine.sizes import Sizes
from kvgraft.testing.machine.trace import Trace
from kvgraft.types import Direction

__all__ = ["Bench"]

T = TypeVar("T")


class Bench:
    """A cache, its model, and the checks around every call.

    Args:
        setup: the component set.
        sizes: page size, policy and pools.
        judge: raises what is broken.

    Attributes:
        live: running requests, oldest first.
        seen: the cache after the last call.
        calls: the hook calls of the last call.
        counts: what happened, for reports.
        trace: the same in words.
    """

    def __init__(self, setup: Setup, sizes: Sizes, judge: Judge) -> None:
        self.setup, self.sizes, self.judge = setup, sizes, judge
        self.trace = Trace()
        self.trace.call(f"open {sizes} with {', '.join(setup.options)}")
        self.engine = PromptedTransferEngine()
        self.hooks = Hooks()
        try:
            self.cache = open_cache(setup, sizes, self.engine, self.hooks)
        except KvgraftError as error:
            judge.refuse(error, f"open {sizes}")
            raise Stopped from error
        self.model = BruteForce(sizes.page_size, model_components(self.cache.mounted))
        self.paged = [each for each in self.model.components if not each.is_state]
        self.states = [each for each in self.model.components if each.is_state]
        self._check_pools()
        self.payloads = Payloads(self.cache)
        self.recency = Recency(self.model)
        nbytes = {each.name: each.component.device.slot_nbytes for each in self.cache.mounted}
        self.predictor = Predictor(self.model, sizes.load, nbytes)
        self.live: list[Live] = []
        self.calls: list[HookCall] = []
        self.counts: Counter[str] = Counter()
        self.write_back = sizes.policy is WritePolicy.WRITE_BACK
        self.payloads.poison()
        self.seen = observe(self.cache, self.model)
        self.mirrored = [name for name, tier in self.seen.books if tier == "host"]

    def _check_pools(self) -> None:
        """Every slot of a pool has its row of memory (T8)."""
        for each in self.cache.mounted:
            for tier, pool in (("device", each.component.device), ("host", each.component.host)):
                rows = min((len(lanes) for lanes in pool.lanes), default=0) if pool else 0
                if pool is not None and pool.lanes and rows < pool.allocator.capacity:
                    said = f"{tier} pool of {pool.allocator.capacity} slots has {rows} rows"
                    self.judge.fail("T8", each.name, said)
                    raise Stopped

    def act(
        self,
        name: str,
        operation: Callable[[], T],
        *,
        pressure: Pressure | None = None,
        inserted: Adopted | None = None,
        uses: Callable[[T], None] | None = None,
        acknowledges: bool = False,
    ) -> T:
        """Run an operation, then check the books, what changed and every byte.

        Args:
            name: what it is called in counts and messages.
            operation: the call.
            pressure: which pools it may make room in; none by default.
            inserted: what the tree must adopt, unless the call returns False.
            uses: told what came out, before the checks, to note what was used.
            acknowledges: whether transfers may end meanwhile.

        Raises:
            ContractViolation: a rule is broken.
            Stopped: it failed, under a rule that is ignored.
        """
        before = self.seen
        pressure = pressure if pressure is not None else Pressure()
        self.recency.settle()
        result = self._attempt(name, operation)
        self.counts[name] += 1
        self.payloads.poison()
        after = self.seen = observe(self.cache, self.model)
        if uses is not None:
            uses(result)
        evicts = bool(pressure.device) and self.write_back
        if evicts:
            pressure = replace(pressure, host=dict.fromkeys(self.mirrored))
        check_losses(self.judge, before, after, pressure, self.recency)
        try:
            self.cache.check_integrity()
        except ContractViolation as violation:
            self.judge.refuse(violation, name)
        Gains(
            inserted=inserted if inserted is not None and result is not False else {},
            remade=any(pressure.device.values()),
            loads_may_end=acknowledges,
            backups_may_end=acknowledges or evicts,
        ).check(self.judge, before, after)
        check_closure(self.judge, self.model, after, host_closed=not self.write_back)
        check_promises(self.judge, self.model, after, self.live)
        check_flights(self.judge, self.payloads, self.engine, after)
        check_payloads(self.judge, self.model, self.payloads, before, after)
        return result

    def _attempt(self, name: str, operation: Callable[[], T]) -> T:
        """Run an operation; what it or a hook raises is a broken rule."""
        failed: Exception | None = None
        try:
            result = operation()
        except Exception as error:  # noqa: BLE001 - what comes out of the core is the finding
            failed = error
        self.calls = self.hooks.take()
        for call in self.calls:
            self.trace.hook(call)
        if failed is not None:
            self.judge.refuse(failed, name)
            raise Stopped from failed
        for call in self.calls:
            if call.error is not None:
                # A backup that cannot be built is given up; the core only logs it.
                said = f"{name}: {call.hook} raised {type(call.error).__name__}: {call.error}"
                self.judge.fail(HOOK_RULES[call.hook], call.component, said)
        for ticket, reason in self.engine.broken:
            self._cannot_run(ticket.copies[0].target if ticket.copies else None, reason)
        self.engine.broken.clear()
        return result

    def _cannot_run(self, target: object, error: Exception) -> None:
        name, tier = self.payloads.pool_of.get(id(target), (None, "host"))
        way = Direction.LOAD_BACK if tier == "device" else Direction.BACKUP
        rule = "R5" if way is Direction.LOAD_BACK else "B3"
        said = f"copies of a {way.value} cannot run: {type(error).__name__}: {error}"
        self.judge.fail(rule, name, said)
