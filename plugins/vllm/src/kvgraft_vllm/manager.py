"""Replaces vLLM's `KVCacheManager` by a kvgraft cache.

vLLM owns the tensors. A cache without payload assigns blocks, admits requests and evicts. Block
tables only grow while a request runs, so data is published and the request keeps its slots (N1).
Data is published once the model has computed it. A prompt's chunk is published earlier, to requests
that are scheduled later in the same step, because a forward pass writes all data before it reads
any. A cache with windows does not do that, because this pass still reads data that leaves a window.

A request runs on one state from its admission on. States kept at boundaries, and the state that a
request resumes from, are copied by the worker before the pass.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
from vllm.v1.core import kv_cache_manager
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy
from vllm.v1.core.sched import scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvgraft import Cache, ConfigError, TokenKey
from kvgraft_identity.spans import (
    FEWEST_TOKENS,
    MOST_CHARACTERS,
    MOST_PLACEHOLDERS,
    Identities,
)
from kvgraft_retention.kv_hints import arguments_of
from kvgraft_vllm.block_copies import BlockCopies
from kvgraft_vllm.block_layout import NULL_BLOCK, STATE, BlockLayout, BlockRange, LooksBack, lay_out
from kvgraft_vllm.interface import MANAGER_INTERFACE
from kvgraft_vllm.manager_settings import ManagerSettings
from kvgraft_vllm.metrics_server import serve_metrics

__all__ = ["BlockIds", "KvgraftCacheManager", "needs_hashes", "put_in", "refusals"]

logger = logging.getLogger("kvgraft.vllm")

Vllm = Any
"""An object of vLLM, which mypy does not see."""


class BlockIds(KVCacheBlocks):
    """Blocks as ids, per KV cache group."""

    def __init__(self, ids: tuple[list[int], ...]) -> None:
        self.ids = ids

    @property
    def blocks(self) -> tuple[list[Vllm], ...]:
        """The blocks as vLLM's objects, made at each call."""
        return tuple([KVCacheBlock(block_id=each) for each in group] for group in self.ids)

    def get_block_ids(
        self,
        allow_none: bool = False,  # noqa: FBT001, FBT002 - vLLM's own
        *,
        group_ids: Sequence[int] | None = None,
    ) -> tuple[list[int], ...] | None:
        """The ids of all groups or of some; None if there are none and `allow_none` is set."""
        ids = self.ids if group_ids is None else tuple(self.ids[each] for each in group_ids)
        return None if allow_none and not any(ids) else ids


class _Sequence:
    """A request of vLLM: its key, and the cache's request while it is admitted.

    Attributes:
        key: its tokens that the model has computed or computes in this step.
        is_shared: whether other requests may resume from its data.
        request: None while it waits.
        runs: whether slots are allocated to it.
        deferred_at: `KvgraftCacheManager.changes` when it was last deferred; -1 if never.
        waited: whether it has waited a step for data that another request was computing.
    """

    __slots__ = ("deferred_at", "is_shared", "key", "request", "runs", "waited")

    def __init__(self, key: TokenKey, *, is_shared: bool) -> None:
        self.key = key
        self.is_shared = is_shared
        self.request: Any = None
        self.runs = False
        self.deferred_at = -1
        self.waited = False


class KvgraftCacheManager(KVCacheManager):
    """vLLM's interface over a kvgraft cache.

    A request is admitted when vLLM asks for its hit, before it sizes the chunk. Its prompt and part
    of its decode are then promised slots (A7), and `allocate_slots` within them succeeds. For a
    deferred request `allocate_slots` returns None, as if vLLM's pool were full.

    Args:
        settings: kvgraft's settings.
        config: vLLM's `VllmConfig`.
        given: arguments of vLLM's own manager.

    Attributes:
        cache: the cache, for its statistics.
        layout: the block ids of each component.
        changes: a count of events after which a deferred request may fit.
        tells_events: whether it makes KV events.

    Raises:
        ConfigError: the pools cannot hold one request of the model's longest context.
    """

    def __init__(self, settings: ManagerSettings, config: Vllm, **given: Vllm) -> None:
        caches = given["kv_cache_config"]
        groups = [group.kv_cache_spec for group in caches.kv_cache_groups]
        chunk = min(config.max_in_flight_tokens, given["max_model_len"])
        self.layout = lay_out(
            [_looks_back(spec) for spec in groups],
            caches.num_blocks,
            groups[0].block_size,
            chunk=chunk,
            point_tokens=settings.point_tokens,
        )
        self.cache = _open(self.layout, settings)
        _expect_room(self.cache, given["max_model_len"], chunk)
        super().__init__(**given)
        self.settings, self.chunk = settings, chunk
        self._n_drafts = config.num_speculative_tokens
        self.changes = 0
        self._is_bounded = any(each.looks_back is not None for each in self.layout.ranges)
        pools = {each.name: each.component.device for each in self.cache.mounted}
        self._copies = [BlockCopies(each, pools[each.component]) for each in self.layout.ranges]
        self._has_states = any(each.is_state for each in self.layout.ranges)
        if self.cache.arenas is not None:
            self.cache.arenas.mover.keeps_tables = True
        self._n_moves = 0
        self._new_ids: list[int] | None = [] if caches.needs_kv_cache_zeroing else None
        """New blocks of pages, for vLLM to clear."""
        self._sequences: dict[str, _Sequence] = {}
        self._admitted: list[_Sequence] = []
        self._scheduled: list[tuple[_Sequence, Any, int, Vllm]] = []
        """Prompts that the step computes a chunk of, their requests here, where it ends, and
        vLLM's request."""
        self._events = None
        self.tells_events = bool(given.get("enable_kv_cache_events"))
        if self.tells_events:
            self._events = _kv_events(self.cache, self.layout)
        self._private = count()

    # -- a request waits and is admitted

    def new_step_starts(self) -> None:
        """Defer requests again that were admitted in the last step and not scheduled."""
        super().new_step_starts()
        self._scheduled.clear()
        self._wait_again()

    def get_computed_blocks(
        self, request: Vllm, max_cache_hit_length: int | None = None
    ) -> tuple[Vllm, int, int]:
        """Admit a request; returns how many tokens it resumes from, without their blocks yet."""
        del max_cache_hit_length
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            sequence = self._sequences[request.request_id] = self._new_sequence(request)
        self._publish_scheduled()
        if sequence.request is None and sequence.deferred_at != self.changes:
            self._admit(sequence, request)
        found = sequence.request
        if found is None:
            return self.empty_kv_cache_blocks, 0, 0
        return self.empty_kv_cache_blocks, found.anchor_tokens, self._branch(found)

    def _branch(self, found: Any) -> int:
        """Where another prompt departs and no state is kept, for vLLM to end a chunk; else 0."""
        if not self._has_states:
            return 0
        branches = [page for page, kind in found.points.items() if kind == BRANCH]
        return max(branches, default=0) * self.layout.block_size

    def _new_sequence(self, request: Vllm) -> _Sequence:
        """The record of a request; data that nothing identifies (embeddings) is not shared."""
        namespace: tuple[Any, ...] | None = None
        if request.cache_salt or request.lora_request:
            adapter = request.lora_request.lora_name if request.lora_request else None
            namespace = (request.cache_salt, adapter)
        is_shared = self.prefix_cache_lookup_enabled(request) and request.prompt_embeds is None
        if not is_shared:
            namespace = ("private", next(self._private))
        return _Sequence(TokenKey((), namespace), is_shared=is_shared)

    def _extend(self, sequence: _Sequence, request: Vllm, end: int) -> None:
        """Append a request's tokens before `end` to its key, and say which of them are images.

        An image without a usable identity gets a number that no other request has at its start, so
        nothing behind it is shared. That is an image of few tokens or of many different ones, one
        that another overlaps, and one that ends behind `end` (a session of streamed input).
        """
        key = sequence.key
        start = behind = key.n_tokens
        tokens = request.all_token_ids[start:end]
        spans: list[tuple[int, int, str]] = []
        for each in request.mm_features if sequence.is_shared else ():
            first = each.mm_position.offset
            last = first + each.mm_position.length
            if not start <= first < end:
                continue
            own = tokens[first - start : last - start]
            if first < behind:  # the one before it holds more than its own
                first, last = spans.pop()[0] + start, end + 1
            is_told = last <= end and len(own) >= FEWEST_TOKENS
            is_told = is_told and 0 < len(each.identifier) <= MOST_CHARACTERS
            if is_told and len(set(own)) <= MOST_PLACEHOLDERS:
                spans.append((first - start, last - start, each.identifier))
                behind = last
            else:
                spans.append((first - start, first - start + 1, f"private {next(self._private)}"))
                behind = first + 1
        key.identities = Identities.appended(key, tokens, spans, fewest=1)

    def _admit(self, sequence: _Sequence, request: Vllm) -> None:
        key, n_tokens = sequence.key, request.num_tokens
        self._extend(sequence, request, n_tokens)
        most = request.num_prompt_tokens + request.max_tokens - n_tokens
        reserve = min(self.settings.reserve, most) + self._n_drafts
        reserve = min(reserve, self.max_model_len - n_tokens)
        found = self.cache.begin(
            key,
            reserve=max(0, reserve),
            chunk=min(self.chunk, n_tokens),
            max_deferrals=int(self._is_bounded and sequence.is_shared and not sequence.waited),
            **_hinted(request),
        )
        decision = self.cache.admit(found)
        sequence.waited = sequence.waited or decision.pending is not None
        if decision.admitted:
            sequence.request = found
            self._admitted.append(sequence)
        else:
            self.cache.abort(found)
            sequence.deferred_at = self.changes

    def _wait_again(self) -> None:
        for sequence in self._admitted:
            if sequence.request is not None and not sequence.runs:
                self.cache.abort(sequence.request)
                sequence.request = None
                self.changes += 1
        self._admitted.clear()

    # -- a request runs

    def allocate_slots(  # noqa: PLR0913, PLR0917 - vLLM's own
        self,
        request: Vllm,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Vllm | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,  # noqa: FBT001, FBT002
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,  # noqa: FBT001, FBT002
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,  # noqa: FBT001, FBT002
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> Vllm | None:
        """Slots for the next tokens; None if there are none, so that vLLM preempts or waits."""
        sequence = self._sequences[request.request_id]
        found = sequence.request
        if found is None:
            return None
        end = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        end = min(end + num_lookahead_tokens, self.max_model_len)
        if sequence.runs:
            if end <= found.allocated * self.layout.block_size and found.computed >= found.prompt:
                return self.empty_kv_cache_blocks
            self._publish(sequence, request)
        before = found.allocated
        has_room = self.cache.allocate(found, end - found.computed)
        if has_room and sequence.runs and self._has_states:
            self.cache.allocate(found, end - found.computed)  # shares the state that was kept
        self._tell(request)
        if not has_room:
            return None
        if self._new_ids is not None:
            self._new_ids += self._pages(found, before)
        if sequence.is_shared and not self._is_bounded and found.computed < found.prompt:
            self._scheduled.append((sequence, found, min(end, found.prompt), request))
        if not sequence.runs:
            sequence.runs = True
            return self.empty_kv_cache_blocks  # vLLM asks for the whole table of a new request
        if found.allocated == before:
            return self.empty_kv_cache_blocks
        return self._blocks(found, before)

    def _publish(self, sequence: _Sequence, request: Vllm) -> None:
        """Note computed tokens; other requests can resume from a part of a prompt at once."""
        found = sequence.request
        is_prompt = found.computed < found.prompt
        self._settle(sequence, request)
        # States are published with their pages, when slots are allocated.
        is_due = is_prompt and sequence.is_shared and not self._has_states
        is_new = is_due and self.cache.checkpoint(found, keep_slots=True)
        if is_new or self._is_bounded:
            self.changes += 1

    def _publish_scheduled(self) -> None:
        """Publish the chunks of this step, once no running request can be preempted in it."""
        for sequence, found, end, request in self._scheduled:
            if sequence.request is found and end > found.computed:
                self.cache.computed(found, end - found.computed)
                if self.cache.checkpoint(found, keep_slots=True):
                    self.changes += 1
                self._tell(request)
        self._scheduled.clear()

    def _tell(self, request: Vllm) -> None:
        """Report to vLLM the data that a call for this request added or removed."""
        if self._events is not None:
            self.block_pool.kv_event_queue += self._events.take(request)

    def _settle(self, sequence: _Sequence, request: Vllm) -> None:
        """Note the tokens that the model has computed.

        A state changes with every step. So with states, tokens of steps under way count as
        computed: everything that reads their data, copies included, runs in a later step.
        """
        found, key = sequence.request, sequence.key
        end = request.num_computed_tokens
        if not self._has_states:
            # Drafts behind a request's last token were computed as well.
            end = min(end - request.num_in_flight_tokens, request.num_tokens)
        if key.n_tokens < end:
            self._extend(sequence, request, end)
        if end > found.computed:
            self.cache.computed(found, end - found.computed)

    def free(self, request: Vllm) -> None:
        """A request has finished or is preempted: its computed data goes to the tree."""
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is None:
            return
        found = sequence.request
        if found is not None:
            leaves_data = sequence.runs and sequence.is_shared
            if leaves_data:
                self._settle(sequence, request)
                leaves_data = sequence.key.n_tokens >= found.computed  # else some are still to come
            if leaves_data:
                end = self.cache.finish if request.is_finished() else self.cache.retract
                end(found)
            else:
                self.cache.abort(found)
            if self._is_bounded and not sequence.is_shared:
                self.cache.clear(sequence.key.namespace)  # its evict-first data
            self._tell(request)
            self.changes += 1
        sequence.request, sequence.runs, sequence.deferred_at = None, False, -1
        if not request.is_finished():
            self._sequences[request.request_id] = sequence

    # -- queries of vLLM

    def get_blocks(self, request_id: str) -> Vllm:
        """All blocks of a request, from its first token on."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.request is None or not sequence.runs:
            return self.empty_kv_cache_blocks
        return self._blocks(sequence.request, 0)

    def _blocks(self, found: Any, start: int) -> BlockIds:
        ids: list[list[int]] = [[] for _ in range(self.layout.n_groups)]
        for each in self.layout.ranges:
            for group, of_group in zip(each.groups, self._of_component(found, each, start)):
                ids[group] = of_group
        return BlockIds(tuple(ids))

    def _of_component(self, found: Any, each: BlockRange, start: int) -> list[list[int]]:
        """Block ids of each of its groups; of a state, the columns that a worker reads.

        These are the columns of the last computed token and of the last one to compute.
        """
        if not each.is_state:
            return each.block_ids(self.cache.table(found, each.component, start))
        slots = np.full(max(0, found.allocated - start), -1, np.int32)
        looked_at = {(found.computed - 1) // self.layout.block_size, found.allocated - 1}
        places = [page - start for page in looked_at if page >= start]
        slots[places] = self.cache.state_slot(found, each.component)
        return each.block_ids(slots)

    def _pages(self, found: Any, start: int) -> list[int]:
        """The blocks of a request's pages, of all groups, from page `start` on."""
        ids: list[int] = []
        for each in self.layout.ranges:
            if not each.is_state:
                of_groups = each.block_ids(self.cache.table(found, each.component, start))
                ids += [block for group in of_groups for block in group if block != NULL_BLOCK]
        return ids

    def take_new_block_ids(self) -> list[int]:
        """Blocks of pages since the last call, for vLLM to zero; only if it asked for that."""
        if not self._new_ids:
            return []
        taken, self._new_ids = self._new_ids, []
        return taken

    def take_kv_cache_block_copies(self) -> tuple[list[Vllm], list[Vllm]]:
        """Copies that the worker makes before the step; they keep no blocks.

        Data moves here, once the step's blocks are known: it moves out of none of them.
        """
        self.cache.poll()
        self._tell(None)
        if self.cache.arenas is not None:
            n_moves = sum(arena.moves for arena in self.cache.arenas.by_tier.values())
            self.changes += n_moves - self._n_moves
            self._n_moves = n_moves
        pairs = [pair for each in self._copies for pair in each.pairs()]
        return [KVCacheBlockCopy(*pair) for pair in pairs], []

    @property
    def usage(self) -> float:
        """The fraction of blocks that running requests hold."""
        used = total = 0
        for each, component in zip(self.layout.ranges, self._components()):
            books = component.device
            used += len(each.groups) * (books.capacity - books.free - books.evictable)
            total += len(each.groups) * books.capacity
        return used / total

    def _components(self) -> Iterable[Any]:
        tree = self.cache.tree
        return [tree.component(each.component) for each in self.layout.ranges]

    def estimate_cached_tokens(self, request: Vllm) -> int:
        """Computed tokens in whole blocks."""
        sequence = self._sequences.get(request.request_id)
        if sequence is None or not sequence.is_shared:
            return 0
        end = request.num_computed_tokens - request.num_in_flight_tokens
        return int(end // self.layout.block_size * self.layout.block_size)

    def reset_prefix_cache(self) -> bool:
        """Clear the cache: later requests hit nothing of before; running requests continue."""
        self._wait_again()
        self.cache.clear()
        self._tell(None)
        self.changes += 1
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    def cache_blocks(self, request: Vllm, num_computed_tokens: int) -> None:
        """Nothing to do: data is published at the next step, or at the end."""

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Nothing to do: the cache frees blocks behind a window as the request advances."""

    def pop_blocks_for_free(self, request: Vllm) -> list[Vllm]:
        """Refused: only connectors ask for it."""
        raise NotImplementedError(f"kvgraft-vllm: {NO_CONNECTOR}")

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Refused: only connectors ask for it."""
        raise NotImplementedError(f"kvgraft-vllm: {NO_CONNECTOR}")


MOST_EVENTS = 1 << 30
"""Most events that wait: they are taken after each call that makes some."""

NO_CONNECTOR = "blocks are not given to KV connectors"


def _hinted(request: Vllm) -> dict[str, Any]:
    """Arguments of `Cache.begin` that a request's KV hints ask for; wrong hints are ignored."""
    try:
        return arguments_of(request.kv_hints)
    except ConfigError as error:
        logger.warning("request %s: %s", request.request_id, error)
        return {}


def _looks_back(spec: Vllm) -> LooksBack:
    """Tokens before the newest that a group attends to."""
    if isinstance(spec, MambaSpec):
        return STATE
    if isinstance(spec, SlidingWindowSpec):
        return max(1, int(spec.sliding_window) - 1 + int(getattr(spec, "extra_retained_tokens", 0)))
    return None


def _open(layout: BlockLayout, settings: ManagerSettings) -> Cache:
    sizes = [each.n_slots for each in layout.ranges]
    return Cache.open(
        layout.components,
        page_size=layout.block_size,
        device_tokens=max(sizes) * layout.block_size,
        device_memory=layout.budget,
        payload=False,
        load=None,
        decode_interval_tokens=0,
        policy=settings.policy,
        guard=settings.guard,
    )


def _kv_events(cache: Cache, layout: BlockLayout) -> Any:
    """Events of a cache; without `kvgraft-observe` the cache raises."""
    stream: Any = cache.events(MOST_EVENTS)
    from kvgraft_vllm.kv_events import KvEvents

    return KvEvents(stream, layout)


def _expect_room(cache: Cache, max_model_len: int, chunk: int) -> None:
    """Refuse pools in which a request of the longest context, or its chunks, never fit."""
    longest = cache.begin(TokenKey([0] * max_model_len), chunk=chunk)
    decision = cache.admit(longest)
    fits = decision.admitted and longest.chunk == chunk
    cache.abort(longest)
    if not fits:
        raise ConfigError(
            f"a request of max_model_len={max_model_len} tokens in chunks of {chunk} never fits: "
            f"{decision}; give the KV cache more memory, or a smaller max_model_len"
        )


BRANCH = "branch"
"""The kind of a resume point where a prompt departs from another's."""

KINDS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec)
"""Kinds of KV cache groups that this package supports."""


def refusals(config: Vllm, given: dict[str, Vllm]) -> list[str]:
    """Features of an engine that are not supported here, each in a few words.

    Args:
        config: vLLM's `VllmConfig`.
        given: the arguments of its `KVCacheManager`.
    """
    caches = given["kv_cache_config"]
    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    parallel, model = config.parallel_config, config.model_config
    connector, drafts = config.kv_transfer_config, config.speculative_config
    sizes = {spec.block_size for spec in specs} | {given["hash_block_size"]}
    other_kinds = sorted({type(spec).__name__ for spec in specs if type(spec) not in KINDS})
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    modes = sorted({spec.mamba_cache_mode for spec in states} - {"align"})
    asked = {
        "prefix caching is off": not given["enable_caching"],
        f"KV cache groups of {', '.join(other_kinds)}": bool(other_kinds),
        f"KV connector {getattr(connector, 'kv_connector', None)}": connector is not None,
        "an encoder cache connector": config.ec_transfer_config is not None,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        f"speculative decoding by {getattr(drafts, 'method', None)}": drafts is not None
        and drafts.method != "ngram",
        "speculative decoding with states": drafts is not None and bool(states),
        "KV cache residency metrics": given["metrics_collector"] is not None,
        "an encoder-decoder model": model.is_encoder_decoder,
        "a diffusion model": model.is_diffusion,
        "auxiliary outputs": config.aux_output_config.enabled,
        "blocks of several sizes": len(sizes) > 1,
        "blocks in host memory": any(group.host_resident for group in caches.kv_cache_groups),
        "states without attention": len(states) == len(specs),
        f"states with mamba_cache_mode {', '.join(modes)}": bool(modes),
    }
    return [what for what, is_asked in asked.items() if is_asked]


def put_in(settings: ManagerSettings) -> None:
    """Give later schedulers a `KvgraftCacheManager` if it supports their settings.

    It applies to every scheduler class, the asynchronous one too, because it replaces the name in
    vLLM's module. If a setting is not supported, the log names it, and vLLM's own manager is used.
    Requests of an engine whose manager needs no hashes of blocks are not hashed.
    """
    if getattr(scheduler.KVCacheManager, "__wrapped__", None) is not None:
        return
    different = MANAGER_INTERFACE.differences(vars(kv_cache_manager) | {"EngineCore": EngineCore})
    if different:
        _stay(different)
        return
    own, initialize = scheduler.KVCacheManager, scheduler.Scheduler.__init__
    configs: list[Vllm] = []

    @functools.wraps(initialize)
    def initialized(self: Vllm, *args: Vllm, **named: Vllm) -> None:
        configs.append(named["vllm_config"] if "vllm_config" in named else args[0])
        try:
            initialize(self, *args, **named)
        finally:
            configs.pop()
        if isinstance(self.kv_cache_manager, KvgraftCacheManager):
            # Chunks end where states are kept: no kernel exports a state from inside a chunk.
            self.mamba_has_prefill_checkpoint_blocks = False

    @functools.wraps(own, updated=())
    def chosen(**given: Vllm) -> Vllm:
        return _choose(own, settings, configs[-1], given)

    make_request = EngineCore.preprocess_add_request

    @functools.wraps(make_request)
    def made_request(self: Vllm, request: Vllm) -> Vllm:
        if not needs_hashes(self.scheduler):
            self.request_block_hasher = None
        return make_request(self, request)

    scheduler.Scheduler.__init__ = initialized
    scheduler.KVCacheManager = chosen
    EngineCore.preprocess_add_request = made_request


def needs_hashes(of: Vllm) -> bool:
    """Whether a scheduler's requests need vLLM's hashes of their blocks.

    A `KvgraftCacheManager` finds data by tokens; it needs hashes for KV events alone.
    """
    manager = getattr(of, "kv_cache_manager", None)
    return not isinstance(manager, KvgraftCacheManager) or manager.tells_events


def _choose(
    own: Callable[..., Vllm], settings: ManagerSettings, config: Vllm, given: dict[str, Vllm]
) -> Vllm:
    refused = refusals(config, given)
    if not refused:
        try:
            made = KvgraftCacheManager(settings, config, **given)
        except ConfigError as error:
            refused = [str(error)]
        else:
            if settings.metrics_port is not None:
                rank = config.parallel_config.data_parallel_index
                serve_metrics(made.cache, settings.metrics_port + rank)
            logger.info("kvgraft decides what vLLM caches: %r", made.cache)
            return made
    _stay(refused)
    return own(**given)


def _stay(reasons: list[str]) -> None:
    said = "not done by kvgraft-vllm yet, so vLLM's own cache manager stays: %s"
    logger.warning(said, "; ".join(reasons))
