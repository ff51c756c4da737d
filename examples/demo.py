"""`make demo`: every mechanism of the cache, first one by one, then under real pressure.

Part one walks a single conversation through a cache of three kinds of attention and says what
happens. Part two replays a synthetic agents workload through pools so small that everything has to
happen, checks every byte that is reused, and writes a report.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule

from kvgraft import Cache, Tier, TokenKey
from kvgraft.cli.replay import run_with_progress
from kvgraft.replay.engine import EngineModel
from kvgraft.replay.replay import ReplaySettings
from kvgraft.replay.synthetic import synthetic_workload
from kvgraft.report import ReplayResult, print_tables, write_html
from kvgraft.request import Request

PAGE = 64
COMPONENTS = {"full": {}, "swa": {"window": 1024}, "mamba": {"states": 40, "host_states": 400}}


class Walkthrough:
    """One conversation, step by step."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.cache = Cache.open(
            {"full": {}, "swa": {"window": 256}, "mamba": {"states": 8, "host_states": 16}},
            page_size=PAGE,
            device_tokens=4096,
            host_tokens=16384,
            load=None,
        )

    def say(self, text: str) -> None:
        self.console.print(Padding(text, (0, 0, 0, 2)), highlight=False)

    def run(self) -> None:
        self.console.print(Rule("1. One conversation, step by step", align="left"))
        for track in self.cache.tree.tracks:
            self.say(
                f"[bold]{track.name}[/]: needs {track.reach}; {track.device.capacity} slots on "
                f"the device, {track.host.capacity if track.host else 0} on the host"
            )
        self.first_turn()
        self.second_turn()
        self.window_pressure()
        self.host_round_trip()
        self.cache.check_integrity()
        self.say("all books recomputed from the tree: they balance")
        self.cache.close()

    def serve(self, key: TokenKey, reserve: int = 0) -> Request:
        """Everything an engine does for a request, but the model."""
        cache = self.cache
        request = cache.begin(key, reserve=reserve, chunk=512)
        decision = cache.admit(request)
        assert decision.admitted, decision
        cache.load_back(request)
        cache.drain()
        while request.computed < request.prompt:
            tokens = cache.next_chunk(request)
            assert cache.allocate(request, tokens)
            cache.computed(request, tokens)
            cache.checkpoint(request)
        return request

    def first_turn(self) -> None:
        self.key = TokenKey(range(1000), namespace="demo")
        request = self.cache.begin(self.key, reserve=32, chunk=512)
        self.say(f"[cyan]match[/] 1000 tokens: anchor {request.anchor_tokens}, a miss")
        decision = self.cache.admit(request)
        needs = ", ".join(
            f"{track.name} {demand.now}+{demand.later}"
            for track, demand in zip(self.cache.tree.tracks, request.demands)
        )
        self.say(f"[cyan]admit[/]: slots now + later: {needs}: {decision}")
        self.cache.abort(request)
        request = self.serve(self.key, reserve=32)
        window = self.cache.table(request, "swa")
        self.say(
            f"[cyan]prefill[/] in chunks of 512, checkpoint after each; behind the window "
            f"{int((window < 0).sum())} of {len(window)} swa pages are not held any more"
        )
        for token in range(32):
            self.key.extend([9000 + token])
            assert self.cache.allocate(request, 1)
            self.cache.computed(request, 1)
        kept = self.cache.finish(request)
        self.cache.drain()
        self.say(f"[cyan]decode[/] 32 tokens, [cyan]finish[/]: {kept} tokens stay, backed up")

    def second_turn(self) -> None:
        self.key.extend(range(2000, 2300))
        request = self.serve(self.key)
        self.say(
            f"[cyan]next turn[/]: resumes at {request.anchor_tokens} of {request.prompt} tokens, "
            "its state a copy (copy on write)"
        )
        self.cache.finish(request)
        self.cache.drain()

    def window_pressure(self) -> None:
        before = self.on_device()
        self.cache.evict("mamba", 4)
        gone = {name: count - self.on_device()[name] for name, count in before.items()}
        left = ", ".join(f"{name} {count}" for name, count in gone.items())
        self.say(
            f"[cyan]evict[/] states under pressure; slots gone: {left} (inside the tree only "
            "states go, at a leaf everything does)"
        )
        self.say("[cyan]explain[/] the same prompt now:")
        for line in str(self.cache.explain(self.key)).splitlines():
            self.say(" " + line)

    def on_device(self) -> dict[str, int]:
        """Slots of each component that the tree holds on the device."""
        return {
            track.name: track.device.evictable + track.device.pinned
            for track in self.cache.tree.tracks
        }

    def host_round_trip(self) -> None:
        freed = self.cache.evict("full", 1000)
        self.say(f"[cyan]evict[/] the rest: {freed} more pages demoted to the host")
        request = self.cache.begin(self.key)
        host = request.anchor_tokens - request.device_tokens
        slots = ", ".join(
            f"{track.name} {count}"
            for track, count in zip(self.cache.tree.tracks, request.host_slots)
        )
        self.say(f"[cyan]match[/] again: {host} tokens on the host; load-back takes slots {slots}")
        assert self.cache.admit(request).admitted
        self.cache.load_back(request)
        self.cache.drain()
        self.say(f"[cyan]load-back[/] acknowledged: ready {request.ready}")
        self.cache.abort(request)
        freed = self.cache.evict("full", 1000, Tier.HOST)
        self.say(f"[cyan]host eviction[/]: {freed} pages leave the host, the device keeps its own")


def fired(result: ReplayResult) -> dict[str, int]:
    """How often each mechanism was used."""
    evictions = result["evictions"]
    return {
        "prefix hits on the device": result["hit_tokens"]["device"],
        "prefix hits on the host": result["hit_tokens"]["host"],
        "load-backs": result["load_backs"]["completed"],
        "backups": result["backups"]["completed"],
        "pages demoted to the host": evictions["full"]["device"]["demoted"],
        "windows evicted on their own": evictions["swa"]["device"]["demoted"],
        "states evicted on their own": evictions["mamba"]["device"]["demoted"],
        "pages evicted from the host": evictions["full"]["host"]["deleted"],
        "copies on write": result["copies_on_write"],
        "checkpoints": result["checkpoints"],
        "requests deferred": result["deferrals"],
        "requests retracted": result["retractions"],
    }


def pressure(console: Console, report: Path) -> int:
    """Replay the workload; the exit status."""
    console.print(Rule("2. Agents, in pools that are too small", align="left"))
    workload = synthetic_workload("agents", requests=400, seed=0)
    settings = ReplaySettings(
        cache={
            "components": {**COMPONENTS, "swa": {"window": 1024, "device_tokens": 45_000}},
            "page_size": PAGE,
            "device_tokens": 250_000,
            "host_tokens": 500_000,
            "load": None,
        },
        model=EngineModel(
            prefill_tokens_s=60_000.0, decode_tokens_s=20.0, max_running=48, reserve_tokens=0
        ),
    )
    console.print(
        f"  {workload.totals.requests} requests of coding agents, "
        f"{workload.totals.input_tokens:,} input tokens; every slot that is reused is compared "
        "byte by byte",
        highlight=False,
    )
    result = run_with_progress(workload, settings, Console(stderr=True))
    print_tables(result, console)
    console.print(Rule("3. What happened", align="left"))
    counts = fired(result)
    for name, count in counts.items():
        mark = "[green]yes[/]" if count else "[red]no [/]"
        console.print(f"  {mark} {name}: {count:,}", highlight=False)
    write_html(result, report)
    console.print(f"\n  report: {report}", highlight=False, soft_wrap=True)
    wrong = [
        name
        for name in ("out_of_memory", "payload_mismatches", "ledger_violations")
        if result[name]  # type: ignore[literal-required]
    ]
    return 1 if wrong or not all(counts.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--html", type=Path, default=Path("kvgraft-demo.html"), help="where the report goes"
    )
    arguments = parser.parse_args()
    console = Console()
    Walkthrough(console).run()
    return pressure(console, arguments.html)


if __name__ == "__main__":
    sys.exit(main())
