"""A kvgraft cache as SGLang's prefix cache.

SGLang owns the tensors, the rows of requests and the decision who runs. The tree decides what is
kept and from where a request resumes. A request takes pages from the swapped allocator
(`kvgraft_sglang.allocator`); `checkpoint` hands them to the tree (rule N2), and the row names the
tree's pages where another request computed the same tokens before.

    0 ──────── cache_protected_len ──────── kv_allocated_len
    the tree's, pinned for the request     SGLang's, taken from `Cache.engine_slots`
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import (
    get_disagg,
    get_memory,
    get_parallel,
    get_schedule,
    get_spec,
)

from kvgraft import Cache, ConfigError, Request, TokenKey
from kvgraft.policies import Hint
from kvgraft_sglang.allocator import AT_ONCE, PADDING, PagesOfCache, TokensOfCache, slots_of
from kvgraft_sglang.tree_settings import BACKEND, TreeSettings

__all__ = ["KvgraftTree", "Lease", "refusals"]

logger = logging.getLogger("kvgraft.sglang")

Sglang = Any
"""An object of SGLang, which mypy does not see."""

FULL, WINDOW = "full", "swa"

AHEAD_SHARE = 64
"""At most this fraction (1 / n) of a pool is evicted ahead, so that not every step has to."""

TOKEN_BYTES = 4
"""Bytes of a token in a key."""


class Lease:
    """A match, which SGLang holds as the node where it ended.

    Attributes:
        key: the tokens.
        request: the cache's request; None for a match of nothing, and once it has ended.
        locks: how often SGLang has locked it.
        finished: whether its sequence goes on; None before any of its data was published.
        found: the tokens that SGLang asked for, how many of them, and `KvgraftTree.version` then.
    """

    __slots__ = ("finished", "found", "key", "locks", "request")

    def __init__(
        self, key: TokenKey | None, request: Request | None, found: tuple[Any, ...] = ()
    ) -> None:
        self.key = key
        self.request = request
        self.found = found
        self.locks = 0
        self.finished: Hint | None = None

    @property
    def children(self) -> dict[Any, Any]:
        """None: SGLang's tree walks end here."""
        return {}


class KvgraftTree(BasePrefixCache):
    """SGLang's interface over a kvgraft cache.

    Args:
        context: SGLang's `TreeCacheBuildContext`.
        settings: kvgraft's settings.

    Attributes:
        cache: the cache, for its statistics; another one after each `reset`.
        version: a count of publications, after which a match may be longer.

    Raises:
        ConfigError: features of the server that this tree does not support, each by name.
    """

    def __init__(self, context: Sglang, settings: TreeSettings) -> None:
        refused = refusals(context)
        if refused:
            raise ConfigError(
                f"--radix-cache-backend {BACKEND} does not support {'; '.join(refused)}; leave "
                "that out, or the option"
            )
        params = context.params
        self.settings = settings
        self.disable = False
        self.page_size: int = params.page_size
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = allocator = params.token_to_kv_pool_allocator
        self.sliding_window_size = params.sliding_window_size if context.is_hybrid_swa else None
        self.draft_swa_window = params.draft_swa_window
        if context.is_hybrid_swa:
            self._pools = {
                FULL: allocator.full_attn_allocator,
                WINDOW: allocator.swa_attn_allocator,
            }
        else:
            self._pools = {FULL: allocator}
        self.device = torch.device(allocator.device)
        self._offsets = torch.arange(self.page_size, device=self.device)
        self._root = Lease(None, None)
        self.version = 0
        self._fresh: Lease | None = None
        """The latest match while nothing has locked it: what it found stays until the next call."""
        if params.enable_metrics:
            self.init_metrics_collector()
        self.reset()

    def reset(self) -> None:
        """Forget everything, while nothing runs: another cache is opened."""
        self._fresh = None
        self.version += 1
        sizes = {name: pool.size // self.page_size for name, pool in self._pools.items()}
        components: dict[str, dict[str, Any]] = {FULL: {}}
        if WINDOW in sizes:
            components[WINDOW] = {
                "window": self.swa_retain_window,
                "device_tokens": sizes[WINDOW] * self.page_size,
            }
        self.cache = cache = Cache.open(
            components,
            page_size=self.page_size,
            device_tokens=sizes[FULL] * self.page_size,
            payload=False,
            load=None,
            decode_interval_tokens=0,
            policy=self.settings.policy,
            guard=self.settings.guard,
        )
        self._ledgers = {name: cache.tree.component(name).device for name in components}
        self._ahead = min(AT_ONCE, min(sizes.values()) // AHEAD_SHARE)
        for name, pool in self._pools.items():
            pool.bind(cache, name)

    # -- matches and locks

    @property
    def root_node(self) -> Lease:
        """A match of nothing."""
        return self._root

    def match_prefix(self, params: Sglang) -> MatchResult:
        """The longest prefix that a request can resume from; it stays until the next call."""
        key = params.key
        tokens, n_tokens = key.token_ids, len(key)
        namespace = None
        if key.extra_key is not None or key.cache_salt is not None:
            namespace = (key.extra_key, key.cache_salt)
        found = (tokens, n_tokens, len(tokens), namespace, self.version)
        if self._fresh is not None and _is_same(self._fresh.found, found):
            return _result(self._fresh)  # a request that waits is matched in every step
        self._drop_fresh()
        if not n_tokens:
            return _result(Lease(None, None))
        # A kvgraft request computes at least one token: the one behind the limit, or any.
        ids = np.frombuffer(tokens, np.int64)[: n_tokens + 1].astype(np.int32)
        own = TokenKey(ids, namespace)
        if len(ids) == n_tokens:
            own.extend([0])
        self._fresh = Lease(own, self.cache.begin(own), found)
        return _result(self._fresh)

    def touch_prefix(self, key: Sglang) -> None:
        """A waiting request's prefix counts as used."""
        self.match_prefix(_Match(key))

    def lock(self, node: Lease) -> TreeLock:
        """Keep a match until it is unlocked."""
        if node is self._fresh:
            self._fresh = None
        elif node.key is not None and node.request is None and not node.locks:
            raise RuntimeError("kvgraft: a match was locked after a later one; match again")
        node.locks += 1
        return TreeLock(node, None)

    def unlock(self, lock: TreeLock | None) -> None:
        """A locked match may go; with its last lock the request's data becomes evictable."""
        if lock is None:
            return
        node = lock.node
        node.locks -= 1
        if node.locks or node.request is None:
            return
        if node.finished is None and node.request.stage.value == "leased":
            self._drop_fresh()
            self._fresh = node  # SGLang locks it for a moment before it decides
            return
        request, node.request = node.request, None
        if node.finished is None:
            self.cache.abort(request)
        else:
            self.cache.finish(request, hint=node.finished)

    def inc_lock_ref(self, node: Lease) -> IncLockRefResult:
        """`lock` by its older name."""
        self.lock(node)
        return IncLockRefResult(delta=0)

    def dec_lock_ref(self, node: Lease, params: Sglang = None) -> DecLockRefResult:
        """`unlock` by its older name."""
        del params
        self.unlock(TreeLock(node, None))
        return DecLockRefResult(delta=0)

    def _drop_fresh(self) -> None:
        """Nobody locked the latest match: it no longer holds data."""
        lease, self._fresh = self._fresh, None
        if lease is not None and lease.request is not None:
            self.cache.abort(lease.request)
            lease.request = None

    def path_device_indices(self, node: Lease) -> torch.Tensor:
        """The token slots of a match; the windows that a request reads there are mapped."""
        request = node.request
        if request is None:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        pages = self.cache.table(request, FULL)[: request.anchor_tokens // self.page_size]
        self._map_windows(request, 0, pages)
        return self._tokens(pages)

    def _map_windows(self, request: Request, first: int, pages: Any) -> None:
        """Map `pages`, from `first` on, to their windows: the tree may have got those later."""
        if WINDOW not in self._pools:
            return
        windows = self.cache.table(request, WINDOW, first)[: len(pages)]
        there = np.flatnonzero(windows >= 0)
        self.token_to_kv_pool_allocator.set_full_to_swa_mapping(
            self._tokens(pages[there]), self._tokens(windows[there])
        )

    def _tokens(self, slots: Any) -> torch.Tensor:
        """SGLang's token slots of the cache's slots."""
        pages = torch.from_numpy(slots.astype(np.int64)).to(self.device) + PADDING
        tokens: torch.Tensor = (pages[:, None] * self.page_size + self._offsets).reshape(-1)
        return tokens

    # -- a request's data

    def checkpoint(self, req: Sglang, *, up_to: int, **kwargs: Any) -> None:
        """The tree takes the pages computed so far; the row names the tree's."""
        del kwargs
        lease = req.last_node
        if lease is None or lease.request is None:
            return
        request, kv, size = lease.request, req.kv, self.page_size
        ids = req.full_untruncated_fill_ids
        tokens = np.frombuffer(ids, np.int64)[:up_to]
        # SGLang appends to an array, or replaces it: also by that of a request that it aborts.
        if not _follows(lease.key, tokens, request.computed, is_known=ids is lease.found[0]):
            return
        end = len(tokens) // size
        if request.stage.value == "leased":
            self.cache.engine_slots.admit(request)
        first = request.allocated
        if end > first:
            row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
            own = row[first * size : end * size : size]
            slots = {FULL: slots_of(own // size)}
            if WINDOW in self._pools:
                alive = max(kv.get_evicted_seqlen(ComponentType.SWA) // size - first, 0)
                swa = self.token_to_kv_pool_allocator.full_to_swa_index_mapping[own[alive:].long()]
                slots[WINDOW] = slots_of(swa // size)
            self.cache.engine_slots.adopt(request, end - first, slots)
            self.cache.computed(request, end * size - request.computed)
            self.cache.checkpoint(request)
            self.version += 1
            self._repoint(row, request, first, end, slots[FULL])
        kv.cache_protected_len = max(kv.cache_protected_len, end * size)
        if req.finished():
            lease.finished = Hint.TURN_ENDED
        else:
            lease.finished = Hint.CONTINUES

    def _repoint(self, row: torch.Tensor, request: Request, first: int, end: int, own: Any) -> None:
        """The row names the tree's pages, and their windows are mapped."""
        size = self.page_size
        table = self.cache.table(request, FULL, first)[: end - first]
        changed = np.flatnonzero(table != own)
        if len(changed):
            low, high = int(changed[0]), int(changed[-1]) + 1
            there = slice((first + low) * size, (first + high) * size)
            row[there] = self._tokens(table[low:high]).to(row.dtype)
            self._map_windows(request, first, table)

    # -- room

    def evict(self, params: Sglang) -> EvictResult:
        """Free so many tokens of each pool, if that many are not locked."""
        started = time.perf_counter()
        self._drop_fresh()
        asked = {FULL: params.num_tokens, WINDOW: params.swa_num_tokens}
        freed = dict.fromkeys(asked, 0)
        for name in self._pools:
            if asked[name] > 0:
                n_pages = -(-int(asked[name]) // self.page_size) + self._ahead
                freed[name] = self.cache.evict(name, n_pages) * self.page_size
        self.update_eviction_metrics(freed[FULL], started)
        return EvictResult(num_tokens_evicted=freed[FULL], swa_num_tokens_evicted=freed[WINDOW])

    def evictable_size(self) -> int:
        """Tokens of full attention that nobody has locked."""
        return int(self._ledgers[FULL].evictable) * self.page_size

    full_evictable_size = evictable_size

    def swa_evictable_size(self) -> int:
        """The same of sliding windows."""
        return int(self._ledgers[WINDOW].evictable) * self.page_size

    def protected_size(self) -> int:
        """Tokens of full attention that are locked."""
        return int(self._ledgers[FULL].pinned) * self.page_size

    full_protected_size = protected_size

    def swa_protected_size(self) -> int:
        """The same of sliding windows."""
        return int(self._ledgers[WINDOW].pinned) * self.page_size

    def total_size(self) -> int:
        """Tokens in the tree."""
        return self.evictable_size() + self.protected_size()

    def supports_swa(self) -> bool:
        """Whether it has sliding windows."""
        return WINDOW in self._pools

    def available_and_evictable_str(self) -> str:
        """The pools' books, for SGLang's messages."""
        return "".join(f"{name}: {each.equation()}\n" for name, each in self._ledgers.items())

    def pretty_print(self) -> None:
        """Log the tree's books; SGLang asks for it when memory is short."""
        logger.info("%r\n%s", self.cache, self.available_and_evictable_str())

    def sanity_check(self) -> None:
        """Recompute the tree's books; raises if one is wrong."""
        self.cache.check_integrity()


class _Match:
    """A lookup without a request."""

    def __init__(self, key: Sglang) -> None:
        self.key = key


def _is_same(was: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return was[0] is now[0] and was[1:] == now[1:]


def _result(lease: Lease) -> MatchResult:
    n_tokens = 0 if lease.request is None else lease.request.anchor_tokens
    return MatchResult(
        device_prefix_len=n_tokens,
        last_device_node=lease,
        last_host_node=lease,
        best_match_node=lease,
        full_kv_hit_length=n_tokens,
    )


def _follows(key: TokenKey | None, tokens: Any, computed: int, *, is_known: bool) -> bool:
    """Give the key the row's tokens; whether it had no others than them.

    The array is known if the key was made of it.
    """
    assert key is not None
    if len(tokens) < computed:
        return False
    if not is_known:
        n_tokens = min(key.n_tokens, len(tokens))
        # a copy: a key that is looked at cannot grow
        held = bytes(key.data[computed * TOKEN_BYTES : n_tokens * TOKEN_BYTES])
        if not np.array_equal(np.frombuffer(held, np.int32), tokens[computed:n_tokens]):
            return False
    if key.n_tokens < len(tokens):
        key.extend(tokens[key.n_tokens :])
    return True


def refusals(context: Sglang) -> list[str]:
    """Features of a server that are not supported here, each in a few words."""
    params = context.params
    allocator = params.token_to_kv_pool_allocator
    memory, parallel = get_memory(), get_parallel()
    pools = [allocator]
    if context.is_hybrid_swa:
        pools = [getattr(allocator, f"{side}_attn_allocator", None) for side in ("full", "swa")]
    swapped = all(isinstance(each, (PagesOfCache, TokensOfCache)) for each in pools)
    ring = bool(getattr(allocator, "swa_req_ring", False))
    asked = {
        "states (Mamba, linear attention)": context.is_hybrid_ssm,
        "HiCache (--enable-hierarchical-cache)": context.enable_hierarchical_cache,
        "a radix cache that is off": context.disable_radix_cache,
        "models of sliding windows alone": context.is_hybrid_swa
        and context.full_tokens_per_layer == 0,
        "windows in a ring for each request": ring or not params.swa_gates_prefix_match,
        "speculative decoding": get_spec().speculative_algorithm is not None or params.is_eagle,
        "context or pipeline parallelism": params.pp_size > 1
        or params.attn_cp_size > 1
        or parallel.dcp_enabled,
        "prefill and decode apart": get_disagg().disaggregation_mode != "null",
        "KV cache events": params.enable_kv_cache_events,
        "sessions in the radix cache": params.enable_session_radix_cache,
        "SGLang's eviction policies (set KVGRAFT_SGLANG)": params.eviction_policy != "lru",
        "the schedule policy dfs-weight": get_schedule().schedule_policy == "dfs-weight",
        "LMCache, FlexKV and external linkers": memory.enable_lmcache
        or memory.enable_flexkv
        or memory.enable_unified_cache_external_linker,
    }
    found = [what for what, is_asked in asked.items() if is_asked]
    if not swapped and not found:
        found = [f"the allocator {type(allocator).__name__}"]
    return found
