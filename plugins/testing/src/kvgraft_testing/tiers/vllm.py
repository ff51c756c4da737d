"""Tiers of vLLM: a `SecondaryTierManager` below vLLM's own `TieringOffloadingManager`.

No engine runs and no GPU is needed: chunks are bytes that the driver writes into vLLM's CPU tier.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import vllm
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvgraft_testing.tiers.driver import (
    LONGEST_S,
    PAGE_NBYTES,
    Key,
    Kind,
    OpenTier,
    Setting,
    Target,
    fail,
)

__all__ = ["VllmKind"]

STEP_S = 0.002
"""Seconds between two scheduling steps, in which a model would run."""

UNTOUCHED, REUSED = 0x5A, 0xEE
"""Bytes of memory that nobody may write, and of memory that is used for something else."""

MOST_LOADS = 40
"""Times after which a page that is a hit and never loads is a livelock."""

MARK_NBYTES = 64
"""Bytes of a row that tell whether it is written afterwards."""

AFTERWARDS_S = 0.5
"""Seconds for which memory is watched when it must not change any more."""

HIT, MISS = offload.LookupResult.HIT, offload.LookupResult.MISS
NO_REQUESTS = offload.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def _config(
    secondary: dict[str, Any], setting: Setting, n_pages: int, engine: str
) -> OffloadingConfig:
    groups = tuple(
        OffloadingGroupConfig(
            tokens_per_block=setting.page_tokens, layer_names=setting.layers, group_id=group
        )
        for group in range(VllmKind.groups)
    )
    return OffloadingConfig(
        groups=groups,
        worker_kv_bytes_per_block=setting.page_nbytes // setting.n_ranks // setting.page_blocks,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": n_pages * setting.page_nbytes,
            "secondary_tiers": [secondary],
        },
        engine_id=engine,
        model=OffloadingModelConfig(name=setting.model, dtype=setting.dtype),
        cache=OffloadingCacheConfig(
            tokens_per_hash=setting.page_tokens, blocks_per_chunk=setting.page_blocks
        ),
        parallel=OffloadingParallelConfig(
            rank=setting.rank,
            world_size=setting.n_ranks,
            tp_size=setting.n_ranks,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )


class _Watch:
    """Looks at a tier's jobs as they begin and end, and at the memory when they end.

    Attributes:
        running: jobs that were not reported.
        stored: per ended store, whether it succeeded.
        loaded: pages as they were in memory when their load ended.
        written: rows of memory that a load may have written.
        n_loads: loads submitted, by key.
    """

    def __init__(self, tier: Any, rows: Any, name: str) -> None:
        self._name = name
        self._rows = rows
        self.running: dict[int, Any] = {}
        self.stored: dict[int, bool] = {}
        self.loaded: dict[bytes, bytes] = {}
        self.written: set[int] = set()
        self.n_loads: dict[bytes, int] = {}
        self._take = tier.get_finished_jobs
        submit_store, submit_load = tier.submit_store, tier.submit_load

        def store(job: Any) -> None:
            self.running[job.job_id] = job
            submit_store(job)

        def load(job: Any) -> None:
            self.running[job.job_id] = job
            self.written.update(int(row) for row in job.chunk_ids)
            for each in job.keys:
                self.n_loads[each] = self.n_loads.get(each, 0) + 1
            submit_load(job)

        tier.submit_store, tier.submit_load = store, load
        tier.get_finished_jobs = self._finished

    def _finished(self) -> Iterable[Any]:
        results = list(self._take())
        for result in results:
            job = self.running.pop(result.job_id, None)
            if job is None:
                fail("O10", self._name, f"job {result.job_id} ended twice, or was never submitted")
            elif job.is_promotion:
                self._loaded(job, result)
            else:
                self.stored[result.job_id] = bool(result.success)
                self._rows[np.asarray(job.chunk_ids)] = REUSED
        return results

    def _loaded(self, job: Any, result: Any) -> None:
        good = set(job.keys) if result.success else set(result.successful_keys or ())
        if good - set(job.keys):
            fail("O10", self._name, f"job {result.job_id} loaded pages it was not asked for")
        for name, row in zip(job.keys, job.chunk_ids):
            if name in good:
                self.loaded[name] = bytes(self._rows[int(row)])


class VllmTier(OpenTier):
    """vLLM's manager and CPU tier over the tier under test."""

    def __init__(self, name: str, spec: TieringOffloadingSpec) -> None:
        self._name = name
        self.manager: Any = spec.get_manager()
        self._rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._rows[:] = UNTOUCHED
        self._watch = _Watch(self.manager.secondary_tiers[0], self._rows, name)
        self._n_requests = 0
        self._open: list[Any] = []

    def store(self, *batches: Mapping[Key, bytes]) -> list[bool]:
        request = self._request()
        jobs = [self._submit(request, batch) for batch in batches]
        self._settle([job for job in jobs if job is not None])
        self._finish(request)
        return [job is not None and self._watch.stored.pop(job) for job in jobs]

    def load(self, *batches: Sequence[Key]) -> dict[Key, bytes]:
        self.forget()
        found = self.load_beside(*batches)
        self._expect_untouched("O1", "a load")
        return found

    def load_beside(self, *batches: Sequence[Key]) -> dict[Key, bytes]:
        asked = [(self._request(), [_name(each) for each in batch]) for batch in batches]
        waiting = {(request.req_id, name): request for request, names in asked for name in names}
        hits: set[bytes] = set()
        end = time.monotonic() + LONGEST_S
        while waiting:
            for (_, name), request in list(waiting.items()):
                result = self.manager.lookup(name, request)
                if result in (HIT, MISS):
                    del waiting[request.req_id, name]
                    hits.update([name] if result is HIT else [])
                elif self._watch.n_loads.get(name, 0) > MOST_LOADS:
                    fail("O10", self._name, f"a page is a hit and fails to load, {MOST_LOADS} x")
            self._step()
            if time.monotonic() > end:
                fail(
                    "O10", self._name, f"{len(waiting)} lookups had no answer in {LONGEST_S:.0f} s"
                )
        for request, _ in asked:
            self._finish(request)
        found = {each: self._watch.loaded[_name(each)] for each in _all(batches, hits)}
        for request, names in asked[:1]:
            self._expect_unchanged(request, [name for name in names if name in hits])
        return found

    def begin(self, stored: Mapping[Key, bytes], loaded: Sequence[Key]) -> None:
        self.forget()
        request = self._request()
        if stored:
            self._submit(request, stored)
        names = [_name(each) for each in loaded]
        end = time.monotonic() + LONGEST_S
        while time.monotonic() < end:
            asked = {name: self.manager.lookup(name, request) for name in names}
            names = [name for name in names if asked[name] is offload.LookupResult.RETRY]
            self.manager.on_schedule_end(NO_REQUESTS)  # submits the loads; no step is waited for
            if not names:
                return
            time.sleep(STEP_S)

    def close(self) -> None:
        in_flight = bool(self._watch.running)
        release, self.manager.primary_tier.shutdown = (
            self.manager.primary_tier.shutdown,
            lambda: None,
        )
        try:
            self.manager.shutdown()
            if in_flight:
                self._expect_still("a shutdown")
        finally:
            self._watch._rows = self._rows = np.zeros((1, 1), np.uint8)
            release()

    def forget(self) -> None:
        """Drop everything above the tier, as vLLM does before it sleeps; jobs are drained."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):
            self.manager.on_reset_flushed()
        if self._watch.running:
            fail("O11", self._name, f"{len(self._watch.running)} jobs are in flight after a drain")
        self._rows[:] = UNTOUCHED
        self._watch.written.clear()
        self._watch.loaded.clear()
        self._watch.n_loads.clear()

    def drain(self) -> None:
        """`forget`, and watch the memory.

        Raises:
            ContractViolation: O11, it changed.
        """
        self.forget()
        self._expect_still("a drain")

    # -- inside

    def _request(self) -> offload.ReqContext:
        self._n_requests += 1
        request = offload.ReqContext(req_id=f"request-{self._n_requests}")
        self.manager.on_new_request(request)
        return request

    def _finish(self, request: offload.ReqContext) -> None:
        self.manager.on_request_finished(request)
        self._step()

    def _step(self) -> None:
        self.manager.on_schedule_end(NO_REQUESTS)
        time.sleep(STEP_S)

    def _submit(self, request: offload.ReqContext, batch: Mapping[Key, bytes]) -> int | None:
        """Write chunks as the GPU does; the number of the tier's job, None if it got none."""
        before = set(self._watch.running) | set(self._watch.stored)
        contents = {_name(each): content for each, content in batch.items()}
        output = self.manager.prepare_store(list(contents), request)
        assert output is not None, "vLLM's CPU tier has no room: a clause's fault"
        for name, row in zip(output.keys_to_store, output.store_spec.chunk_ids):
            self._rows[int(row)] = np.frombuffer(contents[name], np.uint8)
        if not output.keys_to_store:
            return None
        self.manager.complete_store(list(output.keys_to_store), request)
        new = (set(self._watch.running) | set(self._watch.stored)) - before
        return min(new, default=None)

    def _settle(self, jobs: Sequence[int]) -> None:
        end = time.monotonic() + LONGEST_S
        while any(job in self._watch.running for job in jobs):
            self._step()
            if time.monotonic() > end:
                fail("O10", self._name, f"a store did not end within {LONGEST_S:.0f} s")

    def _expect_untouched(self, rule: str, told: str) -> None:
        others = np.ones(len(self._rows), bool)
        others[list(self._watch.written)] = False
        if (self._rows[others] != UNTOUCHED).any():
            fail(rule, self._name, f"{told} wrote beside the memory of its own pages")

    def _expect_unchanged(self, request: offload.ReqContext, names: Sequence[bytes]) -> None:
        for name in names:
            result = self.manager.primary_tier.lookup(name, request)
            if result is not HIT:
                continue
            (row,) = self.manager.primary_tier.prepare_load([name], request).chunk_ids
            content = bytes(self._rows[int(row)])
            self.manager.primary_tier.complete_load([name], request)
            if content != self._watch.loaded[name]:
                fail("O1", self._name, "memory was written after the load had ended")

    def _expect_still(self, told: str) -> None:
        marks = self._rows[:, :MARK_NBYTES]
        marks[:] = REUSED  # a few bytes of each row: at once, before a late load has ended
        time.sleep(AFTERWARDS_S)
        if (marks != REUSED).any():
            fail("O11", self._name, f"memory was written after {told}")


def _name(each: Key) -> offload.OffloadKey:
    return offload.make_offload_key(each.digest, each.group)


def _all(batches: Sequence[Sequence[Key]], hits: set[bytes]) -> list[Key]:
    return [each for batch in batches for each in batch if _name(each) in hits]


class VllmKind(Kind):
    """`SecondaryTierManager` of vLLM."""

    name: ClassVar[str] = "vLLM's SecondaryTierManager"
    groups: ClassVar[int] = 2
    drains: ClassVar[bool] = True
    settings: ClassVar[Mapping[str, tuple[Setting, Setting]]] = {
        "dtype": (Setting(), Setting(dtype="bfloat16")),
        "page_blocks": (Setting(), Setting(page_blocks=2, page_nbytes=2 * PAGE_NBYTES)),
        "layers": (Setting(), Setting(layers=("layers.0", "layers.2"))),
        "model": (Setting(), Setting(model="other")),
        "n_ranks": (Setting(), Setting(n_ranks=2)),
    }

    def open(self, target: Target, directory: Path, setting: Setting, n_pages: int) -> VllmTier:
        assert target.loaded is not None
        secondary = {**_type(target.loaded), **target.filled(directory)}
        engine = f"kvgraft-tier-{os.getpid()}"
        return VllmTier(
            target.name, TieringOffloadingSpec(_config(secondary, setting, n_pages, engine))
        )

    def version(self) -> str:
        return f"vLLM {vllm.__version__}"

    def drain(self, tier: OpenTier) -> None:
        assert isinstance(tier, VllmTier)
        tier.drain()

    def clean(self, process: int) -> None:
        Path(f"/dev/shm/vllm_offload_kvgraft-tier-{process}.mmap").unlink(missing_ok=True)


def _type(loaded: type) -> dict[str, str]:
    """The type by which vLLM's factory makes it: its own name for its own tiers."""
    for name, load in SecondaryTierFactory._registry.items():
        try:
            known = load()
        except ImportError:  # a tier of vLLM whose libraries are not here
            continue
        if known is loaded:
            return {"type": name}
    return {"type": loaded.__name__, "module_path": loaded.__module__}
