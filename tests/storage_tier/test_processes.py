"""Caches in several processes over one directory, killed, damaged and short of room (S9, S10).

Every process compares every byte it reads with the byte it computed.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvgraft import TokenKey
from kvgraft_file import FileOptions
from kvgraft_storage.settings import PrefetchPolicy

from ..commands import KVGRAFT, ROOT, Forked, run_forked
from .serving_process import SETUP, SIZES
from .shelf import settings, tier_of

TINY = "capacity=1MiB&segment=128KiB&refresh_s=0"
ROOMY = "capacity=64MiB&segment=1MiB&refresh_s=0"


def serving(directory: Path, sizes: str, seed: int, n_requests: int, *more: str | Path) -> Forked:
    """A process that serves."""
    url = f"file:{directory}?{sizes}"
    program = ("-m", "tests.storage_tier.serving_process")
    return Forked(*program, url, str(seed), str(n_requests), *more, cwd=ROOT)


def outcome(process: Forked) -> dict[str, int]:
    """Its counts; it must have ended well."""
    done = process.ended(250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def expect_clean(directory: Path, sizes: str = TINY) -> None:
    done = run_forked(KVGRAFT, "storage", "verify", f"file:{directory}?{sizes}")
    assert done.returncode == 0, done.stdout
    used = sum(path.stat().st_size for path in directory.glob("*.kvseg"))
    assert used <= FileOptions.model_validate(dict(_pairs(sizes))).capacity


def _pairs(sizes: str) -> Sequence[tuple[str, str]]:
    return [(name, value) for name, _, value in (each.partition("=") for each in sizes.split("&"))]


def together(directory: Path, n_processes: int, n_requests: int) -> None:
    """They evict each other's segments all the time, and find each other's data."""
    running = [serving(directory, TINY, seed, n_requests) for seed in range(n_processes)]
    counts = [outcome(process) for process in running]
    for count in counts:
        failures = {name for name in count if name.endswith((".errors", ".timeouts", ".stale"))}
        assert not failures, count
        assert not count.get("get.corrupt"), count
        assert count["gained"], count
    expect_clean(directory)


def test_two_caches_serve_and_evict_in_one_directory(tmp_path: Path) -> None:
    together(tmp_path, 2, 60)


@pytest.mark.long
def test_four_caches_serve_and_evict_in_one_directory(tmp_path: Path) -> None:
    together(tmp_path, 4, 2000)


def gained(directory: Path, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens that a cache opened anew gets back of some prompts."""
    given = settings(
        url=f"file:{directory}?{ROOMY}", prefetch=PrefetchPolicy.WAIT_COMPLETE, deadline_s=30
    )
    cache = SETUP.open(storage=given, **SIZES)  # type: ignore[arg-type]
    try:
        found = []
        for prompt in prompts:
            prefetch = tier_of(cache).prefetch(TokenKey(prompt))
            assert cache.drain()
            found.append(prefetch.tokens)
            cache.abort(cache.begin(prefetch.key, prefetch=prefetch))
        return found
    finally:
        cache.close()


def kill_again_and_again(place: Path, kills: int) -> None:
    """One process serves all along; another one is killed in the middle of storing."""
    directory = place / "store"
    directory.mkdir()
    chance = random.Random(kills)
    survivor = serving(directory, ROOMY, 1000, 40 * kills)
    durable: dict[str, None] = {}
    for seed in range(kills):
        flushed = place / f"flushed-{seed}"
        flushed.touch()
        victim = serving(directory, ROOMY, seed, 10_000, flushed)
        end = time.monotonic() + 60
        while not flushed.stat().st_size:
            assert time.monotonic() < end, "it flushed nothing"
            time.sleep(0.01)
        time.sleep(chance.random() * 0.05)
        victim.kill()
        assert victim.ended(60).returncode == -signal.SIGKILL
        lines = flushed.read_text().splitlines(keepends=True)
        durable |= dict.fromkeys(line for line in lines if line.endswith("\n"))
    assert outcome(survivor)["served"] == 40 * kills
    prompts = [json.loads(line) for line in durable]
    assert prompts
    assert gained(directory, prompts) == [len(prompt) - 1 for prompt in prompts]
    expect_clean(directory, ROOMY)


def test_a_process_is_killed_again_and_again_and_its_flushed_records_are_there(
    tmp_path: Path,
) -> None:
    kill_again_and_again(tmp_path, 2)


@pytest.mark.long
def test_a_process_is_killed_many_times(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 40)
