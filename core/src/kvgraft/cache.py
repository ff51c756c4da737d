"""The cache an engine embeds.

    request = cache.begin(key)          match, pin                      -> Request
    cache.admit(request)                compare demands with headroom   -> Decision
    cache.load_back(request)            start what HOST must deliver
    cache.next_chunk(request)           tokens the next step may compute
    cache.allocate(request, n)          slots for them
    ... the model runs ...
    cache.computed(request, n)          they exist now
    cache.checkpoint(request)           share them
    cache.finish(request)               or abort, or retract
    cache.poll()                        once per scheduler step

One thread calls it. Nothing here waits, except write-back eviction and `drain`, with a bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvgraft.admission.account import Account
from kvgraft.admission.budget import Budget
from kvgraft.admission.decision import Decision, Outcome
from kvgraft.config import CacheConfig, WritePolicy
from kvgraft.dispatch import Mounted, mount
from kvgraft.errors import ConfigError, KvgraftError, LeaseError
from kvgraft.leasing import Leasing
from kvgraft.mirroring import Mirroring
from kvgraft.pools import SLOT_BYTES, BuildContext
from kvgraft.registry import Plugin, select
from kvgraft.request import Request, Stage
from kvgraft.room import Room
from kvgraft.transfers import CpuTransferEngine, Fence, Journal, Transfer, TransferEngine
from kvgraft.tree import inserting, operations, pinning
from kvgraft.tree.explaining import Explanation, explain
from kvgraft.tree.integrity import SlotOwner, check_integrity
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.track import ordered
from kvgraft.tree.tree import Tree
from kvgraft.types import Direction, Span, Tier

__all__ = ["Cache"]


class Cache:
    """One prefix tree over the pools of the installed components.

    Args:
        config: settings; every component it names must be installed or given in `plugins`.
        plugins: component packages used instead of installed ones of the same name.
        transfers: engine for copies between tiers; by default worker threads on the CPU and side
            streams on CUDA.

    Raises:
        ConfigError: sizes or components that cannot work.
        PluginError: a component that cannot be used.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        plugins: Sequence[Plugin] = (),
        transfers: TransferEngine | None = None,
    ) -> None:
        self.config = config
        given = {plugin.name: plugin for plugin in plugins}
        names = list(config.components)
        installed = {p.name: p for p in select([name for name in names if name not in given])}
        context = BuildContext(
            page_size=config.page_size,
            device=config.device,
            device_tokens=config.device_tokens,
            host_tokens=config.host_tokens,
            pin_host=torch.device(config.device).type == "cuda",
        )
        mounted = {
            name: mount(given.get(name) or installed[name], config.components[name], context)
            for name in names
        }
        shapes = [each.shape for each in mounted.values()]
        self.mounted: list[Mounted] = [mounted[shape.name] for shape in ordered(shapes)]
        device, host = _ledgers(self.mounted)
        self.private: list[tuple[Ledger, ...]] = [
            tuple(Ledger(each.name, Tier.DEVICE, pool.allocator) for pool in each.component.private)
            for each in self.mounted
        ]
        self.tree = Tree(
            config.page_size,
            shapes,
            device,
            host,
            prefix_closed_host=config.write_policy is not WritePolicy.WRITE_BACK,
        )
        engine = transfers if transfers is not None else _default_engine(config)
        self.journal = Journal(self.tree, self.mounted, engine)
        self.room = Room(self.tree, self.journal, config.write_policy, config.transfer_timeout_s)
        self.mirroring = Mirroring(self.tree, self.journal, self.room, config.write_policy)
        self.leasing = Leasing(self.tree, self.mounted, self.mirroring, config.load)
        self.budget = Budget(self.tree, self.mounted, self.private)
        self.requests: dict[int, Request] = {}
        self._state_tracks = tuple(track for track in self.tree.tracks if track.is_state)
        self._paged_tracks = tuple(track for track in self.tree.tracks if not track.is_state)
        self._bounded_tracks = tuple(t for t in self._paged_tracks if not t.is_everything)
        self.copies_on_write = 0
        self.checkpoints = 0
        self.declined_checkpoints = 0

    @classmethod
    def open(
        cls, components: Mapping[str, dict[str, Any]] | Sequence[str], **settings: Any
    ) -> Cache:
        """A cache from plain values: `Cache.open(["full"], device_tokens=1_000_000)`.

        Raises:
            ConfigError: a setting that is unknown or impossible, named.
        """
        options = components if isinstance(components, Mapping) else {n: {} for n in components}
        return cls(parse_config({"components": dict(options), **settings}))

    # -- the life of a request

    def begin(self, key: TokenKey, *, reserve: int = 0, chunk: int | None = None) -> Request:
        """Match `key` and pin what was found (M1 to M9).

        At least one token is left to compute (M2). Nothing is allocated (M6).

        Args:
            key: the prompt; the request appends to it while decoding.
            reserve: decode tokens to keep slots for.
            chunk: most tokens a prefill step computes; the whole prompt by default.

        Raises:
            ConfigError: an empty key, a negative reservation or a chunk below one token.
        """
        prompt = key.n_tokens
        if prompt < 1 or reserve < 0 or (chunk is not None and chunk < 1):
            raise ConfigError(
                f"request of {prompt} tokens, reserve {reserve}, chunk {chunk}; "
                "give at least 1 token, reserve >= 0 and chunk >= 1"
            )
        request = Request(key, prompt, prompt + reserve, chunk if chunk is not None else prompt)
        self.leasing.lease(request, (prompt - 1) // self.tree.page_size)
        self.requests[id(request)] = request
        return request

    def admit(self, request: Request) -> Decision:
        """Promise the request its slots, or say which pool is short (A1 to A13).

        A deferred request keeps its lease; release it with `abort` or ask again after `restart`.
        """
        self._expect(request, Stage.LEASED)
        if request.limited == Leasing.CROWDED:
            self.leasing.renew(request)
        decision = self.budget.decide(request)
        if decision.outcome is Outcome.NEVER_FITS and request.anchor_tokens:
            # Holding a prefix can take more than computing it again; try as a miss (A8).
            self.leasing.release(request)
            self.leasing.lease(request, 0)
            decision = self.budget.decide(request)
        if decision.admitted:
            self.budget.open(request)
            request.stage = Stage.ADMITTED
        return decision

    def load_back(self, request: Request, fence: Fence | None = None) -> list[Transfer]:
        """Start what HOST must deliver; the transfers to wait for, others' included (R1 to R7).

        The request may run once `request.ready`; if `request.load_failed`, call `restart`.
        """
        self._expect(request, Stage.ADMITTED)
        tracks = self.tree.tracks
        request.waits = [
            self.journal.find(operation)
            for operation in operations.waits_for(request.receipt, tracks)
        ]
        self.leasing.shared_loads += len(request.waits)
        plan = operations.load_plan(request.receipt, tracks)
        if any(plan):
            for track, nodes in zip(tracks, plan):
                if nodes:
                    self.room.on_device(track, sum(track.n_slots(node) for node in nodes))
            operation = operations.begin_load_back(self.tree, request.receipt)
            if operation is None:
                raise KvgraftError("load-back of an admitted request found no room; report this")
            for pair in operation.pairs:
                request.accounts[pair.track.index].spend(len(pair.device) // SLOT_BYTES)
            request.waits.append(self.journal.submit(operation, Direction.LOAD_BACK, fence))
        return request.waits

    def restart(self, request: Request) -> None:
        """Match again, as if new: after a failed load-back (R5) or a long deferral.

        What it holds is given up; the request must be admitted again.
        """
        if request.stage is Stage.CLOSED:
            raise LeaseError("request is closed; begin a new one")
        self._give_up(request)
        request.prompt = max(request.prompt, request.key.n_tokens)
        request.total = max(request.total, request.prompt)
        request.stage = Stage.LEASED
        self.leasing.lease(request, (request.prompt - 1) // self.tree.page_size)

    def next_chunk(self, request: Request, limit: int | None = None) -> int:
        """Prefill tokens the next step may compute; 0 defers it, unchanged (A5, A6).

        Ends at boundaries where a state is captured, and on a page boundary unless it ends the
        prompt. Larger than the admitted chunk only if every pool has the headroom (A12).
        """
        self._expect(request, Stage.ADMITTED)
        page_size = self.tree.page_size
        left = request.prompt - request.computed
        tokens = min(left, limit if limit is not None else request.chunk)
        for page in request.checkpoints:
            boundary = page * page_size
            if request.computed < boundary < request.computed + tokens:
                tokens = boundary - request.computed
                break
        if tokens < left and (request.computed + tokens) % page_size:
            aligned = (request.computed + tokens) // page_size * page_size - request.computed
            tokens = aligned if aligned > 0 else tokens
        return self.budget.fitting_chunk(request, tokens)

    def allocate(self, request: Request, n_tokens: int) -> bool:
        """Slots for the next `n_tokens` tokens.

        Always succeeds within what was admitted (A7). Beyond it, succeeds if every pool has
        headroom; otherwise nothing changes, False is returned, and the engine retracts a request.
        A state component's live state is set up here, by copy on write from the prefix (M8).

        Raises:
            LeaseError: a load-back the request waits for has not ended or has failed.
        """
        self._expect(request, Stage.ADMITTED)
        if request.waits:
            if not request.ready or request.load_failed:
                raise LeaseError("allocate before the load-back delivered; poll, or restart")
            request.waits = []
            pinning.release_host_copy(self.tree, request.receipt)
        page_size = self.tree.page_size
        pages = -(-(request.computed + n_tokens) // page_size) - request.allocated
        if pages > 0 and not self._allocate_pages(request, pages):
            return False
        for track in self._state_tracks:
            states = request.states[track.index]
            assert states is not None
            if states.live is None:
                self._set_up_state(request, track.index)
        return True

    def computed(self, request: Request, n_tokens: int) -> None:
        """The data of the next `n_tokens` tokens exists in the allocated slots.

        Captures states at their boundaries, gives back pages behind bounded reaches, and loosens
        the pins behind them (L6).
        """
        self._expect(request, Stage.ADMITTED)
        before = request.computed // self.tree.page_size
        request.computed += n_tokens
        page, rest = divmod(request.computed, self.tree.page_size)
        if not rest and self._state_tracks:
            self._capture_states(request, page)
        if page > before and (self._bounded_tracks or self._state_tracks):
            for track in self._bounded_tracks:
                self._give_back_behind(request, track.index, page)
            pinning.slide(self.tree, request.receipt, page)

    def checkpoint(self, request: Request, fence: Fence | None = None) -> bool:
        """Share what the request computed so far, up to the deepest legal boundary (I5, I6).

        Afterwards `table` may name other slots for pages another request had inserted before.
        Declined, returning False and changing nothing, when there is nothing new, or when the
        shared pages could not be replaced out of the headroom (A12).
        """
        self._expect(request, Stage.ADMITTED)
        page = request.computed // self.tree.page_size
        for track in self._state_tracks:
            states = request.states[track.index]
            assert states is not None
            page = min(page, max(states.captured, default=0))
        if page <= request.receipt.anchor.end:
            return False
        if not self.budget.can_part(request, page):
            self.declined_checkpoints += 1
            return False
        inserted = self._insert(request, page)
        held = request.receipt
        self.leasing.repin(request, inserted.anchor)
        self.mirroring.inserted(inserted.nodes, fence)
        pinning.release(self.tree, held)
        self.checkpoints += 1
        return True

    def finish(self, request: Request, fence: Fence | None = None) -> int:
        """End a request, leaving what it computed to the tree; returns the tokens cached (I6, I7).

        A state component donates its live state if it stands on a page boundary.
        """
        self._expect(request, Stage.ADMITTED)
        page = request.computed // self.tree.page_size
        for track in self._state_tracks:
            page = min(page, self._offer_states(request, track.index))
        anchor = request.receipt.anchor
        if page > anchor.end:
            inserted = self._insert(request, page)
            if self.mirroring.enabled:
                held = request.receipt
                self.leasing.repin(request, inserted.anchor)
                self.mirroring.inserted(inserted.nodes, fence)
                pinning.release(self.tree, held)
        self._give_up(request)
        self._forget(request)
        return max(page, anchor.end) * self.tree.page_size

    def retract(self, request: Request, fence: Fence | None = None) -> int:
        """Take a running request's memory back, keeping what is computed as cache.

        Begin it again later with its key; returns the tokens cached.
        """
        return self.finish(request, fence)

    def abort(self, request: Request) -> None:
        """Drop a request in any stage; nothing it computed since its last checkpoint is kept.

        Transfers in flight end by themselves (L8).
        """
        if request.stage is Stage.CLOSED:
            raise LeaseError("request is closed; it was finished or aborted before")
        self._give_up(request)
        self._forget(request)

    # -- what the engine reads

    def table(self, request: Request, component: str) -> npt.NDArray[np.int32]:
        """The request's DEVICE slots of a paged component, int32 `[n_pages * slots_per_page]`.

        -1 where it holds none, such as behind a window.
        """
        track = self.tree.by_name[component]
        parts: list[bytes] = []
        node = request.receipt.anchor
        while node.parent is not None:
            slots = node.cells[track.index].device
            parts.append(slots if slots is not None else b"\xff" * (track.n_slots(node) * 4))
            node = node.parent
        parts.reverse()
        page = request.receipt.anchor.end
        for run in request.runs[track.index] if request.runs else ():
            if run.first > page:
                parts.append(b"\xff" * ((run.first - page) * track.slots_per_page * 4))
            parts.append(run.device)
            page = run.end
        return np.frombuffer(b"".join(parts), dtype=np.int32)

    def host_table(self, request: Request, component: str) -> npt.NDArray[np.int32]:
        """The request's HOST slots of a component at home there, int32 `[n_pages]`."""
        track = self.tree.by_name[component]
        parts: list[bytes] = []
        node = request.receipt.anchor
        while node.parent is not None:
            slots = node.cells[track.index].host
            parts.append(slots if slots is not None else b"\xff" * (track.n_slots(node) * 4))
            node = node.parent
        parts.reverse()
        parts += [run.host for run in request.runs[track.index] if run.host is not None]
        return np.frombuffer(b"".join(parts), dtype=np.int32)

    def state_slot(self, request: Request, component: str) -> int:
        """The slot of a state component that the model writes for this request."""
        states = request.states[self.tree.by_name[component].index]
        if states is None or states.live is None:
            raise LeaseError(f"component {component!r}: no state yet; allocate first")
        return int.from_bytes(states.live, "little")

    def explain(self, key: TokenKey) -> Explanation:
        """Per component, why the anchor of `key` is not deeper (M9)."""
        return explain(self.tree, key, max(0, key.n_tokens - 1) // self.tree.page_size)

    # -- transfers, checks, the end

    def poll(self) -> int:
        """Take in transfers that ended; call once per scheduler step. Never waits."""
        return self.journal.poll()

    def drain(self) -> bool:
        """Wait for transfers in flight, each at most the configured time; whether all ended."""
        return self.journal.drain(self.config.transfer_timeout_s)

    def evict(self, component: str, n_slots: int, tier: Tier = Tier.DEVICE) -> int:
        """Free at least `n_slots` more slots of one pool; returns how many it freed (E6)."""
        track = self.tree.by_name[component]
        ledger = track.device if tier is Tier.DEVICE else track.host
        if ledger is None:
            return 0
        before = ledger.free
        room = self.room.on_device if tier is Tier.DEVICE else self.room.on_host
        room(track, before + n_slots)
        return ledger.free - before

    def check_integrity(self) -> None:
        """Recompute every book from the tree, the pools and the requests; O(cache).

        Raises:
            IntegrityError: naming the rule that is broken, with the numbers.
        """
        check_integrity(self.tree, self._owners())
        self.budget.check(self.requests.values())

    def close(self) -> None:
        """Finish transfers in flight and stop the engine."""
        self.drain()
        self.journal.engine.close()

    # -- inside

    def _expect(self, request: Request, stage: Stage) -> None:
        if request.stage is not stage:
            raise LeaseError(
                f"request is {request.stage.value}, this call needs it {stage.value}; "
                "see the order of calls in kvgraft.cache"
            )

    def _allocate_pages(self, request: Request, pages: int) -> bool:
        accounts = request.accounts
        first, end = request.allocated, request.allocated + pages
        for track in self._paged_tracks:
            short = accounts[track.index].short(pages * track.slots_per_page)
            if short > track.device.headroom and short:
                return False
            host_account = request.host_accounts[track.index]
            if host_account is not None:
                short = host_account.short(pages * track.slots_per_page)
                if short > host_account.ledger.headroom and short:
                    return False
        for track in self._paged_tracks:
            n = pages * track.slots_per_page
            account = accounts[track.index]
            if n > account.promised:
                account.extend(n - account.promised)
            if n > track.device.free:
                self.room.on_device(track, n)
            slots = account.take(n)
            host_account = request.host_accounts[track.index]
            mirror = None
            if host_account is not None:
                if n > host_account.promised:
                    host_account.extend(n - host_account.promised)
                self.room.on_host(track, n)
                mirror = host_account.take(n)
            _append(request.runs[track.index], first, end, slots, mirror)
        request.allocated = end
        return True

    def _take_state(self, request: Request, index: int) -> bytes | None:
        """One promised state slot, or one from the headroom; None if there is neither."""
        account = request.accounts[index]
        if account.promised < 1:
            if account.ledger.headroom < 1:
                return None
            account.extend(1)
        self.room.on_device(self.tree.tracks[index], 1)
        return account.take(1)

    def _set_up_state(self, request: Request, index: int) -> None:
        states = request.states[index]
        assert states is not None
        states.live = self._take_state(request, index)
        assert states.live is not None
        anchor = request.receipt.anchor
        if anchor.parent is not None:
            source = anchor.cells[index].device
            assert source is not None
            self.mounted[index].component.device.copy_slots(source, states.live)
            self.copies_on_write += 1

    def _capture_states(self, request: Request, page: int) -> None:
        due = page in request.checkpoints
        if due:
            request.checkpoints.remove(page)
        decoding = request.computed >= request.prompt
        for track in self._state_tracks:
            states = request.states[track.index]
            assert states is not None
            assert states.live is not None
            if due:
                slot = self._take_state(request, track.index)
                if slot is not None:
                    self.mounted[track.index].component.device.copy_slots(states.live, slot)
                    states.captured[page] = slot
            elif decoding and request.total > request.prompt:
                if states.tracked is None:
                    states.tracked = self._take_state(request, track.index)
                if states.tracked is not None:
                    self.mounted[track.index].component.device.copy_slots(
                        states.live, states.tracked
                    )
                    states.tracked_page = page

    def _offer_states(self, request: Request, index: int) -> int:
        """Put what a finishing request can donate among its captured states; deepest boundary."""
        states = request.states[index]
        assert states is not None
        if states.tracked is not None and states.tracked_page >= 0:
            duplicate = states.captured.pop(states.tracked_page, None)
            if duplicate is not None:
                self.tree.tracks[index].device.give_private(duplicate)
                request.accounts[index].held -= 1
            states.captured[states.tracked_page] = states.tracked
            states.tracked, states.tracked_page = None, -1
        page, rest = divmod(request.computed, self.tree.page_size)
        if not rest and states.live is not None and page not in states.captured and page:
            states.captured[page] = states.live
            states.live = None
        return max(states.captured, default=0)

    def _give_back_behind(self, request: Request, index: int, page: int) -> None:
        """Free private pages that a bounded reach at `page` no longer covers (L6, I3)."""
        runs = request.runs[index]
        if not runs:
            return
        track = self.tree.tracks[index]
        spans = track.reach_pages.spans(page)
        if len(runs) == 1 and len(spans) == 1 and runs[0].first >= spans[0].start:
            return
        kept: list[inserting.Run] = []
        freed = b""
        for run in runs:
            position = run.first
            for span in (*spans, Span(page, run.end)):
                start, end = max(position, span.start), min(run.end, span.end)
                if start >= end:
                    continue
                if start > position:
                    freed += run.cut(position, start).device
                kept.append(run.cut(start, end))
                position = end
            if position < run.end:
                freed += run.cut(position, run.end).device
        if freed:
            request.runs[index] = _joined(kept)
            track.device.give_private(freed)
            request.accounts[index].part(len(freed) // SLOT_BYTES)

    def _insert(self, request: Request, page: int) -> inserting.Inserted:
        """Offer private data up to `page` to the tree; what lies beyond stays private."""
        holdings: list[inserting.Holding] = []
        for track in self.tree.tracks:
            runs = request.runs[track.index]
            states = request.states[track.index]
            if states is not None:
                offered = {p: s for p, s in states.captured.items() if p <= page}
                for boundary in offered:
                    del states.captured[boundary]
                request.accounts[track.index].part(len(offered))
                holdings.append(inserting.Holding([], offered))
                continue
            below = [run.cut(run.first, min(run.end, page)) for run in runs if run.first < page]
            request.runs[track.index] = [
                run.cut(max(run.first, page), run.end) for run in runs if run.end > page
            ]
            n_slots = sum(len(run.device) for run in below) // SLOT_BYTES
            request.accounts[track.index].part(n_slots)
            host_account = request.host_accounts[track.index]
            if host_account is not None:
                host_account.part(n_slots)
            holdings.append(inserting.Holding(below, {}))
        result = inserting.insert(self.tree, request.receipt.anchor, request.key, page, holdings)
        for track, holding in zip(self.tree.tracks, holdings):
            for slots in holding.states.values():
                track.device.give_private(slots)
        return result

    def _give_up(self, request: Request) -> None:
        """Return everything a request holds: private slots, promises, pins (H8)."""
        for track in self.tree.tracks:
            if not request.runs:
                break
            for run in request.runs[track.index]:
                track.device.give_private(run.device)
                if run.host is not None and track.host is not None:
                    track.host.give_private(run.host)
            states = request.states[track.index]
            if states is not None:
                for slots in (states.live, states.tracked, *states.captured.values()):
                    if slots is not None:
                        track.device.give_private(slots)
        self.budget.close(request)
        request.runs, request.states = [], []
        request.allocated = request.computed = 0
        request.waits = []
        self.leasing.release(request)

    def _forget(self, request: Request) -> None:
        request.stage = Stage.CLOSED
        del self.requests[id(request)]

    def _owners(self) -> list[SlotOwner]:
        owners: list[SlotOwner] = []
        for request in self.requests.values():
            who = f"the request of {request.prompt} tokens"
            for track in self.tree.tracks:
                if not request.runs:
                    continue
                for run in request.runs[track.index]:
                    owners.append((track.name, Tier.DEVICE, who, run.device))
                    if run.host is not None:
                        owners.append((track.name, Tier.HOST, who, run.host))
                states = request.states[track.index]
                if states is not None:
                    for slots in (states.live, states.tracked, *states.captured.values()):
                        if slots is not None:
                            owners.append((track.name, Tier.DEVICE, who, slots))
        return owners


def _append(
    runs: list[inserting.Run], first: int, end: int, device: bytes, host: bytes | None
) -> None:
    """Add slots for pages `[first, end)` behind the runs held already."""
    if runs and runs[-1].end == first:
        last = runs[-1]
        joined = None if host is None or last.host is None else last.host + host
        runs[-1] = inserting.Run(last.first, end, last.device + device, joined)
    else:
        runs.append(inserting.Run(first, end, device, host))


def _joined(runs: list[inserting.Run]) -> list[inserting.Run]:
    """Adjacent runs as one."""
    joined: list[inserting.Run] = []
    for run in runs:
        _append(joined, run.first, run.end, run.device, run.host)
    return joined


def _ledgers(mounted: Sequence[Mounted]) -> tuple[dict[str, Ledger], dict[str, Ledger]]:
    device = {
        each.name: Ledger(each.name, Tier.DEVICE, each.component.device.allocator)
        for each in mounted
    }
    host = {
        each.name: Ledger(each.name, Tier.HOST, each.component.host.allocator)
        for each in mounted
        if each.component.host is not None
    }
    return device, host


def _default_engine(config: CacheConfig) -> TransferEngine:
    if torch.device(config.device).type == "cuda":
        from kvgraft.transfers.cuda import CudaTransferEngine  # noqa: PLC0415 - needs CUDA

        return CudaTransferEngine(config.device)
    return CpuTransferEngine()


def parse_config(settings: dict[str, Any]) -> CacheConfig:
    """Settings as a `CacheConfig`.

    Raises:
        ConfigError: the first field that is unknown or impossible, named.
    """
    from pydantic import ValidationError  # noqa: PLC0415 - only where settings are parsed

    try:
        return CacheConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        known = ", ".join(CacheConfig.model_fields)
        raise ConfigError(
            f"setting {field}={first.get('input')!r}: {first['msg']}; settings: {known}"
        ) from error
