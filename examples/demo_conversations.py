"""Conversations of the demonstration: their texts, models and pools."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import kvgraft
from kvgraft import Direction
from kvgraft_replay.report import ReplayResult
from kvgraft_replay.report.counts import cache_counts, storage_counts
from kvgraft_replay.report.schema import Source, TimelinePoint, TreeSnapshot
from kvgraft_replay.timeline import occupancy, snapshot
from kvgraft_storage.tier import StorageTier
from kvgraft_transformers.engine import (
    Engine,
    EngineSettings,
    FinishReason,
    Generation,
    GenerationRequest,
)
from kvgraft_transformers.tiny import build_tiny_model
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

__all__ = [
    "CONVERSATIONS",
    "SHOWS",
    "SYSTEM",
    "TURNS",
    "Again",
    "Conversations",
    "Progress",
    "Show",
    "report",
    "talk_again",
]

CONVERSATIONS, TURNS, ANSWER = 10, 4, 24
PAGE, CHUNK = 16, 64
LIMITS = EngineSettings(chunk_tokens=CHUNK, step_tokens=192, max_running=8, reserve_tokens=1)

POLICIES = {"prefetch": "wait-complete", "threshold_tokens": 2 * PAGE}
"""Data used a second time is stored; the disk's speed decides nothing."""

SYSTEM = (
    "You are a librarian. You know where every book stands, who borrowed it, and when it is due; "
    "you answer in one sentence and never guess. If you do not know a title, you say so and ask "
    "for the author, the year or the colour of its cover.",
    "You are a station master. You know every train, its platform and its delay; you answer with "
    "the time first and the platform second. If a train does not run today you say so at once and "
    "name the next one that does.",
)
QUESTIONS = (
    "Where do I find the red one about tides?",
    "And if it is not there, who has it?",
    "Is there anything later than nine in the evening?",
    "Which one would you take with two heavy bags?",
    "Thank you. Could you repeat the first part?",
)


@dataclass(frozen=True)
class Show:
    """One architecture and the pools it gets.

    Attributes:
        family: of `kvgraft_transformers.tiny`.
        about: its kinds of layers.
        memory: settings of its pools.
    """

    family: str
    about: str
    memory: dict[str, Any]

    def open(self, storage: str) -> Engine:
        """An engine over the model, in double precision and under the guard.

        Args:
            storage: URL of the store.
        """
        return Engine.open(
            build_tiny_model(self.family, dtype=torch.float64),
            LIMITS,
            page_size=PAGE,
            load=None,
            decode_interval_tokens=PAGE,
            guard="on",
            storage={"url": storage, **POLICIES},
            **self.memory,
        )


SHOWS = (
    Show(
        "gemma3_text",
        "full + window",
        {"device_tokens": 1600, "host_tokens": 8192, "components": {"swa": {"device_tokens": 416}}},
    ),
    Show(
        "lfm3",
        "full + window + conv",
        {
            "device_tokens": 1600,
            "host_tokens": 8192,
            "components": {
                "swa": {"device_tokens": 416},
                "mamba": {"states": 16, "host_states": 64},
            },
        },
    ),
    Show(
        "qwen3_next",
        "full + deltanet",
        {
            "device_tokens": 1600,
            "host_tokens": 8192,
            "components": {"mamba": {"states": 16, "host_states": 64}},
        },
    ),
    Show(
        "deepseek_v32",
        "host K/V, sparse",
        {
            "device_tokens": 1600,
            "host_tokens": 8192,
            "sparse_on_host": True,
            "components": {"hisparse": {"max_running": 8, "hot_tokens": 64}},
        },
    ),
)


class Again(NamedTuple):
    """The result of a process that began with only the store.

    Attributes:
        family: the architecture.
        answers, wrong: how many there were, and those that a full recompute contradicts.
        prompt_tokens, storage_tokens: of its prompts, and those of them that came from storage.
        seconds: from the first prompt to the last answer.
    """

    family: str
    answers: int
    wrong: int
    prompt_tokens: int
    storage_tokens: int
    seconds: float


@dataclass
class Progress:
    """One architecture's results so far; the table's row and the report's data.

    Attributes:
        prompts: the newest of each conversation.
        again: the answers of a process that began cold; None while it has not.
    """

    show: Show
    seconds: float = 0.0
    answers: int = 0
    wrong: int = 0
    engine: Engine | None = None
    sources: list[Source] = field(default_factory=list)
    points: list[TimelinePoint] = field(default_factory=list)
    tree: TreeSnapshot = field(default_factory=lambda: TreeSnapshot(nodes=[], truncated=0))
    prompts: dict[int, list[int]] = field(default_factory=dict)
    again: Again | None = None

    def fired(self) -> dict[str, int]:
        """How often each mechanism was used."""
        if self.engine is None:
            return {}
        cache, totals = self.engine.memory.cache, self.engine.totals
        counts = {
            "device hits": totals.cached_tokens - totals.host_tokens,
            "host hits": totals.host_tokens,
            "load-backs": cache.journal.counters[Direction.LOAD_BACK].completed,
            "stores": tier_of(self.engine).storing.counts["slots"],
        }
        for component in cache.tree.components:
            counts[f"{component.name} evicted"] = sum(component.device.evicted.values())
        for component in cache.tree.components[1:]:
            alone = {str(cause): n for cause, n in component.device.evicted.items()}
            counts[f"{component.name} alone"] = alone.get("demoted", 0)
        return counts


def tier_of(engine: Engine) -> StorageTier:
    """The storage tier an engine was opened with."""
    assert isinstance(engine.memory.cache.storage, StorageTier)
    return engine.memory.cache.storage


def recomputed(engine: Engine, generation: Generation) -> list[int]:
    """The answer if the whole conversation is computed again, at once and without a cache."""
    prompt = list(generation.request.tokens)
    whole = torch.tensor(prompt + generation.tokens)[None]
    with torch.no_grad():
        logits = engine.model(input_ids=whole, use_cache=False).logits[0]
    tokens: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return tokens


def talk_again(show: Show, storage: str, prompts: Sequence[Sequence[int]]) -> Again:
    """Answer prompts with empty pools, and compare each answer with a full recompute."""
    engine = show.open(storage)
    began = time.monotonic()
    generations = engine.generate(
        GenerationRequest(prompt, ANSWER, ignore_end=True) for prompt in prompts
    )
    seconds = time.monotonic() - began
    wrong = sum(recomputed(engine, each) != each.tokens for each in generations)
    totals = engine.totals
    engine.close()
    return Again(
        family=show.family,
        answers=len(generations),
        wrong=wrong,
        prompt_tokens=totals.prompt_tokens,
        storage_tokens=totals.storage_tokens,
        seconds=seconds,
    )


class Conversations:
    """Ten conversations with one model, each going on as soon as it has its answer.

    Args:
        progress: told what happens.
        storage: URL of the store.
    """

    def __init__(self, progress: Progress, storage: str) -> None:
        self.progress = progress
        self.tokenizer = build_tiny_tokenizer()
        self.engine = progress.engine = progress.show.open(storage)
        self.tokens: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
        self.talking: dict[Generation, int] = {}
        self.began = time.monotonic()

    def run(self) -> Iterator[None]:
        """One step of the engine at a time."""
        for number in range(CONVERSATIONS):
            self.ask(number, 0)
        turns = [0] * CONVERSATIONS
        while not self.engine.idle:
            for new in self.engine.step():
                if new.finish is None:
                    continue
                number = self.talking.pop(new.generation)
                self.check(new.generation, new.finish)
                turns[number] += 1
                self.tokens[number] += new.generation.tokens
                if turns[number] < TURNS:
                    self.ask(number, turns[number])
            self.progress.seconds = time.monotonic() - self.began
            yield
        cache = self.engine.memory.cache
        cache.drain()
        cache.check_integrity()

    def ask(self, number: int, turn: int) -> None:
        """The next question of a conversation, behind all that was said."""
        question = f"({number}) {QUESTIONS[(turn + number) % len(QUESTIONS)]}"
        if turn == 0:
            text = f"<|system|>{SYSTEM[number % len(SYSTEM)]}<|end|>"
            self.tokens[number] = self.tokenizer(text)["input_ids"]
        said = self.tokenizer(f"<|user|>{question}<|end|><|assistant|>")["input_ids"]
        self.tokens[number] = self.tokens[number] + said
        self.progress.prompts[number] = self.tokens[number]
        request = GenerationRequest(self.tokens[number], ANSWER, ignore_end=True)
        self.talking[self.engine.submit(request)] = number

    def check(self, generation: Generation, finish: FinishReason) -> None:
        """Compare an answer with the model's without a cache."""
        assert finish is FinishReason.LENGTH, finish
        self.progress.answers += 1
        self.progress.wrong += recomputed(self.engine, generation) != generation.tokens
        self.note(generation)

    def note(self, generation: Generation) -> None:
        """A row of the report."""
        progress, cached = self.progress, generation.cached_tokens or 0
        now_s = time.monotonic() - self.began
        source: Source = {
            "index": progress.answers - 1,
            "time_s": now_s,
            "device": cached - generation.host_tokens,
            "host": generation.host_tokens - generation.storage_tokens,
            "storage": generation.storage_tokens,
            "computed": generation.prompt_tokens - cached,
            "unserved": 0,
        }
        progress.sources.append(source)
        totals, schedule = self.engine.totals, self.engine.schedule
        progress.points.append(
            {
                "time_s": now_s,
                "requests": 1,
                "token_hit_rate": cached / generation.prompt_tokens,
                "storage_hit_rate": generation.storage_tokens / generation.prompt_tokens,
                "cumulative_hit_rate": totals.cached_tokens / totals.prompt_tokens,
                "running": len(schedule.running) + len(schedule.loading),
                "waiting": len(schedule.waiting),
                "occupancy": occupancy(self.engine.memory.cache),
            }
        )
        tree = snapshot(self.engine.memory.cache)
        if len(tree["nodes"]) >= len(progress.tree["nodes"]):
            progress.tree = tree


def report(row: Progress) -> ReplayResult:
    """The results, in the form that every report reads."""
    engine = row.engine
    assert engine is not None
    cache, totals = engine.memory.cache, engine.totals
    prompt_tokens = totals.prompt_tokens
    return {
        "kvgraft": kvgraft.__version__,
        "computed_tokens_p90": 0,
        "workload": {
            "name": f"{row.show.family}: {row.show.about}",
            "format": "demo",
            "requests": row.answers,
            "input_tokens": prompt_tokens,
            "output_tokens": totals.generated_tokens,
        },
        "settings": {
            "page_size": PAGE,
            "chunk_tokens": CHUNK,
            "max_running": LIMITS.max_running,
            "reserve_tokens": LIMITS.reserve_tokens,
            **{name: value for name, value in row.show.memory.items() if name != "components"},
            "components": engine.memory.architecture.components,
            "eviction_policy": engine.memory.cache.config.policy,
        },
        "notices": [],
        "requests": row.answers,
        "served": row.answers,
        "input_tokens": prompt_tokens,
        "output_tokens": totals.generated_tokens,
        "token_hit_rate": totals.cached_tokens / prompt_tokens,
        "hit_tokens": {
            "device": totals.cached_tokens - totals.host_tokens,
            "host": totals.host_tokens - totals.storage_tokens,
            "storage": totals.storage_tokens,
        },
        "saved_tokens": totals.cached_tokens,
        "computed_tokens": prompt_tokens - totals.cached_tokens,
        "unserved_tokens": 0,
        "recomputed_tokens": 0,
        "namespaces": {},
        **cache_counts(cache),
        "storage": storage_counts(cache, None),
        "admissions": totals.admissions,
        "deferrals": totals.deferrals,
        "retractions": totals.retractions,
        "rejections": totals.rejected,
        "out_of_memory": 0,
        "payload_mismatches": row.wrong,
        "payloads_verified": row.answers,
        "ledger_violations": 0,
        "first_problem": "",
        "cpu_us_per_request": {},
        "wall_s": row.seconds,
        "virtual_s": row.seconds,
        "timeline": row.points,
        "sources": row.sources,
        "tree": row.tree,
    }
