"""SGLang's own scheduling of requests on a CPU, without a model: which slots each token gets.

SGLang's `Req`, `PrefillAdder`, allocators, rows, prefix caches and memory checks, in the order in
which its scheduler calls them. In place of a model each token's slot is stamped with a hash of the
tokens up to it, and every slot that a model would read is compared.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvgraft_testing.tiers import stand_ins

stand_ins.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from sglang.srt.managers import schedule_batch  # noqa: E402
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req  # noqa: E402
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder  # noqa: E402
from sglang.srt.managers.scheduler_components.invariant_checker import (  # noqa: E402
    SchedulerInvariantChecker,
)
from sglang.srt.managers.scheduler_components.pool_stats_observer import (  # noqa: E402
    SchedulerPoolStatsObserver,
)
from sglang.srt.mem_cache import kv_cache_configurator  # noqa: E402
from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend  # noqa: E402
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

SEED = 0x9E3779B97F4A7C15
MASK = (1 << 62) - 1


class WindowPool(BaseSWAKVPool):  # type: ignore[misc]
    """A hybrid model's tensors, as far as an allocator asks for them."""

    swa_req_ring_size = None
    full_kv_pool = swa_kv_pool = None

    def __init__(self) -> None:
        pass

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        return self.full_to_swa_index_mapping[kv_indices]


WindowPool.__abstractmethods__ = frozenset()


class WrongSlotsError(AssertionError):
    """A model would read another token's data."""


class Scheduler:
    """A server's scheduler, from its options to the slots of each token.

    Args:
        backend: for `--radix-cache-backend`; None for SGLang's own tree.
        tokens: of the full attention's pool.
        page_size: tokens of a page.
        window: of sliding attention; None for a model without.
        window_tokens: of its pool.
        chunk: most tokens that a step computes.
        most_running: most requests at a time.
        checks: whether every slot that is read is compared, and SGLang checks its memory.
        core: of SGLang's own tree: `python` or `rust`.
        states: whether the model has some (Mamba).
        more: other options of the server.
    """

    def __init__(
        self,
        backend: str | None,
        tokens: int,
        *,
        page_size: int = 16,
        window: int | None = None,
        window_tokens: int = 0,
        chunk: int = 512,
        most_running: int = 8,
        max_context: int = 4096,
        checks: bool = True,
        core: str | None = None,
        states: bool = False,
        **more: Any,
    ) -> None:
        load_plugins()
        os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"] = "1"
        os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
        options = {"radix_eviction_policy": "lru", "attention_backend": "torch_native", **more}
        self._options = get_context().override_server_args(
            page_size=page_size,
            chunked_prefill_size=chunk,
            radix_cache_backend=backend,
            **options,
        )
        self._options.install()
        self.page_size, self.window, self.chunk, self.checks = page_size, window, chunk, checks
        self.rows = ReqToTokenPool(most_running, max_context, "cpu", enable_memory_saver=False)
        tokens = tokens // page_size * page_size
        window_tokens = window_tokens // page_size * page_size
        self.allocator = self._allocator(tokens, window_tokens)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            eviction_policy=options["radix_eviction_policy"],
            chunked_prefill_size=chunk,
            sliding_window_size=window,
            tree_core_backend=core,
        )
        self.tree = create_tree_cache(
            TreeCacheBuildContext(
                server_args=None,
                params=params,
                is_hybrid_swa=window is not None,
                is_hybrid_ssm=states,
                enable_hierarchical_cache=bool(more.get("enable_hierarchical_cache")),
                disable_radix_cache=False,
                tp_worker=None,
                model_config=None,
                tp_size=1,
                tp_rank=0,
                tp_group=None,
                full_tokens_per_layer=tokens,
            )
        )
        hybrid = {
            "is_hybrid_swa": window is not None,
            "is_hybrid_ssm": False,
            "full_tokens_per_layer": tokens,
            "swa_tokens_per_layer": window_tokens,
            "max_total_num_tokens": tokens,
            "tree_cache": self.tree,
            "token_to_kv_pool_allocator": self.allocator,
            "req_to_token_pool": self.rows,
        }
        observer = SchedulerPoolStatsObserver(
            session_controller=SimpleNamespace(sessions={}),
            hisparse_coordinator=None,
            enable_hisparse=False,
            **hybrid,
        )
        self.checker = SchedulerInvariantChecker(
            disaggregation_mode=None,
            page_size=page_size,
            pool_stats_observer=observer,
            get_last_batch=lambda: SimpleNamespace(reqs=self.running),
            get_running_batch=lambda: SimpleNamespace(reqs=self.running),
            scheduler_stage_metrics=None,
            get_chunked_req=lambda: self.chunked,
            **hybrid,
        )
        self.waiting: deque[Req] = deque()
        self.running: list[Req] = []
        self.chunked: Req | None = None
        self.stamps: dict[str, list[int]] = {}
        self.answers: dict[str, Sequence[int]] = {}
        self.full = np.zeros(tokens + page_size, np.int64)
        self.sliding = np.zeros(window_tokens + page_size, np.int64)
        self.asked = self.hits = self.retractions = self.computed = self.chunks = 0
        self.ended: list[Req] = []

    def _allocator(self, tokens: int, window_tokens: int) -> Any:
        """By SGLang's own function, with the hooks of plugins."""
        build = kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool_allocator
        model = SimpleNamespace(
            is_hybrid_swa=self.window is not None,
            kv_cache_dtype=torch.float16,
            device="cpu",
            kv_shard_size=1,
            page_size=self.page_size,
            hybrid_gdn_config=None,
            is_draft_worker=False,
        )
        sizes = SimpleNamespace(
            max_total_num_tokens=tokens,
            full_max_total_num_tokens=tokens,
            swa_max_total_num_tokens=window_tokens,
        )
        return build(
            model,
            sizes=sizes,
            token_to_kv_pool=WindowPool() if self.window is not None else None,
            is_dsv4_model=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=None,
        )

    def close(self) -> None:
        self._options.restore()

    # -- requests

    def add(
        self, name: str, tokens: Sequence[int], n_new: int, answer: Sequence[int] | None = None
    ) -> Req:
        """A request waits; its answer's tokens are given, or follow from all before them."""
        params = SamplingParams(max_new_tokens=n_new)
        req = Req(name, "", array("q", tokens), params)
        self.stamps[name] = []
        if answer is not None:
            self.answers[name] = answer
        self.waiting.append(req)
        return req

    def abort(self, req: Req) -> None:
        """A client left: whatever stage its request is in."""
        req.finished_reason = FINISH_ABORT("gone")
        if req in self.waiting:
            self.waiting.remove(req)
            return
        if req is self.chunked:
            self.chunked = None
        elif req in self.running:
            self.running.remove(req)
        release_kv_cache(req, self.tree, checkpoint=False)

    # -- steps

    def step(self) -> bool:
        """One step of the model, prefill before decode; whether there was any."""
        batch = self._prefill()
        if not batch:
            batch = self._decode()
        if self.checks:
            self._check_memory()
        return bool(batch)

    def run(self, most_steps: int = 1 << 20) -> None:
        while (self.waiting or self.running or self.chunked) and most_steps:
            if not self.step() and not self.running and self.chunked is None:
                raise AssertionError(f"nothing runs, {len(self.waiting)} requests wait")
            most_steps -= 1

    def _prefill(self) -> list[Req]:
        if self.chunked is not None:
            # The last chunk is published before the next one.
            checkpoint_kv_cache(self.chunked, self.tree)
        if not self.waiting and self.chunked is None:
            return []
        running = schedule_batch.ScheduleBatch(reqs=self.running)
        adder = PrefillAdder(
            self.page_size,
            self.tree,
            self.allocator,
            running,
            new_token_ratio=0.1,
            rem_input_tokens=1 << 20,
            rem_chunk_tokens=self.chunk,
            num_mixed_decode_tokens=0,
            max_prefill_bs=0,
            max_running_requests=self.rows.size,
        )
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        for req in list(self.waiting):
            if len(self.running) + len(adder.can_run_list) >= self.rows.size:
                break
            req.init_next_round_input(self.tree)
            result = adder.add_one_req(
                req, has_chunked_req=self.chunked is not None, truncation_align_size=None
            )
            if result != AddReqResult.CONTINUE:
                break
        ran = adder.can_run_list
        if not ran:
            return []
        if adder.new_chunked_req is not None:
            self.chunked = adder.new_chunked_req
            self.chunks += 1
        for req in ran:
            if req in self.waiting:
                self.waiting.remove(req)
                if not req.retraction_count:
                    self.asked += len(req.origin_input_ids)
                    self.hits += req.prefix_len
        self._extend(ran)
        for req in ran:
            if req is self.chunked:
                continue
            self._sample(req)
            if req.finished():
                self._end(req)
            else:
                checkpoint_kv_cache(req, self.tree)
                self.running.append(req)
        return list(ran)

    def _batch(self, reqs: list[Req], mode: ForwardMode) -> Any:
        batch = schedule_batch.ScheduleBatch(
            reqs=reqs,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            device="cpu",
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.forward_mode = mode
        return batch

    def _extend(self, reqs: list[Req]) -> None:
        batch = self._batch(reqs, ForwardMode.EXTEND)
        lens = [req.extend_end for req in reqs]
        batch.prefix_lens = [req.prefix_len for req in reqs]
        batch.extend_lens = [req.extend_len for req in reqs]
        batch.seq_lens = torch.tensor(lens)
        batch.seq_lens_cpu = torch.tensor(lens)
        batch.extend_num_tokens = sum(batch.extend_lens)
        alloc_for_extend(batch)
        for req in reqs:
            req.extend_batch_idx += 1
            self._compute(req, req.prefix_len, req.extend_end)
        for req in reqs:
            self._read(req, req.prefix_len, req.extend_end)

    def _decode(self) -> list[Req]:
        self._retract()
        reqs = list(self.running)
        if not reqs:
            return []
        batch = self._batch(reqs, ForwardMode.DECODE)
        lens = [req.seqlen - 1 for req in reqs]
        batch.seq_lens = torch.tensor(lens)
        batch.seq_lens_cpu = torch.tensor(lens)
        batch.req_pool_indices = torch.tensor([req.kv.req_pool_idx for req in reqs])
        batch.req_pool_indices_cpu = batch.req_pool_indices
        alloc_for_decode(batch, token_per_req=1)
        for req in reqs:
            req.decode_batch_idx += 1
            self._compute(req, req.seqlen - 1, req.seqlen)
            self._read(req, req.seqlen - 1, req.seqlen)
            self._sample(req)
            if req.finished():
                self.running.remove(req)
                self._end(req)
        return reqs

    def _retract(self) -> None:
        """As `ScheduleBatch.retract_decode`: the latest go first, one stays."""
        while self.running:
            batch = self._batch(self.running, ForwardMode.DECODE)
            batch.seq_lens_cpu = torch.tensor([req.seqlen - 1 for req in self.running])
            needed = batch.new_tokens_required_next_decode()
            if self.allocator.check_decode_capacity(num_tokens=needed, tree_cache=self.tree):
                return
            assert len(self.running) > 1, "one request does not fit"
            req = self.running.pop()
            self.retractions += 1
            schedule_batch.release_req(
                req=req,
                remaing_req_count=len(self.running),
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                tree_cache=self.tree,
                hisparse_coordinator=None,
            )
            self.waiting.appendleft(req)

    def _sample(self, req: Req) -> None:
        """The next token of the answer."""
        answer, at = self.answers.get(req.rid), len(req.output_ids)
        token = self._stamp(req, req.seqlen) % 1000 if answer is None else answer[at]
        req.output_ids.append(token)
        if len(req.output_ids) >= req.sampling_params.max_new_tokens:
            req.finished_reason = FINISH_LENGTH(len(req.output_ids))

    def _end(self, req: Req) -> None:
        release_kv_cache(req, self.tree, checkpoint=True)
        self.ended.append(req)

    # -- data

    def _stamp(self, req: Req, n_tokens: int) -> int:
        """The hash of a request's first tokens."""
        stamps = self.stamps[req.rid]
        while len(stamps) < n_tokens:
            at = len(stamps)
            prompt = len(req.origin_input_ids)
            token = req.origin_input_ids[at] if at < prompt else req.output_ids[at - prompt]
            before = stamps[-1] if stamps else SEED
            stamps.append(((before ^ token) * 6364136223846793005 + 1442695040888963407) & MASK)
        return stamps[n_tokens - 1]

    def _slots(self, req: Req, start: int, end: int) -> Any:
        return self.rows.req_to_token[req.kv.req_pool_idx, start:end].long()

    def _compute(self, req: Req, start: int, end: int) -> None:
        """Tokens of a row get their data."""
        self.computed += end - start
        if not self.checks:
            return
        self._stamp(req, end)
        data, slots = self.stamps[req.rid][start:end], self._slots(req, start, end)
        self.full[slots.numpy()] = data
        if self.window is not None:
            self.sliding[self.allocator.full_to_swa_index_mapping[slots].numpy()] = data

    def _read(self, req: Req, start: int, end: int) -> None:
        """What the tokens from `start` on attend to is the data of the tokens before them."""
        if not self.checks:
            return
        self._compare(req, "full", self.full[self._slots(req, 0, end).numpy()], 0, end)
        if self.window is not None:
            first = max(0, start - self.window)
            mapping = self.allocator.full_to_swa_index_mapping
            slots = mapping[self._slots(req, first, end)].numpy()
            self._compare(req, "window", self.sliding[slots], first, end)

    def _compare(self, req: Req, what: str, read: Any, first: int, end: int) -> None:
        wrong = np.flatnonzero(read != np.array(self.stamps[req.rid][first:end]))
        if len(wrong):
            raise WrongSlotsError(
                f"{what}: {len(wrong)} of {end - first} slots of {req.rid}, the first at "
                f"{first + int(wrong[0])} of {end}, hold other tokens"
            )

    def _check_memory(self) -> None:
        """SGLang's own check of its pools, while requests run and when none does."""
        self.checker.self_check_during_busy()
        if not self.running and self.chunked is None:
            leak, said = self.checker._check_all_pools(
                self.checker.pool_stats_observer.get_pool_stats()
            )
            assert not leak, said
            self.checker._check_req_pool()
