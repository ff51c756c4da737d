"""A writer that is killed leaves nothing wrong, and all that it acknowledged as durable (S9)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvgraft_storage import Status, Storage
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, stored
from tests.commands import ROOT, run

from .store import open_store, segments


def crash(
    directory: Path, rounds: int, seed: int, module: str = "plugins.file.tests.crashing"
) -> dict[str, int]:
    done = run(
        *(sys.executable, "-m", module, directory, str(rounds), str(seed)),
        cwd=ROOT,
        timeout_s=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_twenty_writers_are_killed_in_the_middle_of_writing(tmp_path: Path) -> None:
    counts = crash(tmp_path, 20, seed=1)
    assert counts["durable"] > 100
    left = list(tmp_path.glob(".*.tmp"))
    store = open_store(tmp_path)
    report = store.verify()
    assert report.n_records >= counts["durable"]
    store.close()
    assert len(left) <= 1


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_writers_are_killed_in_the_middle_of_writing(tmp_path: Path, seed: int) -> None:
    """400 of them; in four directories, for opening takes longer the more there is."""
    assert crash(tmp_path, 100, seed)["durable"] > 500


@pytest.mark.parametrize(
    ("rounds", "seed"),
    [(12, 1), *(pytest.param(200, seed, marks=pytest.mark.long) for seed in (2, 3))],
)
def test_writers_are_killed_in_the_middle_of_writing_over_records(
    tmp_path: Path, rounds: int, seed: int
) -> None:
    counts = crash(tmp_path, rounds, seed, "plugins.file.tests.overwriting")
    assert counts["stored"] >= 2 * rounds
    assert counts["torn"] >= rounds // 4


def test_the_next_opener_seals_the_segment_of_an_ended_writer(tmp_path: Path) -> None:
    crash(tmp_path, 1, seed=3)
    before = sum(path.stat().st_size for path in segments(tmp_path))
    store = open_store(tmp_path)
    used = store.stats().nbytes
    assert all(path.stat().st_size % 4096 == 0 for path in segments(tmp_path))
    assert used <= before
    store.close()


def test_a_record_torn_at_any_block_is_a_miss_and_the_next_ones_are_found(tmp_path: Path) -> None:
    places = addresses(3)
    for block in range(6):
        directory = tmp_path / str(block)
        directory.mkdir()
        storage = Storage(FINGERPRINT, open_store(directory))
        assert stored(storage, places, 20_000) == [Status.OK] * 3
        storage.close()
        (path,) = segments(directory)
        with path.open("r+b") as file:  # record 1 begins behind the segment's block and record 0
            file.seek(4096 * (1 + 6 + block))
            file.write(bytes(4096))
        storage = Storage(FINGERPRINT, open_store(directory))
        wrong = Status.MISS if block == 0 else Status.CORRUPT
        assert fetched(storage, places, 20_000) == [Status.OK, wrong, Status.OK]
        storage.close()
