"""vLLM's own scheduler without an engine, and a worker that checks what it would read.

The worker keeps block tables as vLLM's does: new blocks are appended, and a table is replaced where
a request is resumed. Where a model would write keys and values it writes a number that stands for
the token and all before it; whatever position a scheduled token attends to must hold its own. A
state holds the number of its last token. As vLLM's worker with `mamba_cache_mode` "align" it clears
blocks and copies some first, then moves each state to the column of the last token of the step.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    is_mamba_prefill_checkpoint_valid,
)
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvgraft_vllm.block_layout import STATE, LooksBack
from kvgraft_vllm.manager import needs_hashes

__all__ = ["Engine", "Sizes", "Traffic", "Worker", "drafting", "drive"]

VOCABULARY = 1 << 17
MOST_STEPS = 20_000
IMAGE_TOKENS = 1000
"""Of images, in a step, and kept for it."""


def sha(value: object) -> bytes:
    """vLLM's hash of a block, quick and the same in every run."""
    import hashlib
    import pickle

    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


@dataclass(frozen=True)
class Sizes:
    """An engine's.

    Attributes:
        n_blocks: blocks of all groups together.
        windows: per group, its sliding window; None for full attention, `STATE` for states.
        block_size: tokens of a block.
        step_tokens: most tokens of a step.
        max_model_len: longest context.
        max_num_seqs: most running requests.
        policy: `fcfs` or `priority`.
        depth: steps under way at a time; more than one is asynchronous scheduling.
        log_stats: whether vLLM's statistics are kept.
        exports: whether kernels export the state before a prompt's end from inside a pass.
        drafts: most draft tokens of a request in a step.
    """

    n_blocks: int = 65
    windows: tuple[LooksBack, ...] = (None,)
    block_size: int = 4
    step_tokens: int = 24
    max_model_len: int = 96
    max_num_seqs: int = 8
    policy: str = "fcfs"
    depth: int = 1
    log_stats: bool = True
    exports: bool = False
    drafts: int = 0

    @property
    def states(self) -> list[int]:
        """The groups with states."""
        return [group for group, window in enumerate(self.windows) if window == STATE]


def cache_config(sizes: Sizes) -> KVCacheConfig:
    groups = []
    for number, window in enumerate(sizes.windows):
        shape = {
            "block_size": sizes.block_size,
            "num_kv_heads": 1,
            "head_size": 8,
            "dtype": torch.float16,
        }
        if window == STATE:
            spec = MambaSpec(
                block_size=sizes.block_size,
                shapes=((sizes.block_size, 16),),
                dtypes=(torch.float16,),
                mamba_cache_mode="align",
                num_prefill_checkpoint_blocks=int(sizes.exports),
                prefill_checkpoint_alignment=sizes.block_size if sizes.exports else None,
            )
        elif window is None:
            spec = FullAttentionSpec(**shape)
        else:
            spec = SlidingWindowSpec(**shape, sliding_window=window)
        groups.append(KVCacheGroupSpec([f"layers.{number}"], spec))
    return KVCacheConfig(num_blocks=sizes.n_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def drafting(method: str) -> Any:
    """The part of vLLM's speculative configuration that its scheduler reads."""
    return SimpleNamespace(
        method=method,
        use_eagle=lambda: False,
        use_eagle_block_drop=lambda: False,
        needs_eagle_block_drop=lambda: False,
        num_speculative_tokens_per_batch_size=None,
        max_num_new_slots_for_drafting=0,
    )


def engine_config(sizes: Sizes) -> Any:
    """The part of vLLM's configuration that its scheduler reads: the whole needs a model."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=sizes.max_num_seqs,
            max_num_active_seqs=None,
            max_num_scheduled_tokens=sizes.step_tokens,
            max_num_batched_tokens=sizes.step_tokens,
            long_prefill_token_threshold=0,
            long_prefill_token_threshold_adaptive=False,
            policy=sizes.policy,
            watermark=0.0,
            prefill_schedule_interval=1,
            scheduler_reserve_full_isl=True,
            enable_chunked_prefill=True,
            disable_chunked_mm_input=False,
            async_scheduling=sizes.depth > 1,
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks=sizes.n_blocks,
            block_size=sizes.block_size,
            enable_prefix_caching=True,
            mamba_cache_mode="align" if sizes.states else "none",
            enable_mamba_shared_prefix_checkpoint=False,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
        ),
        model_config=SimpleNamespace(
            uses_mrope=False,
            is_encoder_decoder=False,
            is_diffusion=False,
            max_model_len=sizes.max_model_len,
            runner_type="generate",
            supports_multimodal_inputs=False,
            return_sampling_mask=False,
        ),
        observability_config=SimpleNamespace(
            per_request_spec_decode_metrics="none",
            kv_cache_metrics=False,
            kv_cache_metrics_sample=0.0,
            enable_mfu_metrics=False,
            enable_logging_iteration_details=False,
        ),
        aux_output_config=SimpleNamespace(enabled=False),
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        additional_config={},
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=drafting("ngram") if sizes.drafts else None,
        is_mm_encoder_only=False,
        use_v2_model_runner=False,
        max_concurrent_batches=sizes.depth,
        max_in_flight_tokens=sizes.depth * sizes.step_tokens,
        num_speculative_tokens=sizes.drafts,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        num_hash_lookahead_tokens=0,
    )


class Engine:
    """A scheduler of vLLM, and the requests that it was given.

    Attributes:
        scheduler: vLLM's.
        manager: its cache manager, whichever was chosen.
        worker: its worker.
        outputs: of the steps that are under way.
    """

    def __init__(self, sizes: Sizes, config: Any = None) -> None:
        init_none_hash(sha)
        self.sizes = sizes
        kind = AsyncScheduler if sizes.depth > 1 else Scheduler
        self.scheduler: Any = kind(
            vllm_config=config or engine_config(sizes),
            kv_cache_config=cache_config(sizes),
            structured_output_manager=SimpleNamespace(
                accept_tokens=lambda request, tokens: True,
                validate_tokens=lambda request, tokens: tokens,
            ),
            block_size=sizes.block_size,
            hash_block_size=sizes.block_size,
            log_stats=sizes.log_stats,
        )
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=IMAGE_TOKENS)
        self.scheduler.max_num_encoder_input_tokens = IMAGE_TOKENS
        self.manager: Any = self.scheduler.kv_cache_manager
        self.worker = Worker(sizes)
        self.outputs: list[Any] = []
        self._hasher = None
        if needs_hashes(self.scheduler):
            self._hasher = get_request_block_hasher(sizes.block_size, sha)

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        priority: int = 0,
        arrival: float = 0.0,
        salt: str | None = None,
        images: Sequence[tuple[int, int, str]] = (),
        *,
        resumable: bool = False,
    ) -> Request:
        """Add a request, or more input of a session; its images are `(offset, length, identity)`.

        To the worker the tokens of an image are numbers of its own, so that it finds others wrong.
        """
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=-1)
        request = Request(
            name,
            list(prompt),
            params,
            None,
            arrival_time=arrival,
            priority=priority,
            cache_salt=salt,
            block_hasher=self._hasher,
            resumable=resumable,
            mm_features=[
                MultiModalFeatureSpec(
                    None, "image", identity, PlaceholderRange(offset, length), identity
                )
                for offset, length, identity in images
            ],
        )
        content = list(prompt)
        for offset, length, identity in images:
            seen = random.Random(identity)
            content[offset : offset + length] = [seen.randrange(VOCABULARY) for _ in range(length)]
        if name in self.scheduler.requests:  # the last token of an answer was not computed
            text, end = self.worker.texts[name], self.scheduler.requests[name].num_tokens - 1
            del text.tokens[end:], text.numbers[end:]
            text.tokens += content
        else:
            self.worker.texts[name] = Text(content)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """Schedule a step, run it, and take in the oldest that is under way."""
        scheduler, outputs = self.scheduler, self.outputs
        output = scheduler.schedule()
        outputs.append((output, self.worker.run(output)))
        while len(outputs) >= self.sizes.depth or (outputs and not scheduler.has_requests()):
            for of_client in scheduler.update_from_output(*outputs.pop(0)).values():
                if of_client.scheduler_stats is not None:
                    self.worker.count(of_client.scheduler_stats.prefix_cache_stats)
        if self.sizes.drafts:
            scheduler.update_draft_token_ids(self.worker.draft())


def chained(before: int, token: int) -> int:
    """The number that stands for a token behind others."""
    return (before * 1_000_003 + token + 12_345) % ((1 << 61) - 1)


@dataclass
class Text:
    """A request's tokens and their numbers, as far as the worker knows them."""

    tokens: list[int]
    numbers: list[int] = field(default_factory=list)

    def number(self, end: int) -> np.ndarray:
        while len(self.numbers) < end:
            before = self.numbers[-1] if self.numbers else 1
            self.numbers.append(chained(before, self.tokens[len(self.numbers)]))
        return np.array(self.numbers[:end], np.int64)


class Worker:
    """Block tables and contents as of one engine's worker.

    Attributes:
        wrong: positions that were attended to and held something else.
        n_accepted, n_rejected: draft tokens.
        texts: by request, the tokens that it has, sampled ones included.
        n_resumed: how often a request was resumed after a preemption.
        stats: vLLM's prefix cache statistics, added up.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.contents = np.zeros((sizes.n_blocks, sizes.block_size), np.int64)
        self.columns: dict[str, int] = {}
        """Of the newest state in a request's tables."""
        self.tables: dict[str, list[list[int]]] = {}
        self.texts: dict[str, Text] = {}
        self.wrong = self.n_resumed = self.n_accepted = self.n_rejected = 0
        self._decoding: list[str] = []
        self._rng = random.Random(sizes.drafts)
        self.stats = PrefixCacheStats()

    def run(self, output: Any) -> ModelRunnerOutput:
        """One pass of the model over what was scheduled: all tokens are written, then read."""
        for gone in output.finished_req_ids:
            self.tables.pop(gone, None)
            self.columns.pop(gone, None)
        self.contents[output.new_block_ids_to_zero or []] = 0
        if output.kv_cache_block_copies:
            sources, targets = zip(*output.kv_cache_block_copies)
            self.contents[[*targets]] = self.contents[[*sources]]
        spans: dict[str, tuple[int, int]] = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            spans[new.req_id] = (new.num_computed_tokens, output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for name, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        ):
            if name in cached.resumed_req_ids:
                self.n_resumed += 1
                self.tables[name] = [list(group) for group in ids]
                self.columns.pop(name, None)
            elif ids is not None:
                for table, group in zip(self.tables[name], ids):
                    table.extend(group)
            spans[name] = (computed, output.num_scheduled_tokens[name])
        if self.sizes.states:
            for name, (start, n_tokens) in spans.items():
                self._move_states(name, start, start + n_tokens)
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            self.texts[name].tokens += drafts
        for name, (start, n_tokens) in spans.items():
            self._write(name, start, start + n_tokens)
        sampled = [
            self._sample(
                name, start, start + n, len(output.scheduled_spec_decode_tokens.get(name, ()))
            )
            for name, (start, n) in spans.items()
        ]
        self._decoding = [name for name, new in zip(spans, sampled) if new]
        names = list(spans)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def count(self, stats: PrefixCacheStats) -> None:
        for each in ("requests", "queries", "hits", "preempted_requests", "preempted_hits"):
            setattr(self.stats, each, getattr(self.stats, each) + getattr(stats, each))

    def _move_states(self, name: str, start: int, end: int) -> None:
        """To the column of the last token of the step, from that of the last token before it."""
        size = self.sizes.block_size
        before = self.columns.get(name, (start - 1) // size)
        column = self.columns[name] = -(-end // size) - 1
        for group in self.sizes.states:
            table = self.tables[name][group]
            if before not in (-1, column):
                self.contents[table[column]] = self.contents[table[before]]

    def _run_states(self, name: str, group: int, start: int, end: int) -> None:
        """From the state of the last token before the step to that of its last."""
        size, numbers = self.sizes.block_size, self.texts[name].number(end)
        table = self.tables[name][group]
        block = table[self.columns[name]]
        assert block > 0, f"{name} writes its state to the null block of group {group}"
        if start:
            self.wrong += int(self.contents[block, 0] != numbers[start - 1] + group)
        self.contents[block] = numbers[end - 1] + group
        if self.sizes.exports and is_mamba_prefill_checkpoint_valid(
            start, end, position := (end - 1) // size * size, size, size, size
        ):
            self.contents[table[-(-end // size) - 2]] = numbers[position - 1] + group

    def _write(self, name: str, start: int, end: int) -> None:
        size, numbers = self.sizes.block_size, self.texts[name].number(end)
        for group, table in enumerate(self.tables[name]):
            if self.sizes.windows[group] == STATE:
                self._run_states(name, group, start, end)
                continue
            places = np.arange(start, end)
            blocks = np.array(table)[places // size]
            assert (blocks > 0).all(), f"{name} writes to the null block of group {group}"
            new = blocks[places % size == 0] if self.sizes.states else []
            assert not self.contents[new].any(), f"{name} writes to blocks that were not cleared"
            self.contents[blocks, places % size] = numbers[start:] + group

    def draft(self) -> DraftTokenIds:
        """Drafts for requests that decode: some of the right tokens, then wrong ones."""
        drafts = []
        for name in self._decoding:
            tokens, n_drafts = (
                list(self.texts[name].tokens),
                self._rng.randint(0, self.sizes.drafts),
            )
            n_right = self._rng.randint(0, n_drafts)
            for _ in range(n_right):
                tokens.append(int(Text(tokens).number(len(tokens))[-1] % VOCABULARY))
            drafts.append(tokens[len(tokens) - n_right :] + [0] * (n_drafts - n_right))
        return DraftTokenIds(self._decoding, drafts)

    def _sample(self, name: str, start: int, end: int, n_drafts: int) -> list[int]:
        size, text = self.sizes.block_size, self.texts[name]
        numbers = text.number(end)
        for group, (table, window) in enumerate(zip(self.tables[name], self.sizes.windows)):
            if window == STATE:
                continue  # it was looked at before it went on
            places = np.arange(0 if window is None else max(0, start - window + 1), end)
            held = self.contents[np.array(table)[places // size], places % size]
            self.wrong += int((held != numbers[places] + group).sum())
        if end < len(text.tokens):
            return []  # a part of the prompt, or of what ran before a preemption
        known = end - n_drafts
        following: list[int] = (numbers[known - 1 :] % VOCABULARY).tolist()
        right = 0
        while right < n_drafts and following[right] == text.tokens[known + right]:
            right += 1
        self.n_accepted += right
        self.n_rejected += n_drafts - right
        del text.tokens[known + right :], text.numbers[known + right :]
        text.tokens.append(following[right])
        return following[: right + 1]


@dataclass
class Traffic:
    """Random requests with common prefixes.

    Attributes:
        seed: of all that is random.
        n_requests: how many.
        aborts: part of the steps in which a request is aborted.
        resets: part of the steps in which the prefix cache is reset.
    """

    seed: int
    n_requests: int = 40
    aborts: float = 0.05
    resets: float = 0.01

    def prompts(self, sizes: Sizes) -> Iterable[tuple[list[int], int]]:
        """Prompts, and how many tokens follow."""
        rng = random.Random(self.seed)
        stems = [[rng.randrange(VOCABULARY) for _ in range(48)] for _ in range(4)]
        longest = sizes.max_model_len - 8
        for _ in range(self.n_requests):
            stem = rng.choice(stems)[: rng.randrange(1, 48)]
            tail = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 24))]
            yield (stem + tail)[:longest], rng.randrange(1, sizes.max_model_len - longest + 8)


def drive(engine: Engine, traffic: Traffic) -> Worker:
    """Run all requests to their ends, or their aborts."""
    sizes, scheduler = engine.sizes, engine.scheduler
    worker, rng = engine.worker, random.Random(traffic.seed)
    waiting = list(traffic.prompts(sizes))
    for step in range(MOST_STEPS):
        while waiting and rng.random() < 0.5:
            prompt, max_tokens = waiting.pop()
            name = f"r{len(waiting)}"
            engine.add(name, prompt, max_tokens, rng.randrange(3), float(step))
        if not waiting and not scheduler.has_requests() and not engine.outputs:
            return worker
        alive = list(scheduler.requests)
        if alive and rng.random() < traffic.aborts:
            scheduler.finish_requests(rng.choice(alive), RequestStatus.FINISHED_ABORTED)
        if rng.random() < traffic.resets:
            scheduler.reset_prefix_cache()
        engine.step()
    raise AssertionError(f"{len(scheduler.requests)} requests have not ended")
