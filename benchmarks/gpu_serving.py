"""Models of real size on a GPU: time to the first token by tier, tokens a second, and choices.

    python benchmarks/gpu_serving.py --json gpu_serving.json

Random weights in bfloat16, one process, one GPU; about three minutes. `llama` has the shapes of a
1B Llama; `lfm3` those of LFM3-1.7B, whose layers are full attention, windows of 256 tokens and
short convolutions; `bamba` has four layers of attention among twelve of Mamba2. transformers
computes these in plain torch, which needs no further packages. Parts of the measurement:

    plain    transformers' own prefill of the prompt, in one pass and in chunks
    reuse    time to the first token of the prompt: computed, from DEVICE, from HOST, and from a
             store of files by an engine that was just opened on it
    decode   32 running requests, beside transformers' own caches, static and dynamic, and its
             continuous batching
    choice   prefixes of several lengths on HOST: loaded or computed again, and what either takes
    phases   where the time to the first token goes
    profile  profiles of torch and of Python, only where it is asked for

A restored prefix must beat computing wherever its bytes over the measured bandwidth are the shorter
time, the choice must be the faster way, and all ways must give one answer: the same tokens, or, as
bfloat16 rounds differently in passes of other shapes, others that are as likely. Times are medians;
the first one, which warms up, is left out. cuDNN's attention is off but for one line of `plain`: it
builds a plan for each new shape, 64 ms each. `--small` is a tiny model on the CPU, in seconds.
"""

from __future__ import annotations

import contextlib
import cProfile
import gc
import json
import logging
import math
import mmap
import os
import pstats
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from _measure import arguments, grid, heading
from prometheus_client import Histogram
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig

from kvgraft_transformers.engine import (
    Engine,
    EngineSettings,
    Generation,
    GenerationRequest,
    Sampling,
)
from kvgraft_transformers.tiny import DECAY, STEP

ATTENTION = {"initializer_range": 0.035}  # so sharp that a wrong prefix changes the answer
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "lfm3": {},
    "bamba": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "attn_layer_indices": [3, 7, 11, 15],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1000,
    },
    "lfm3": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1000,
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        "sliding_window": 40,
    },
    "bamba": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "attn_layer_indices": [1, 3],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
}
TOP = 20
MEMORY, ENOUGH = Path("/dev/shm"), 16 << 30
"""A file system in memory, and its free bytes from which a store is put there as well."""
AS_LIKELY = 0.1
"""Two tokens whose log-probabilities differ by less are a tie in bfloat16."""


class Extent(NamedTuple):
    """How much is measured.

    Attributes:
        device: where.
        prompt: tokens of the long prompt.
        chunk: tokens of a pass over a prompt.
        lengths: of the prefixes of `choice`.
        n_running: requests that decode together.
        short: tokens of their prompts.
        answer: tokens of their answers.
        repeats: times each is measured, beside the first.
        compiles: whether `generate` runs with a static cache, which it compiles for half a minute.
    """

    device: torch.device
    prompt: int = 32768
    chunk: int = 4096
    lengths: Sequence[int] = (64, 512, 2048, 8192, 32768)
    n_running: int = 32
    short: int = 512
    answer: int = 64
    repeats: int = 3
    compiles: bool = True

    def sync(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def tokens(self, model: Any, n: int) -> list[int]:
        """A prompt that begins as no other."""
        return torch.randint(3, model.config.vocab_size, (n,)).tolist()

    def seconds(
        self, run: Callable[[], object], before: Callable[[], object] | None = None
    ) -> float:
        """The median over the repeats."""
        found = []
        for _ in range(1 + self.repeats):
            if before is not None:
                before()
            found.append(self.once(run))
        return statistics.median(found[1:])

    def least(self, run: Callable[[], object], before: Callable[[], object] | None = None) -> float:
        """The least of three times the repeats: of what is so short that others disturb it."""
        found = []
        for _ in range(3 * self.repeats):
            if before is not None:
                before()
            found.append(self.once(run))
        return min(found)

    def once(self, run: Callable[[], object]) -> float:
        self.sync()
        began = time.perf_counter()
        run()
        self.sync()
        return time.perf_counter() - began


class Report:
    """The rows that were measured, and the expectations that they did not meet."""

    def __init__(self, path: Path | None, *, timed: bool) -> None:
        self.path = path
        self.timed = timed
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []

    def add(self, part: str, name: str, **numbers: Any) -> None:
        self.rows.append({"part": part, "name": name, **numbers})
        if self.path is not None:  # at once: nothing measured is lost
            self.path.write_text(json.dumps(self.rows, indent=1))

    def run(self, what: str, part: Callable[[], None]) -> None:
        """Run a part; one that fails does not keep the others from being measured."""
        try:
            part()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is printed and counts
            traceback.print_exc(file=sys.stdout)
            self.add("failed", what, error=repr(error))
            self.failed.append(f"{what}: {error!r:.200}")

    def expect(self, expectation: str, *, met: bool, timed: bool = False) -> None:
        """Note an expectation; one of times counts where the model is of real size."""
        self.add("expectation", expectation, met=met)
        print(f"{'met' if met else 'NOT MET'}: {expectation}", flush=True)
        if not met and (self.timed or not timed):
            self.failed.append(expectation)


class Run(NamedTuple):
    """One model to measure.

    Attributes:
        model: with random weights.
        extent: how much.
        report: takes the results.
        name: of the model.
        speeds: bytes a second, by the tier that a prefix comes from.
        stores: folders for stores, by name.
    """

    model: Any
    extent: Extent
    report: Report
    name: str
    speeds: dict[str, float]
    stores: dict[str, Path]


@contextlib.contextmanager
def cudnn(*, on: bool) -> Iterator[None]:
    """With cuDNN's attention, or without."""
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(on)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def build(name: str, extent: Extent, *, small: bool) -> Any:
    """A model with random weights."""
    fields = {**ATTENTION, **(SMALL if small else MODELS)[name]}
    fields |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(name, **fields)
    torch.manual_seed(0)
    with extent.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for parameter, weights in model.requires_grad_(False).named_parameters():
        if parameter.endswith(("A_log", "dt_bias")):  # states that last
            weights.fill_(DECAY if parameter.endswith("A_log") else STEP)
    return model


def copy_speed(extent: Extent) -> float:
    """Bytes a second of one large copy from page-locked memory."""
    nbytes = 1 << (20 if extent.device.type == "cpu" else 30)
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=extent.device.type != "cpu")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=extent.device)
    return nbytes / extent.seconds(lambda: there.copy_(host, non_blocking=True))


def read_speed(extent: Extent, folder: Path) -> float:
    """Bytes a second of reading a file as the `file` store does: 8 threads, 8 MiB, direct I/O."""
    piece = 8 << 20
    nbytes = piece * (2 if extent.device.type == "cpu" else 128)
    memory = mmap.mmap(-1, nbytes)
    path = folder / "read_speed"
    path.write_bytes(memory)
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without
        file = os.open(path, os.O_RDONLY)
    os.fsync(file)

    def read(at: int) -> int:
        return os.preadv(file, [memoryview(memory)[at : at + piece]], at)

    with ThreadPoolExecutor(8) as threads:
        took = extent.seconds(lambda: sum(threads.map(read, range(0, nbytes, piece))))
    os.close(file)
    path.unlink()
    return nbytes / took


# -- transformers alone


def plain_prefill(model: Any, extent: Extent, n: int, chunk: int) -> Callable[[], None]:
    """The prompt through the model, with transformers' own dynamic cache."""
    ids = torch.tensor([extent.tokens(model, n)], device=extent.device)

    def run() -> None:
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            for at in range(0, n, chunk):
                model(
                    ids[:, at : at + chunk], past_key_values=cache, use_cache=True, logits_to_keep=1
                )

    return run


def plain(run: Run) -> None:
    """Prefill by transformers alone; seconds."""
    model, extent, report, name, *_ = run
    rows = []
    for chunk, on in ((extent.prompt, True), (extent.prompt, False), (extent.chunk, False)):
        with cudnn(on=on):
            took = extent.seconds(plain_prefill(model, extent, extent.prompt, chunk))
        what = "one pass" if chunk == extent.prompt else f"chunks of {chunk}"
        what += ", cuDNN where it can" if on else ""
        rows.append([what, f"{took:.3f}", f"{extent.prompt / took:,.0f}"])
        report.add("plain", f"{name}: {what}", seconds=took, tokens_s=extent.prompt / took)
    grid([f"{name}: plain prefill of {extent.prompt}", "s", "tokens/s"], rows)


# -- the engine


def open_engine(model: Any, extent: Extent, prompts: int, **memory: Any) -> Engine:
    """An engine for prompts of the long length, so many on DEVICE; half of them on HOST."""
    return Engine.open(model, limits(extent), **{**pools(extent, prompts), "load": None, **memory})


def limits(extent: Extent) -> EngineSettings:
    return EngineSettings(
        max_running=extent.n_running,
        chunk_tokens=extent.chunk,
        step_tokens=extent.chunk,
        reserve_tokens=extent.answer,
    )


def pools(extent: Extent, prompts: int) -> dict[str, Any]:
    return {
        "device_tokens": prompts * extent.prompt,
        "host_tokens": prompts * extent.prompt // 2,
        "page_size": 16,
        "probe_tokens": 0,
    }


def ask(engine: Engine, prompt: Sequence[int], n: int = 1, *, likely: bool = False) -> Generation:
    sampling = Sampling(logprobs=TOP if likely else None)
    request = GenerationRequest(prompt, n, sampling=sampling, ignore_end=True)
    (generation,) = engine.generate([request])
    if generation.error is not None:
        raise generation.error
    return generation


def answer(engine: Engine, prompt: Sequence[int]) -> tuple[Generation, list[dict[int, float]]]:
    """A short answer, and by token the log-probabilities of the likeliest."""
    request = GenerationRequest(prompt, 8, sampling=Sampling(logprobs=TOP), ignore_end=True)
    generation, found = engine.submit(request), []
    for new in engine.run():
        assert new.choice is not None, new.generation.error
        found.append({each.token: each.logprob for each in new.choice.top})
    return generation, found


def to_host(engine: Engine) -> None:
    """Leave nothing on DEVICE."""
    cache = engine.memory.cache
    cache.drain()
    for each in cache.mounted:
        cache.evict(each.name, each.component.device.capacity)
    cache.drain()


def waited_s(histogram: Histogram) -> float:
    """The sum of a histogram's durations."""
    (metric,) = histogram.collect()
    return sum(each.value for each in metric.samples if each.name.endswith("_sum"))


def nbytes_loaded(engine: Engine) -> int:
    """Bytes that load-backs brought so far."""
    cache = engine.memory.cache
    slots = cache.stats().load_backs.slots
    nbytes = {each.name: each.component.device.slot_nbytes for each in cache.mounted}
    return sum(n * nbytes[name] for name, n in slots.items())


def differ(first: list[dict[int, float]], other: list[dict[int, float]]) -> tuple[float, str]:
    """Largest difference of log-probabilities of the first token; where the answers part, and why.

    The reason is empty where the tokens are equal.
    """
    both = set(first[0]) & set(other[0])
    distance = max((abs(first[0][each] - other[0][each]) for each in both), default=math.inf)
    if len(both) < TOP // 2:
        distance = math.inf
    for at, (mine, theirs) in enumerate(zip(first, other)):
        best, others_best = max(mine, key=mine.__getitem__), max(theirs, key=theirs.__getitem__)
        if best != others_best:
            gap = mine[best] - mine.get(others_best, -math.inf)
            return distance, f"token {at + 1} is another, less likely by {gap:.3f}"
    return distance, ""


class Reused(NamedTuple):
    """The long prompt by way.

    Attributes:
        seconds: to the first token, by tier, and `computed`.
        nbytes: copied for that.
        answers: by way, of each token the likeliest ones.
    """

    seconds: dict[str, float]
    nbytes: dict[str, int]
    answers: dict[str, list[dict[int, float]]]


def reuse(run: Run) -> None:
    """Time to the first token by tier, and whether the answers agree."""
    model, extent, report, name, speeds, stores = run
    prompt = extent.tokens(model, extent.prompt)
    found = by_tier(run, prompt)
    for way, folder in stores.items():
        from_store(run, prompt, found, way, folder)
    cold = found.seconds["computed"]
    rows = []
    for way, took in found.seconds.items():
        nbytes = found.nbytes.get(way, 0)
        least = nbytes / speeds.get(way, math.inf)
        rows.append([way, f"{nbytes:,}", f"{least:.3f}", f"{took:.3f}", f"{cold / took:.1f}"])
        report.add("reuse", f"{name}: {way}", seconds=took, nbytes=nbytes, copy_s=least)
        if way != "computed" and least < cold:
            what = f"{name}: {way} in {took:.3f} s beats {cold:.3f} s"
            report.expect(what, met=took < cold, timed=True)
        elif way != "computed":
            print(f"{name}: {way} cannot beat {cold:.3f} s: its bytes alone take {least:.3f} s")
    head = [f"{name}: first token of {extent.prompt}", "bytes", "bytes/bandwidth, s", "s", "faster"]
    grid(head, rows)
    compare(report, name, found.answers)


def by_tier(run: Run, prompt: list[int]) -> Reused:
    """The prompt computed, from DEVICE and from HOST."""
    model, extent, report, name, *_ = run
    found = Reused({}, {}, {})
    began = time.perf_counter()
    engine = open_engine(model, extent, 8)
    extent.sync()
    opened = time.perf_counter() - began
    report.add("reuse", f"{name}: opened", seconds=opened)
    print(f"{name}: engine opened in {opened:.2f} s: {engine.memory.cache}", flush=True)
    _, found.answers["computed"] = answer(engine, prompt)
    engine.memory.cache.clear()
    _, found.answers["computed again"] = answer(engine, prompt)
    with torch.inference_mode(), cudnn(on=False):
        logits = model(torch.tensor([prompt], device=extent.device), logits_to_keep=1).logits
    top = torch.log_softmax(logits[0, -1].float(), dim=-1).topk(TOP)
    plainly = [dict(zip(top.indices.tolist(), top.values.tolist()))]
    found.answers["transformers, one pass"] = plainly
    other = [*extent.tokens(model, extent.prompt - 16), *prompt[-16:]]
    _, found.answers["another prefix"] = answer(engine, other)
    seconds, found.nbytes["HOST"] = from_tiers(extent, engine, prompt, extent.seconds)
    found.seconds.update(seconds)
    report.expect(f"{name}: the prompt came from HOST", met=found.nbytes["HOST"] > 0)
    _, found.answers["DEVICE"] = answer(engine, prompt)
    to_host(engine)
    said, found.answers["HOST"] = answer(engine, prompt)
    assert said.host_tokens
    engine.close()
    return found


def compare(report: Report, name: str, answers: dict[str, list[dict[int, float]]]) -> None:
    """Whether all ways give one answer, and another prefix another one."""
    rows = []
    first = answers["computed"]
    far, _ = differ(first, answers["another prefix"])
    for way, other in answers.items():
        distance, why = differ(first, other)
        rows.append([way, f"{distance:.3f}", why or f"the same {len(other)}"])
        report.add("answers", f"{name}: {way}", distance=distance, why=why)
        if way != "another prefix":
            gap = float(why.rpartition(" ")[2]) if why else 0.0
            what = f"{name}: answer from {way}: {why or 'the same tokens'}"
            report.expect(what, met=distance < far / 2 and gap < AS_LIKELY)
    grid([f"{name}: answers", "log-probabilities differ by", "tokens"], rows)


def from_store(run: Run, prompt: list[int], into: Reused, way: str, folder: Path) -> None:
    """The prompt by new engines on a store of files."""
    model, extent, report, name, *_ = run
    store = folder / name
    store.mkdir()
    storage = {
        "url": f"file:{store}?capacity=4GiB",
        "model": name,
        "weights": "random",
        "store": "write-through",
        "prefetch": "wait-complete",
        "prefetch_nbytes": 8 << 30,
        "threshold_tokens": extent.chunk,
    }
    engine = open_engine(model, extent, 4, storage=storage)
    began = time.perf_counter()
    ask(engine, prompt)
    engine.memory.cache.drain()
    while engine.storing:
        engine.step()
    wrote = time.perf_counter() - began
    engine.close()
    found = []
    for _ in range(1 + min(2, extent.repeats)):
        began = time.perf_counter()
        engine = open_engine(model, extent, 4, storage=storage)
        extent.sync()
        opened = time.perf_counter() - began
        began = time.perf_counter()
        came = ask(engine, prompt).storage_tokens
        extent.sync()
        found.append(time.perf_counter() - began)
        into.nbytes[way] = nbytes_loaded(engine)
        waits = engine.latencies
        parts = {"store_s": waited_s(waits.queue), "load_back_s": waited_s(waits.load_back)}
        print(f"{name}: {way}: " + ", ".join(f"{k} {v:.3f}" for k, v in parts.items()), flush=True)
        report.add("reuse", f"{name}: engine on {way}", open_s=opened, seconds=found[-1], **parts)
        report.expect(f"{name}: {came} tokens came from {way}", met=came > 0)
        if way not in into.answers:
            engine.memory.cache.clear()
            again, into.answers[way] = answer(engine, prompt)
            assert again.storage_tokens == came
        engine.close()
    times = ", ".join(f"{each:.3f}" for each in found)
    print(f"{name}: computed and stored in {wrote:.2f} s; from {way}: {times} s", flush=True)
    into.seconds[way] = statistics.median(found[1:])


def choice(run: Run) -> None:
    """Prefixes on HOST: what load-or-recompute chooses, and what either way takes."""
    model, extent, report, name, *_ = run
    began = time.perf_counter()
    load = Engine.measured_load(model, limits(extent), **pools(extent, 4))
    if load is None:
        print(f"{name}: every load brings a state, and no load is left out for computing")
        return
    took = time.perf_counter() - began
    report.add("choice", f"{name}: load", seconds=took, **load.model_dump())
    print(f"{name}: load={load!r}, measured in {took:.2f} s", flush=True)
    loads, chooses = open_engine(model, extent, 4), open_engine(model, extent, 4, load=load)
    rows = []
    for length in extent.lengths:
        prompt = extent.tokens(model, length + 16)
        chooses.memory.cache.clear()
        ask(chooses, prompt)
        to_host(chooses)
        chose = "load" if ask(chooses, prompt).host_tokens else "compute"
        times, nbytes = from_tiers(extent, loads, prompt, extent.least)
        took, other = times["HOST"], times["computed"]
        if chose == "compute":
            took, other = other, took
        estimates = (
            load.latency_s + nbytes / load.bandwidth_bytes_s,
            load.compute_s(length, 16),
        )
        seconds = (*estimates, times["HOST"], times["computed"])
        rows.append([f"{length}", f"{nbytes:,}", chose, *(f"{1e3 * each:.2f}" for each in seconds)])
        report.add("choice", f"{name}: {length}", chose=chose, nbytes=nbytes, **times)
        what = f"{name}: {length} tokens on HOST: {chose} in {took:.4f} s, not {other:.4f} s"
        report.expect(what, met=took < 1.1 * other, timed=True)
    loads.close()
    chooses.close()
    head = [f"{name}: tokens on HOST", "bytes", "chose", "load, as estimated, ms", "compute"]
    grid([*head, "first token: load, ms", "compute"], rows)


Timer = Callable[[Callable[[], object], Callable[[], object] | None], float]


def from_tiers(
    extent: Extent, engine: Engine, prompt: list[int], timed: Timer
) -> tuple[dict[str, float], int]:
    """Seconds to the first token by where the prompt is; bytes that come from HOST."""
    cache = engine.memory.cache
    times = {"computed": timed(lambda: ask(engine, prompt), cache.clear)}
    times["DEVICE"] = timed(lambda: ask(engine, prompt), None)
    to_host(engine)
    before = nbytes_loaded(engine)
    ask(engine, prompt)
    nbytes = nbytes_loaded(engine) - before
    times["HOST"] = timed(lambda: ask(engine, prompt), lambda: to_host(engine))
    return times, nbytes


def phases(run: Run) -> None:
    """Where the time to the first token goes: before the pass, launching it, waiting for it."""
    model, extent, report, name, *_ = run
    engine = open_engine(model, extent, 4)
    marks: list[float] = []
    hooks = [
        model.register_forward_pre_hook(lambda *_: marks.append(time.perf_counter())),
        model.register_forward_hook(lambda *_: marks.append(time.perf_counter())),
    ]
    rows = []
    for length in (80, 528, extent.prompt):
        prompt = extent.tokens(model, length)
        ways: dict[str, Callable[[], object]] = {
            "computed": engine.memory.cache.clear,
            "DEVICE": lambda: None,
            "HOST": lambda: to_host(engine),
        }
        for way, before in ways.items():
            found = []
            for _ in range(1 + 3 * extent.repeats):
                before()
                extent.sync()
                marks.clear()
                began, cpu = time.perf_counter(), time.thread_time()
                generation = engine.submit(GenerationRequest(prompt, 1, ignore_end=True))
                n_steps = 0
                while generation.finish is None:
                    engine.step()
                    n_steps += 1
                ended, cpu = time.perf_counter(), time.thread_time() - cpu
                inside = sum(b - a for a, b in zip(marks[::2], marks[1::2]))
                found.append((marks[0] - began, inside, ended - marks[-1], ended - began, cpu))
            parts = [statistics.median(each) for each in zip(*found[1:])]
            least = min(each[3] for each in found)
            counts = [f"{n_steps}", f"{len(marks) // 2}"]
            rows.append(
                [f"{length}, {way}", *counts, *(f"{1e3 * each:.2f}" for each in (*parts, least))]
            )
            report.add("phases", f"{name}: {length}, {way}", seconds=parts, counts=counts)
    for hook in hooks:
        hook.remove()
    engine.close()
    head = [f"{name}: tokens, where", "steps", "passes", "before, ms", "launching", "waiting"]
    grid([*head, "in all", "CPU", "least"], rows)


def profile(run: Run) -> None:
    """Profiles of a request behind a short prefix and the long one, and of a decode step."""
    model, extent, *_ = run
    engine = open_engine(model, extent, 4)
    for length in (64, extent.prompt):
        prompt = extent.tokens(model, length + 16)
        for _ in range(3):
            ask(engine, prompt)
        profiled(
            extent, f"one request behind {length} tokens on DEVICE", partial(ask, engine, prompt)
        )
    for _ in range(extent.n_running):
        prompt = extent.tokens(model, extent.short)
        engine.submit(GenerationRequest(prompt, 32, ignore_end=True))
    for _ in range(20):
        engine.step()
    profiled(extent, f"a step of {extent.n_running} requests", engine.step)
    engine.close()


def profiled(extent: Extent, what: str, run: Callable[[], object]) -> None:
    """Print where one run spends its time: operators and kernels of torch, then Python."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if extent.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    print(f"== {what}: {1e3 * extent.once(run):.2f} ms, {1e3 * extent.once(run):.2f} ms")
    with torch.profiler.profile(activities=activities) as found:
        run()
        extent.sync()
    for key in ("self_cpu_time_total", "self_cuda_time_total")[: len(activities)]:
        table = found.key_averages().table(sort_by=key, row_limit=12, max_name_column_width=48)
        print("\n".join(line[:200] for line in table.splitlines()))
    calls = cProfile.Profile()
    calls.runcall(run)
    pstats.Stats(calls, stream=sys.stdout).sort_stats("tottime").print_stats(15)
    sys.stdout.flush()


# -- many at once


class Rates:
    """The findings of `decode`, by way."""

    def __init__(self, name: str, extent: Extent, report: Report) -> None:
        self.name, self.extent, self.report = name, extent, report
        self.n_tokens = extent.n_running * extent.answer
        self.rows: list[list[str]] = []
        self.answers: dict[str, list[list[int]]] = {}

    def add(self, what: str, took: float, step_s: float | None = None) -> None:
        rate = self.n_tokens / took
        self.rows.append([what, f"{rate:,.0f}", f"{1e3 * step_s:.2f}" if step_s else ""])
        print(f"{self.name}: {what}: {rate:,.0f} tokens/s", flush=True)
        self.report.add("decode", f"{self.name}: {what}", tokens_s=rate, step_s=step_s)

    def show(self) -> None:
        extent, of_engine = self.extent, self.answers["kvgraft engine"]
        title = f"{self.name}: {extent.n_running} x {extent.short} + {extent.answer} tokens"
        grid([title, "tokens/s", "ms a step"], self.rows)
        for what, tokens in self.answers.items():
            same = sum(a == b for a, b in zip(tokens, of_engine))
            firsts = sum(a[0] == b[0] for a, b in zip(tokens, of_engine))
            self.report.add("decode", f"{self.name}: as the engine: {what}", n=same, first=firsts)
            print(
                f"{self.name}: {what}: {same} of {len(tokens)} answers are the engine's, {firsts} "
                "first tokens (bfloat16: passes of other shapes round differently)"
            )


def decode(run: Run) -> None:
    """Tokens a second of many running requests, beside transformers' own ways."""
    model, extent, report, name, *_ = run
    prompts = [extent.tokens(model, extent.short) for _ in range(extent.n_running)]
    rates = Rates(name, extent, report)
    rates.answers["kvgraft engine"] = decode_ours(model, extent, prompts, rates, "kvgraft engine")
    unlike = [prompt[: len(prompt) - at] for at, prompt in enumerate(prompts)]
    decode_ours(model, extent, unlike, rates, "kvgraft engine, prompts of unlike lengths")
    decode_theirs(model, extent, prompts, rates)
    rates.show()


def decode_ours(
    model: Any, extent: Extent, prompts: list[list[int]], rates: Rates, what: str
) -> list[list[int]]:
    """By the engine, twice; the first time warms up. The answers."""
    engine = open_engine(model, extent, 8, host_tokens=0)
    for _ in range(2):
        engine.memory.cache.clear()
        steps: list[float] = []
        requests = [GenerationRequest(each, extent.answer, ignore_end=True) for each in prompts]
        generations = [engine.submit(each) for each in requests]
        began = time.perf_counter()
        while not engine.idle:
            step = time.perf_counter()
            if len(engine.step()) == extent.n_running:
                steps.append(time.perf_counter() - step)
        took = time.perf_counter() - began
    rates.add(what, took, statistics.median(steps) if steps else None)
    engine.close()
    return [each.tokens for each in generations]


def decode_theirs(model: Any, extent: Extent, prompts: list[list[int]], rates: Rates) -> None:
    """A plain forward pass, `generate` with either cache, and continuous batching."""
    ids = torch.tensor(prompts, device=extent.device)
    with torch.inference_mode(), cudnn(on=False):
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        step_s = extent.seconds(lambda: model(ids[:, -1:], past_key_values=cache, use_cache=True))
    rates.add("plain forward pass, nothing sampled", step_s * extent.answer, step_s)
    settings = {"max_new_tokens": extent.answer, "do_sample": False, "pad_token_id": 0}
    settings["eos_token_id"] = -1

    def generate(kind: str | None) -> None:
        held = model.generate(
            ids, attention_mask=torch.ones_like(ids), cache_implementation=kind, **settings
        )
        rates.answers[f"generate, {kind or 'dynamic'} cache"] = held[:, extent.short :].tolist()

    def batching() -> None:
        config = GenerationConfig(**settings)
        held = model.generate_batch(prompts, generation_config=config, progress_bar=False)
        rates.answers["continuous batching"] = [each.generated_tokens for each in held.values()]

    attempt("generate, dynamic cache", lambda: generate(None), rates)
    attempt("continuous batching", batching, rates)
    if extent.compiles:
        attempt("generate, static cache", lambda: generate("static"), rates)


def attempt(what: str, run: Callable[[], None], rates: Rates) -> None:
    """Time one of transformers' own ways, twice, or say why it does not run."""
    try:
        with torch.no_grad(), cudnn(on=False):
            rates.extent.once(run)
            rates.add(f"transformers, {what}", rates.extent.once(run))
    except Exception as error:  # noqa: BLE001 - theirs; it is said, and others go on
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.100}"
        rates.rows.append([f"transformers, {what}", "does not run", ""])
        rates.report.add("decode", f"{rates.name}: {what}", error=reason)
        print(f"{rates.name}: {what} does not run: {reason}", flush=True)


PARTS: dict[str, Callable[[Run], None]] = {
    "plain": plain,
    "reuse": reuse,
    "decode": decode,
    "choice": choice,
    "phases": phases,
    "profile": profile,
}
USUAL = [name for name in PARTS if name != "profile"]


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where an expectation is not met."""
    parser = arguments(__doc__)
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=USUAL)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no part afterwards")
    parser.add_argument("--store", type=Path, help="folder for the store; a temporary one")
    parser.add_argument("--json", type=Path, help="write all rows to this file as well")
    chosen = parser.parse_args(given)
    extent = Extent(torch.device(chosen.device))
    if chosen.small:
        sizes = {"prompt": 256, "chunk": 64, "lengths": (64, 256), "n_running": 4}
        extent = Extent(torch.device("cpu"), **sizes, short=32, answer=8, repeats=1)  # type: ignore[arg-type]
    elif chosen.quick:
        extent = extent._replace(repeats=1, lengths=(64, 512, 2048, 8192), compiles=False)
    if extent.device.type != "cpu" and not torch.accelerator.is_available():
        print("skipped: no accelerator; --small runs tiny models on the CPU")
        return 0
    logging.getLogger("transformers").setLevel(logging.ERROR)
    began, report = time.perf_counter(), Report(chosen.json, timed=not chosen.small)
    card = "cpu" if extent.device.type == "cpu" else torch.cuda.get_device_name(extent.device)
    heading(
        "Models of real size on one device",
        clock="wall",
        device=card,
        transformers=transformers.__version__,
        repeats=f"{extent.repeats}, beside the first",
    )
    with contextlib.ExitStack() as entered:
        stores = {
            way: Path(entered.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            for way, folder in (("file", chosen.store), ("file in memory", MEMORY))
            if folder != MEMORY or (MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ENOUGH)
        }
        host = copy_speed(extent)
        disks = {way: read_speed(extent, folder) for way, folder in stores.items()}
        speeds = {"HOST": host, **{way: 1 / (1 / disk + 1 / host) for way, disk in disks.items()}}
        told = {"HOST": host, **disks}
        print(", ".join(f"{way}: {each / 1e9:.1f} GB/s" for way, each in told.items()), flush=True)
        report.add("conditions", card, torch=torch.__version__, **told)
        for name in chosen.models:
            model = build(name, extent, small=chosen.small)
            size = sum(each.numel() for each in model.parameters())
            run = Run(model, extent, report, name, speeds, stores)
            print(f"{name}: {size:,} parameters", flush=True)
            for part in chosen.parts:
                passed = time.perf_counter() - began
                print(f"-- {name}, {part}, at {passed:.0f} s", flush=True)
                if passed > chosen.seconds:
                    print("left out: too late")
                    continue
                report.run(f"{name}: {part}", partial(PARTS[part], run))
                gc.collect()
            del model, run
    for each in report.failed:
        print(f"NOT MET: {each}")
    print(f"{len(report.failed)} expectations not met, {time.perf_counter() - began:.0f} s")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
