"""`make demo`: conversations with real architectures, in pools that are far too small.

Ten conversations of five turns over two shared system prompts talk to tiny models with random
weights. Everything has to happen: prefixes go to the host and come back, windows and states are
evicted on their own, requests wait and make room for one another. Every answer is compared, token
by token, with what the model says when it computes everything again; in double precision, so that
nothing is left to rounding.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

import kvgraft
from kvgraft import Direction
from kvgraft.replay.timeline import occupancy, snapshot
from kvgraft.report import ReplayResult, write_html
from kvgraft.report.counts import cache_counts
from kvgraft.report.schema import Source, TimelinePoint, TreeSnapshot
from kvgraft_transformers.engine import (
    Engine,
    EngineSettings,
    FinishReason,
    Generation,
    GenerationRequest,
)
from kvgraft_transformers.tiny import build_tiny_model
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

CONVERSATIONS, TURNS, ANSWER = 10, 5, 24
PAGE, CHUNK = 16, 64
LIMITS = EngineSettings(chunk_tokens=CHUNK, step_tokens=192, max_running=8, reserve_tokens=1)

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


@dataclass
class Progress:
    """What is known of one architecture so far; the table's row and the report's data."""

    show: Show
    seconds: float = 0.0
    answers: int = 0
    wrong: int = 0
    engine: Engine | None = None
    sources: list[Source] = field(default_factory=list)
    points: list[TimelinePoint] = field(default_factory=list)
    tree: TreeSnapshot = field(default_factory=lambda: TreeSnapshot(nodes=[], truncated=0))

    def fired(self) -> dict[str, int]:
        """How often each mechanism was used."""
        if self.engine is None:
            return {}
        cache, totals = self.engine.memory.cache, self.engine.totals
        counts = {
            "device hits": totals.cached_tokens - totals.host_tokens,
            "host hits": totals.host_tokens,
            "load-backs": cache.journal.counters[Direction.LOAD_BACK].completed,
        }
        for track in cache.tree.tracks:
            counts[f"{track.name} evicted"] = sum(track.device_evictions.values())
        for track in cache.tree.tracks[1:]:
            alone = {str(cause): n for cause, n in track.device_evictions.items()}
            counts[f"{track.name} alone"] = alone.get("demoted", 0)
        return counts


class Conversations:
    """Ten conversations with one model, each going on as soon as it has its answer."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        show = progress.show
        self.tokenizer = build_tiny_tokenizer()
        self.model = build_tiny_model(show.family, dtype=torch.float64)
        self.engine = progress.engine = Engine.open(
            self.model, LIMITS, page_size=PAGE, load=None, guard="on", **show.memory
        )
        self.history = [
            [{"role": "system", "content": SYSTEM[number % len(SYSTEM)]}]
            for number in range(CONVERSATIONS)
        ]
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
        request = GenerationRequest(self.tokens[number], ANSWER, ignore_end=True)
        self.talking[self.engine.submit(request)] = number

    def check(self, generation: Generation, finish: FinishReason) -> None:
        """Compute the whole conversation again, at once and without a cache."""
        assert finish is FinishReason.LENGTH, finish
        prompt = list(generation.request.tokens)
        whole = torch.tensor(prompt + generation.tokens)[None]
        with torch.no_grad():
            logits = self.model(input_ids=whole, use_cache=False).logits[0]
        said = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        self.progress.answers += 1
        self.progress.wrong += said != generation.tokens
        self.note(generation)

    def note(self, generation: Generation) -> None:
        """A row of the report."""
        progress, cached = self.progress, generation.cached_tokens or 0
        now_s = time.monotonic() - self.began
        source: Source = {
            "index": progress.answers - 1,
            "time_s": now_s,
            "device": cached - generation.host_tokens,
            "host": generation.host_tokens,
            "computed": generation.prompt_tokens - cached,
        }
        progress.sources.append(source)
        totals, schedule = self.engine.totals, self.engine.schedule
        progress.points.append(
            {
                "time_s": now_s,
                "requests": 1,
                "token_hit_rate": cached / generation.prompt_tokens,
                "cumulative_hit_rate": totals.cached_tokens / totals.prompt_tokens,
                "running": len(schedule.running) + len(schedule.loading),
                "waiting": len(schedule.waiting),
                "occupancy": occupancy(self.engine.memory.cache),
            }
        )
        tree = snapshot(self.engine.memory.cache)
        if len(tree["nodes"]) >= len(progress.tree["nodes"]):
            progress.tree = tree


def overview(rows: list[Progress]) -> Table:
    """The live table: 80 columns are enough for it."""
    table = Table(
        title=f"{CONVERSATIONS} conversations x {TURNS} turns over {len(SYSTEM)} system prompts",
        caption="evicted: slots, and those that went while the rest of their page stayed\n"
        "waited: tries of requests that did not fit yet; retr.: requests that made room",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("architecture", no_wrap=True)
    for name in ("right", "hits (host) %", "evicted (alone)", "waited", "retr.", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.engine is None:
            table.add_row(f"{row.show.family}\n[dim]{row.show.about}[/]", *[""] * 6)
            continue
        totals = row.engine.totals
        prompt_tokens = max(totals.prompt_tokens, 1)
        fired = row.fired()
        evicted = []
        for track in row.engine.memory.cache.tree.tracks:
            alone = fired.get(f"{track.name} alone")
            some = "" if alone is None else f" ({alone})"
            evicted.append(f"{track.name} {fired[f'{track.name} evicted']}{some}")
        mark = "red" if row.wrong else "green"
        table.add_row(
            f"{row.show.family}\n[dim]{row.show.about}[/]",
            f"[{mark}]{row.answers - row.wrong}/{row.answers}[/]",
            f"{100 * totals.cached_tokens / prompt_tokens:.1f} "
            f"({100 * totals.host_tokens / prompt_tokens:.1f})",
            "\n".join(evicted),
            str(totals.deferrals),
            str(totals.retractions),
            f"{row.seconds:.0f} s",
        )
    return table


def report(row: Progress) -> ReplayResult:
    """What happened, in the shape every report reads."""
    engine = row.engine
    assert engine is not None
    cache, totals = engine.memory.cache, engine.totals
    prompt_tokens = totals.prompt_tokens
    return {
        "kvgraft": kvgraft.__version__,
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
        },
        "requests": row.answers,
        "input_tokens": prompt_tokens,
        "output_tokens": totals.generated_tokens,
        "token_hit_rate": totals.cached_tokens / prompt_tokens,
        "hit_tokens": {
            "device": totals.cached_tokens - totals.host_tokens,
            "host": totals.host_tokens,
        },
        "saved_tokens": totals.cached_tokens,
        "computed_tokens": prompt_tokens - totals.cached_tokens,
        "component_hits": {
            name: {"device_slots": device, "host_slots": host}
            for name, (device, host) in totals.hit_slots.items()
        },
        **cache_counts(cache),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--html", type=Path, default=Path(), help="directory for the reports, one per model"
    )
    parser.add_argument(
        "--model",
        action="append",
        choices=[show.family for show in SHOWS],
        help="only this architecture; may be given more than once",
    )
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()  # missing kernels for GPUs are no news here
    torch.set_num_threads(1)  # products of this size are faster on one
    console = Console()
    wanted = arguments.model or [show.family for show in SHOWS]
    arguments.html.mkdir(parents=True, exist_ok=True)
    rows = [Progress(show) for show in SHOWS if show.family in wanted]
    with Live(overview(rows), console=console, refresh_per_second=8) as live:
        for row in rows:
            for _ in Conversations(row).run():
                live.update(overview(rows))
    console.print()
    fired: dict[str, int] = {}
    for row in rows:
        assert row.engine is not None
        for name, count in row.fired().items():
            fired[name] = fired.get(name, 0) + count
        path = arguments.html / f"kvgraft-demo-{row.show.family}.html"
        write_html(report(row), path)
        console.print(f"report: {path}", highlight=False, soft_wrap=True)
        row.engine.close()
    idle = [name for name, count in fired.items() if not count]
    for row in rows:
        if row.engine is not None and row.engine.memory.sparse is not None:
            console.print(
                f"{row.show.family} fetched {row.engine.totals.rows_moved:,} rows from the host; "
                f"attention over everything would have fetched {row.engine.totals.rows_dense:,}",
                highlight=False,
            )
    wrong = sum(row.wrong for row in rows)
    answers = sum(row.answers for row in rows)
    console.print(
        f"{answers - wrong} of {answers} answers are, token by token, what the model says without "
        "a cache",
        highlight=False,
    )
    if idle:
        console.print(f"[yellow]did not happen[/]: {', '.join(idle)}", highlight=False)
    return 1 if wrong or idle else 0


if __name__ == "__main__":
    sys.exit(main())
