"""The cache an engine embeds.

    prefetch = cache.storage.prefetch(key)    when it is queued, with a storage tier
    request = cache.begin(key)          match, pin                      -> Request
    cache.admit(request)                compare demands with headroom   -> Decision
    cache.load_back(request)            start the copies from HOST
    cache.next_chunk(request)           tokens the next step may compute
    cache.allocate(request, n)          slots for them
    ... the model runs ...
    cache.computed(request, n)          they exist now
    cache.step(requests, tokens)        all these for all that decode, once per pass
    cache.checkpoint(request)           share them
    cache.finish(request)               or abort, or retract
    cache.poll()                        once per scheduler step

One thread calls it. Nothing here waits, except write-back eviction and `drain`, with a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from inspect import iscoroutinefunction
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvgraft.config import parse_config
from kvgraft.errors import ConfigError
from kvgraft.optional import load_part
from kvgraft.parts import EventStream, Prefetch, Step
from kvgraft.policies import Hint
from kvgraft.requests.access import expect_hint
from kvgraft.requests.request import (
    ADMITTED,
    Request,
    expect_key,
)
from kvgraft.requests.resume_points import resume_pages
from kvgraft.requests.tables import slot_table, state_slot
from kvgraft.serving import Serving
from kvgraft.sizes import expect_count
from kvgraft.stats import CacheStats, ComponentStats, RequestStats, TokenStats
from kvgraft.transfers import Fence, TransferEngine
from kvgraft.transfers.engine import expect_fence
from kvgraft.tree.keys import TokenKey, Tokens
from kvgraft.tree.ledger import DEVICE
from kvgraft.types import Direction, Namespaces, Tier

if TYPE_CHECKING:
    import torch

    from kvgraft.parts import Tracers


__all__ = ["Cache"]

EVENTS = 65_536
"""Most events that wait for a reader, unless it says otherwise."""


class Cache(Serving):
    """One prefix tree over the pools of the installed components.

    `parts` chooses its parts when it opens; setting one later has no effect.

    Args:
        config: settings; every component it names must be installed or given in `plugins`.
        plugins: component packages used instead of installed ones of the same name.
        transfers: engine for copies between tiers; by default worker threads on the CPU and streams
            elsewhere.
        available: says how much memory pools may take; by default the memory available on the
            machine.
        parts: makes the parts of the cache; by default those that the settings ask for.
        clock: monotonic, in seconds, for `ttl_s`; by default the machine's.

    Attributes:
        config: the settings it runs with; sizes that were given in bytes are tokens here.
        mounted: its components in the tree's order, each with its `name` and its `component`, whose
            pools kernels read and write.
        tree: the prefix tree, with the ledgers of every component.
        storage: the storage tier; false without one.
        arenas: the budgets that pools share; None without one.
        points: counts resume points by kind: `made`, `used`, `skipped`, `lost`.
        guard: the checker of rules while it serves; None when the guard is off.
        pins: the pinned prefixes; an empty tuple until the first.
        requests: requests that have begun and not ended, by their `id()`.
        publisher: counts `checkpoints` that shared something, and `declined_checkpoints` that found
            no headroom (A12).
        closed: whether `close` was called.

    Raises:
        ConfigError: sizes or components that cannot work, pools larger than that memory, or a clock
            that cannot be called.
        PluginError: a component that cannot be used.
    """

    @classmethod
    def open(
        cls,
        components: Mapping[str, dict[str, Any]] | Sequence[str],
        *,
        transfers: TransferEngine | None = None,
        clock: Callable[[], float] | None = None,
        ranks: Any = None,
        **settings: Any,
    ) -> Cache:
        """A cache from plain values: `Cache.open(["full"], device_tokens=1_000_000)`.

        With `ranks`, a process group of `torch.distributed`, each of its ranks opens one (D1).
        Raises `ConfigError`, which names a setting that is missing, unknown or impossible.
        """
        given = {"components": components, **settings}
        if ranks is None:
            return cls(parse_config(given), transfers=transfers, clock=clock)
        cache: Cache = load_part("ranks")(cls, ranks, given, transfers, clock)
        return cache

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = "+".join(each.name for each in self.mounted)
        closed = ", closed" if self.closed else ""
        n_requests = len(self.requests)
        return (
            f"<Cache {names}: page size {self.config.page_size}, "
            f"{self.config.device_tokens} tokens on {self.config.device}, "
            f"{self.config.host_tokens} on host, "
            f"{n_requests} request{'' if n_requests == 1 else 's'}{closed}>"
        )

    # -- the life of a request

    def begin(  # noqa: PLR0913 - each given by its name
        self,
        key: TokenKey,
        *,
        reserve: int = 0,
        chunk: int | None = None,
        prefetch: Prefetch | None = None,
        resume_at: int | Sequence[int] | None = None,
        hint: Hint | str | None = None,
        max_deferrals: int = 0,
        priority: int | None = None,
        ttl_s: float | None = None,
    ) -> Request:
        """Match `key` and pin the data found (M1 to M9).

        At least one token is left to compute (M2). Nothing is allocated (M6).

        Args:
            key: the prompt; the request appends to it while decoding. It is the key of one running
                request at a time.
            reserve: decode tokens to keep slots for.
            chunk: most tokens a prefill step computes; the whole prompt by default.
            prefetch: the prefetch started when the request was queued; pages that have not arrived
                are given up.
            resume_at: tokens of the prompt after which others will go on differently: the end of a
                system prompt, of a document. They are resume points, rounded down to pages (I10).
            hint: whether the sequence comes back, as in `finish`, if that is known already: "over"
                for the only request of a batch job. It holds unless `finish` gives another.
            max_deferrals: how many calls of `admit` may defer it while a running request computes
                pages that it could resume from (`Request.pending`); by default it computes them,
                too.
            priority: of the data that it uses and computes, from -8 to 8, 0 by default: data of a
                lower one leaves first. The last use of data decides.
            ttl_s: its data expires so many seconds of the cache's clock after it began, and anew
                after its end; with 0 at its end. Expired data leaves before all other.

        Raises:
            ConfigError: no `TokenKey`, an empty one or one longer than `max_tokens`, a negative
                reservation or `max_deferrals`, a chunk below one token, no hint of that name, no
                such priority or time, or a namespace that storage has no name for.
            LeaseError: the cache is closed, a running request has this key, or the prefetch was
                cancelled, or given before, or belongs to another cache.
        """
        prompt = expect_key(key).n_tokens
        if type(reserve) is not int or reserve < 0:
            reserve = expect_count("begin: reserve", reserve)
        chunk = prompt if chunk is None else expect_count("begin: chunk", chunk, 1)
        if prompt < 1:
            raise ConfigError(f"request of {prompt} tokens; give at least 1")
        if self.config.max_tokens is not None:
            self._expect_length("begin", prompt)
        if self.closed:
            self.expect_open()
        if self.tracers is not None:
            self.tracers.notify("beginning", key)
        request = Request(key, prompt, prompt + reserve, chunk, self.mark)
        if resume_at is not None:
            request.resume_at = resume_pages(resume_at, prompt, self.tree.page_size)
        if hint is not None:
            request.hint = expect_hint("begin", hint)
        if type(max_deferrals) is not int or max_deferrals:
            request.deferrals_left = expect_count("begin: max_deferrals", max_deferrals)
            load_part("pending")  # refused here where it is missing
        if priority is not None or ttl_s is not None:
            load_part("lifetimes").ask("begin", request, priority, ttl_s)
        self._begin(request, prefetch)
        return request

    def _expect_length(self, call: str, prompt: int) -> None:
        """Refuse a prompt that the tables of `step` are not wide enough for, by whole pages."""
        most, size = self.config.max_tokens, self.tree.page_size
        if most is not None and prompt > -(-most // size) * size:
            raise ConfigError(
                f"{call}: a prompt of {prompt} tokens, max_tokens={most}; shorten it, or open the "
                "cache with more"
            )

    def fork(self, request: Request, tokens: Tokens = (), *, reserve: int | None = None) -> Request:
        """Begin a request that continues a running one, on a key of its own: for n > 1.

        The running request's data is shared first, as by `checkpoint`, so its tables may name other
        slots afterwards. The new request resumes there: it computes the tokens behind the last
        boundary that could be shared, and its states are copies (M8). Admit it like any other.

        Args:
            request: an admitted one, usually at the end of its prompt.
            tokens: the new request's own, behind the tokens of the other's key so far: the token
                that it samples first.
            reserve: decode tokens to keep slots for; by default as many as the other has left.

        Returns:
            A request of the same chunk, hint, priority and times to live.

        Raises:
            ConfigError: tokens that a key refuses, more than `max_tokens`, or a negative
                reservation; nothing has changed.
            LeaseError: the request is not admitted, the cache is closed, or `checkpoint` refuses
                its key; nothing has changed.
        """
        self.expect_open()
        self.expect(request, ADMITTED)
        request.expect_namespace()
        key = copy(request.key)
        key.extend(tokens)
        if reserve is None:
            reserve = max(0, request.total - key.n_tokens)
        else:
            reserve = expect_count("fork: reserve", reserve)
        self._expect_length("fork", key.n_tokens)
        self.checkpoint(request)
        priority, ttl_s = request.requested_retention or (None, None)
        return self.begin(
            key,
            reserve=reserve,
            chunk=request.chunk,
            hint=request.hint,
            priority=priority,
            ttl_s=ttl_s,
        )

    def finish(
        self,
        request: Request,
        fence: Fence | None = None,
        hint: Hint | str | None = None,
        *,
        priority: int | None = None,
        ttl_s: float | None = None,
    ) -> int:
        """End a request and leave its data to the tree; return the tokens cached (I6, I7).

        A state component donates its live state if it stands on a page boundary. `hint` tells the
        policy whether the sequence comes back: "continues", "turn-ended" or "over". By default it,
        priority and ttl, which counts from now, are those of `begin`. Where the request's namespace
        was cleared meanwhile nothing is cached: the result is 0.
        """
        self.expect(request, ADMITTED)
        if fence is not None:
            expect_fence(fence)
        hint = request.hint if hint is None else expect_hint("finish", hint)
        if request.key.namespace is not request.namespace:
            request.expect_namespace()
        cleared = bool(self.tree.cleared) and self.tree.is_cleared(request.root)
        page = 0 if cleared else self.publisher.ending_page(request)
        if priority is not None or ttl_s is not None:
            load_part("lifetimes").ask("finish", request, priority, ttl_s)
        self.accesses.finish(request, hint)
        if self.tree.lifetimes is not None or request.requested_retention is not None:
            self._retain(request)
        if fence is not None:
            self.journal.set_fence(fence)
        n_pages = 0 if cleared else self.publisher.finish(request, page)
        self._end(request)
        if self.tracers is not None:
            self.tracers.notify("finished", request)
        return n_pages * self.tree.page_size

    def retract(self, request: Request, fence: Fence | None = None) -> int:
        """`finish`, to be begun again later with the same key; returns the tokens cached."""
        tokens = self.finish(request, fence, Hint.CONTINUES)
        request.key.counted = request.computed
        return tokens

    def explain(self, key: TokenKey, prefetch: Prefetch | None = None) -> Any:
        """Per component, why the anchor of `key` is not deeper (M9); and the result of a prefetch.

        It also lists the resume points on the way, the kinds of points that were skipped in this
        cache, with the reason of the last one (I11), and how many were evicted or cleared. The text
        of the result, a `kvgraft_observe.explaining.Explanation`, is for people.

        Raises:
            ConfigError: no `TokenKey`, or `kvgraft-observe` is not installed.
            ContractViolation: K1, the eviction policy cannot say how it ranks data.
        """
        return load_part("explain")(self, expect_key(key), prefetch)

    # -- all running requests at once

    def step(
        self,
        requests: Sequence[Request],
        tokens: object = None,
        *,
        n_tokens: int = 1,
        n_drafts: int = 0,
        n_computed: object = None,
        fence: Fence | None = None,
    ) -> Step:
        """Take running requests from one pass of the model to the next, all together.

        For each of them it does `computed` with the tokens that the last step gave slots to,
        `allocate`, and if there is room `key.extend` with its new tokens. A request gets the slots
        of all components, or is among `refused` with its key unchanged; its last tokens are noted.

        A request has a row in the tables of `table_rows` from its first step until it ends or
        restarts. Other calls may be made with it between two steps. Cost: array operations over all
        requests, and `computed` and `allocate` for those that leave data behind, keep a first
        state, or take pages beyond their reservation.

        Args:
            requests: admitted ones that are loaded back, each once; usually those that decode.
            tokens: the tokens of each that the next pass computes, `[n_requests]` or
                `[n_requests, n]`: an array or a tensor on the CPU, as sampled in the last pass.
                None where the engine extends the keys itself, then or later (see `computed`). Each
                key ends at the tokens computed so far, those of the last pass included.
            n_tokens: tokens of the next pass, for each request; 0 after the last pass, to note only
                its computed tokens.
            n_drafts: drafts that the pass verifies behind its token, at most `max_drafts`; fewer
                for a request whose state is to be kept before: see `Step.n_tokens` (G4).
            n_computed: tokens of the last step whose data exists, one number or one per request; by
                default all. Fewer where drafts were rejected.
            fence: when that data exists, as in `computed`.

        Raises:
            ConfigError: tokens that a key refuses, arguments of wrong types, or more requests or
                tokens than `max_requests` and `max_tokens`; nothing has changed.
            LeaseError: a request that is not admitted or not loaded back, or is there twice, or
                more computed tokens than its last step had, or tokens for a key that ends
                elsewhere: its prompt is not computed, or it was extended; nothing has changed.
        """
        self.expect_open()
        if fence is not None:
            expect_fence(fence)
        stepper = self.stepper
        batch = stepper.begin(requests, tokens, n_tokens, n_computed, self.expect_running, n_drafts)
        self.journal.set_fence(fence)
        for request, n_noted in batch.to_note():
            self.computed(request, n_noted)
        stepper.note(batch)
        given, refused = stepper.take(batch, self.allocate)
        step: Step = stepper.end(batch, given, refused)
        return step

    def table_rows(self, component: str) -> torch.Tensor:
        """The page table of a paged component for all running requests.

        Int32 `[max_requests, max_pages * slots_per_page]` on the CPU, in page-locked memory where
        the cache is on CUDA. `step` writes the entries that change, in place. Row `request.row`
        equals `table` of that request, as of its last step; entries behind its pages have no
        meaning. Without `max_requests` and `max_tokens` it grows, and is then another tensor: read
        it after every step.

        Raises:
            ConfigError: a component that has no pages.
        """
        table: torch.Tensor = self.stepper.rows.tensor(self.tree.component(component))
        return table

    # -- tables and states that an engine reads

    def table(self, request: Request, component: str, start: int = 0) -> npt.NDArray[np.int32]:
        """The request's DEVICE slots of a paged component, int32 `[n_pages * slots_per_page]`.

        From page `start` on; -1 where it holds none, such as behind a window. Raises `LeaseError`
        once it has ended, and `ConfigError` for a component of states or a wrong `start`.
        """
        if type(start) is not int or start < 0:
            start = expect_count("table: start", start)
        return slot_table(request, self.tree.component(component), DEVICE, start)

    def host_table(self, request: Request, component: str) -> npt.NDArray[np.int32]:
        """The request's HOST slots of a component at home there, int32 `[n_pages]`."""
        return slot_table(request, self.tree.component(component), Tier.HOST)

    def private_slots(self, request: Request, component: str) -> tuple[bytes, ...]:
        """Slots of a component's private pools, in their order: the request's until it ends (H8).

        Each is int32 `[n]` as bytes, taken at admission; `restart` takes them back too.

        Raises:
            LeaseError: the request is not admitted, or has ended.
        """
        self.expect(request, ADMITTED)
        return request.components[self.tree.component(component).index].private

    def state_slot(self, request: Request, component: str) -> int:
        """The slot of a state component that the model writes for this request."""
        self.expect(request, ADMITTED)
        return state_slot(request, self.tree.component(component))

    # -- transfers, checks, the end

    def poll(self) -> int:
        """Process transfers that ended; call once per scheduler step. Never waits.

        Under write-back it begins the copies of the data that will leave DEVICE next (E4).

        With one budget for several pools (`device_memory`), slots may move here and in
        `move_memory`, nowhere else: call it between two steps of the model, and read tables and
        state slots after it. Under write-back, evictions for that may wait for copies.
        """
        ended = self.journal.poll()
        if self.arenas is not None:
            moved = self.arenas.moved_slots
            self.arenas.poll()
            if self.arenas.moved_slots != moved:
                self._touch_rows()
        if self.storage:
            self.storage.poll()
        if self.tree.lifetimes is not None:
            self.tree.lifetimes.read_clock()
        if self.tree.cleared:
            self.evictor.sweeper.resume()
        self.clean_reserve.fill()
        if self.recorder is not None:
            self.recorder.deliver()
        if self.tracers is not None:
            self.tracers.notify("polled")
        return ended

    def drain(self) -> bool:
        """Wait for transfers in flight, at most the configured time per tier; whether all ended.

        It does not wait for a prefetch that waits for room on HOST.
        """
        ended = self.journal.drain(self.config.transfer_timeout_s)
        if self.storage:
            ended = self.storage.drain(self.config.transfer_timeout_s) and ended
        self.evictor.finish_sweep()
        if self.tracers is not None:
            self.tracers.notify("polled")
        return ended

    async def ready(self, awaited: Request | Prefetch) -> None:
        """Wait for a request's load-back, or a prefetch; the loop's other tasks run meanwhile.

        For engines on asyncio: await it on the scheduler's thread. It polls the cache, at growing
        pauses of at most 10 ms, and starts no thread. Any number may wait at once, the loop may
        poll as well, and a cancelled wait changes nothing. Afterwards `awaited.ready` is true, even
        if a load-back failed: check `request.load_failed`.

        Args:
            awaited: a request after `load_back`, or a prefetch of this cache.

        Raises:
            LeaseError: the request is not admitted, or ended or was restarted meanwhile; or its
                load-back has not started.
            TransferError: it took longer than `transfer_timeout_s`; nothing has changed.
        """
        await load_part("ready")(self, awaited)

    def evict(self, component: str, n_slots: int, tier: Tier = Tier.DEVICE) -> int:
        """Free at least `n_slots` more slots of one pool; returns how many it freed (E6).

        Raises:
            ConfigError: no such component or tier, or no number of slots.
            LeaseError: the cache is closed.
        """
        self.expect_open()
        n_slots = expect_count("evict: slots", n_slots)
        _expect_tier("evict", tier)
        return self.evictor.evict(self.tree.component(component), n_slots, tier)

    def move_memory(self, giver: str, taker: str, tier: Tier = Tier.DEVICE) -> bool:
        """Move an extent of a tier's budget from one component's pool to another's (K7).

        It moves at once, or when `poll` processes the end of transfers that use its slots. Tables
        and state slots that were read before are invalid afterwards.

        Returns:
            Whether it moves: not if promised slots would be missing, the pool has no other extent,
            or another one is on its way.

        Raises:
            ConfigError: the components do not share a budget on that tier.
            LeaseError: the cache is closed.
        """
        self.expect_open()
        _expect_tier("move_memory", tier)
        if self.arenas is None:
            raise ConfigError(
                "move_memory: the cache has no budget that pools share; open it with device_memory"
            )
        moves = self.arenas.move(giver, taker, tier)
        self._touch_rows()
        return moves

    def _touch_rows(self) -> None:
        """Slots may have moved: the next step reads all rows anew."""
        if self._stepper is not None:
            self._stepper.rows.touch_all()

    def pin(self, key: TokenKey, *, owner: str, max_tokens: int | None = None) -> Any:
        """Keep the cached part of a prefix, such as a system prompt, until it is unpinned (K6).

        A part that is not cached is not pinned, not even when it is computed later: `tokens` of the
        result, a `kvgraft_retention.Pin`, is the length of the pinned part. So pin a prefix after a
        request that computed it has finished, or was checkpointed.

        Args:
            key: the prefix; a last page that is not full is left out.
            owner: whose it is, for `stats` and `unpin_all`.
            max_tokens: most tokens to pin.

        Raises:
            ConfigError: no `TokenKey`, an owner without a name, fewer than no tokens, or
                `kvgraft-retention` is not installed.
            BudgetError: it would take slots that were promised to admitted requests, or pins would
                hold more than `pin_share` of a pool; nothing was pinned.
            LeaseError: the cache is closed.
        """
        n_tokens = expect_key(key).n_tokens
        if max_tokens is not None:
            n_tokens = min(n_tokens, expect_count("pin: max_tokens", max_tokens))
        _expect_owner("pin", owner)
        self.expect_open()
        return self._opened_pins().pin(key, owner, n_tokens // self.tree.page_size)

    def unpin(self, pin: Any) -> None:
        """Unpin a prefix: its data may be evicted again.

        Nothing happens if its namespace was cleared meanwhile.

        Raises:
            LeaseError: it was unpinned before, or belongs to another cache.
        """
        self._opened_pins().unpin(pin)

    def unpin_all(self, owner: str) -> int:
        """Unpin all prefixes of an owner; returns how many there were."""
        _expect_owner("unpin_all", owner)
        return self.pins.unpin_all(owner) if self.pins else 0

    def _opened_pins(self) -> Any:
        if isinstance(self.pins, tuple):
            self.pins = load_part("pins")(self.tree, self.leases, self.config.pin_share)
        return self.pins

    def announce(self, key: TokenKey, *, place: int | None = None) -> Any:
        """Announce that a request waits: the cached prefix of `key` leaves after other data.

        See `kvgraft_retention.announcing.announce`. Withdraw the result once it is admitted.
        """
        return load_part("announce")(self, key, place=place)

    def clear(self, namespace: object = Namespaces.ALL, *, version: object = None) -> Any:
        """Forget all data of one namespace, or of all, on every tier, while requests run.

        No request hits it from now on: after new weights were loaded, none resumes from the old
        ones' data. Data without a holder is freed in parts of some tens of nodes: the first at
        once, another in each `poll`, the rest in `drain`; requests that need room take it there
        first. Data that a request, a pin or a copy holds is freed at a `poll` after that ends.
        Admitted requests go on with their data and share nothing; `retract` them first to compute
        them again. Requests begun and not admitted are matched again. Prefetches under way end, and
        so do pins. STORAGE gets other names for later data, which a restart keeps once `drain`
        returned True. O(namespaces + requests + pins), nodes where events are read; a `ClearStats`.

        Args:
            namespace: clear only this one. None is the namespace of keys without any.
            version: of later data in STORAGE, shared by all that give the same; by default its own.

        Raises:
            ConfigError: a namespace or version of another type, or no `kvgraft-retention`.
            LeaseError: the cache is closed.
        """
        self.expect_open()
        return load_part("clear")(self, namespace, version)

    def stats(self) -> CacheStats:
        """All counts since the cache was opened, and the owners of its slots now.

        A copy of counters and ledgers: O(components + pins). It waits for nothing. Another thread
        than the scheduler's may call it, too; its numbers are then not all of the same moment.
        """
        hits, publisher, leases = self.hits, self.publisher, self.leases
        return CacheStats(
            TokenStats(
                hits.asked,
                hits.device,
                hits.host,
                hits.storage,
                publisher.tokens,
                hits.recomputed,
            ),
            RequestStats(
                leased=max(0, len(self.requests) - len(self.running)),
                running=len(self.running),
                admitted=hits.admitted,
                checkpoints=publisher.checkpoints,
                declined_checkpoints=publisher.declined_checkpoints,
                copies_on_write=self.states.copies_on_write,
                shared_loads=leases.shared_loads,
                skipped_loads=leases.skipped_loads,
            ),
            {
                component.name: ComponentStats(
                    of_component,
                    component.device.stats(),
                    None if component.host is None else component.host.stats(),
                    tuple([ledger.stats() for ledger in private]),
                )
                for component, of_component, private in zip(
                    self.tree.components, hits.of_components(), self.private
                )
            },
            self.journal.stats(Direction.LOAD_BACK),
            self.journal.stats(Direction.BACKUP),
            self.points.stats(),
            self.storage.stats() if self.storage else None,
            self.hits.of_tenants(),
            self.pins.stats() if self.pins else {},
        )

    def events(self, limit: int = EVENTS) -> EventStream:
        """A stream of the cache's events, to be read with `take` (V1, V2).

        A reader that takes no event while `limit` events come loses them and begins again (V3).
        Without an open stream events cost nothing.

        Raises:
            ConfigError: a limit below 1.
            LeaseError: the cache is closed.
        """
        return self._open_stream(limit, None)

    def observe(self, observer: Callable[[list[Any]], object], limit: int = EVENTS) -> EventStream:
        """Give the cache's events to `observer` at every `poll`, until the stream is closed.

        It gets them as a list, on the thread that polls, and must not call the cache. If it raises,
        the exception is logged, its events are lost and counted, and it begins again after some
        polls, with a snapshot (V3).

        Raises:
            ConfigError: a limit below 1, or an observer that is no function or is `async`.
            LeaseError: the cache is closed.
        """
        _expect_observer(observer)
        return self._open_stream(limit, observer)

    def add_tracer(self, tracer: Any) -> None:
        """Notify a `kvgraft_observe.tracing.Tracer` of each step of a request's life from now on.

        It is called inside the engine's calls. Without a tracer a step costs a comparison.

        Raises:
            ConfigError: it is no `Tracer`, or `kvgraft-observe` is not installed.
        """
        tracers = self.tracers or load_part("tracers")()
        tracers.add(tracer)
        self._use_tracers(tracers)

    def remove_tracer(self, tracer: Any) -> None:
        """Stop notifying a tracer; nothing happens if it was never added."""
        if self.tracers is not None:
            self.tracers.remove(tracer)
            self._use_tracers(self.tracers)

    def _use_tracers(self, tracers: Tracers) -> None:
        self.tracers = tracers if tracers else None
        if self.tier is not None:
            notify = partial(tracers.notify, "prefetching")
            self.tier.on_prefetch = notify if tracers else None

    def _open_stream(
        self, limit: int, observer: Callable[[list[Any]], object] | None
    ) -> EventStream:
        limit = expect_count("events: limit", limit, 1)
        self.expect_open()
        if self.recorder is None:
            self.recorder = self._new_recorder(self.tree, self._stop_recording)
        stream: EventStream = self.recorder.open(limit, observer)
        return stream

    def _stop_recording(self) -> None:
        """The last stream was closed."""
        self.recorder = None

    def check_integrity(self) -> None:
        """Recompute every book from the tree, the pools and the requests; O(cache).

        Raises:
            IntegrityError: naming the rule that is broken, with the numbers.
            ConfigError: the guard, which has the check, is not installed.
        """
        load_part("guard").check_cache(self)

    def close(self) -> None:
        """Finish transfers in flight and stop the engine.

        Afterwards only `finish`, `retract` and `abort` may change anything; other such calls are
        refused.
        """
        self.closed = True
        self.journal.drain(self.config.transfer_timeout_s)
        if self.storage:
            self.storage.close(self.config.transfer_timeout_s)
        self.journal.engine.close()


def _expect_owner(call: str, owner: object) -> None:
    if not isinstance(owner, str) or not owner:
        raise ConfigError(f"{call}: owner {owner!r:.40}; give a name, such as 'router'")


def _expect_tier(call: str, tier: object) -> None:
    if tier is not Tier.DEVICE and tier is not Tier.HOST:
        raise ConfigError(f"{call}: tier {tier!r:.40}; give Tier.DEVICE or Tier.HOST")


def _expect_observer(observer: object) -> None:
    if not callable(observer) or iscoroutinefunction(observer):
        said = "; give a function, not an async one, of a list of events"
        raise ConfigError(f"observe: observer {observer!r:.40}{said}")
