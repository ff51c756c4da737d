"""A cache over a directory that fills up, fails, is taken away or damaged (S9, S10)."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvgraft import GuardMode
from kvgraft_file import FileBackend, FileOptions
from kvgraft_file.disk import DiskFile
from kvgraft_storage import Status, StorageBackend, Value, open_storage
from kvgraft_storage.payload import encode_header

from ..commands import ROOT, run_forked
from ..serving.server import Server
from ..serving.setups import installed
from .shelf import addresses, open_cache, settings
from .test_processes import TINY
from .troubles import DEADLINE_S, PROMPTS, Traffic, traffic_over

HYBRID = installed("full", "swa", "mamba")
SMALL = {"device_tokens": 64, "host_tokens": 128}
NOBODY = 65534
FRESH = [*range(1500, 1521)]


def traffic_on(
    directory: Path, sizes: str = "capacity=4MiB&segment=256KiB&refresh_s=0", seed: int = 0
) -> AbstractContextManager[Traffic]:
    """Traffic over the file backend."""

    def opened(clock: Callable[[], float]) -> StorageBackend:
        return open_storage(f"file:{directory}?{sizes}")

    return traffic_over(HYBRID, settings(deadline_s=DEADLINE_S), opened, seed, **SMALL)


def serve_all(traffic: Traffic, first: int = 0, n: int = 12) -> None:
    """Prompts nobody served before; everything is settled and sound after each."""
    before = traffic.served
    for number in range(first, first + n):
        traffic.serve([*range(2000 + 50 * number, 2021 + 50 * number)])
        traffic.settle()
        traffic.check()
    assert traffic.served == before + n


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system can only be mounted by root")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def test_a_disk_that_is_full_takes_nothing_and_one_that_is_nearly_so_evicts(
    small_disk: Path,
) -> None:
    filler = small_disk / "filler"
    with traffic_on(small_disk) as traffic:
        filler.write_bytes(bytes(1_000_000))
        serve_all(traffic, n=4)
        counts = traffic.tier.counts()
        assert counts["set.full"], counts
        assert not counts.get("set.ok"), counts
        assert not counts.get("set.down"), "a full disk is no failure"
        os.truncate(filler, 600_000)
        serve_all(traffic, first=4)
        assert traffic.tier.counts()["set.full"] == counts["set.full"]
        assert traffic.tier.counts()["set.ok"] > 100
        traffic.recover()
        traffic.finish()


LIMITED = """
import json, resource, sys
from tests.storage_tier.serving_process import main
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
print(json.dumps(main(sys.argv[1], seed=1, n_requests=20)))
"""


def test_files_that_may_not_grow_are_full(tmp_path: Path) -> None:
    done = run_forked("-c", LIMITED, f"file:{tmp_path}?{TINY}", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["served"] == 20
    assert counts["set.full"]
    assert not any(name.endswith(".errors") for name in counts)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"kvgraft.lock", "kvgraft.uses"}


def test_a_full_store_keeps_growing_conversations_whose_heads_memory_serves(
    tmp_path: Path,
) -> None:
    """Their heads are never written again, and everything else that is asked for comes once."""
    sizes = {"capacity": "1MiB", "segment": "128KiB", "refresh_s": 0}
    store = FileBackend(tmp_path, FileOptions.model_validate(sizes))
    memory: dict[str, Any] = {"device_tokens": 4096, "host_tokens": 4096}
    cache = open_cache(installed("full"), store, settings(), guard=GuardMode.OFF, **memory)
    server = Server(cache)
    prompts: list[list[int]] = [[], []]
    for turn in range(10):
        for number, prompt in enumerate(prompts):
            prompt.extend(range(1000 * number + 10 * turn, 1000 * number + 10 * turn + 8))
            server.serve([*prompt, 1])
        for other in range(2):
            first = 10_000 + 1000 * turn + 100 * other
            server.serve(range(first, first + 32))
    assert store.stats().details["evicted"] > 200
    for prompt in prompts:
        pages = addresses(cache, prompt, "full")
        hints = store.probably_has([page[0].key for page in pages])
        assert [number for number, hint in enumerate(hints) if not hint] == []
    cache.close()


def test_a_store_whose_segments_all_have_writers_is_full_until_one_is_done(tmp_path: Path) -> None:
    sizes = {"capacity": "256KiB", "segment": "128KiB", "refresh_s": "0"}
    others = [FileBackend(tmp_path, FileOptions.model_validate(sizes)) for _ in range(2)]
    memory = memoryview(bytearray(4096))
    for number, other in enumerate(others):
        value = Value(memoryview(bytearray(256)), memory)
        assert other.set_from([bytes([number]) * 32], [value], 5.0) == [Status.OK]
    with traffic_on(tmp_path, "capacity=256KiB&segment=128KiB&refresh_s=0") as traffic:
        serve_all(traffic, n=4)
        counts = traffic.tier.counts()
        assert counts["set.full"], counts
        assert not counts.get("set.ok"), counts
        for other in others:
            other.close()
        traffic.recover()
        traffic.finish()


@contextmanager
def unprivileged() -> Iterator[None]:
    """As a user that file permissions count for."""
    if os.geteuid():
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_a_directory_that_becomes_read_only_is_down_until_it_is_not(tmp_path: Path) -> None:
    with traffic_on(tmp_path, "capacity=4MiB&segment=64KiB&refresh_s=0") as traffic:
        serve_all(traffic, n=2)
        tmp_path.chmod(0o555)
        try:
            with unprivileged():
                serve_all(traffic, first=20)
        finally:
            tmp_path.chmod(0o755)
        counts = traffic.tier.counts()
        assert counts["set.errors"], counts
        assert counts["set.down"], counts
        assert "Permission denied" in str(traffic.tier.client.last_error)
        traffic.recover()
        traffic.finish()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_disk_with_errors_costs_only_the_records_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    with traffic_on(tmp_path) as traffic:
        for prompt in PROMPTS:
            traffic.serve(prompt)
        traffic.empty()
        whole, chance = getattr(DiskFile, verb), random.Random(verb)

        def failing(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
            if chance.random() < 0.5:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            whole(self, pieces, offset)

        monkeypatch.setattr(DiskFile, verb, failing)
        for _ in range(4):
            for prompt in PROMPTS:
                traffic.serve(prompt)
                traffic.empty()
                traffic.check()
        serve_all(traffic)
        monkeypatch.undo()
        counts = traffic.tier.counts()
        told = ["get.corrupt"] if verb == "read" else ["set.errors", "set.down"]
        assert all(counts.get(name) for name in told), counts
        traffic.recover()
        traffic.finish()


# -- damage

Damage = Callable[[Path, random.Random], None]


def bits(path: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        for _ in range(20):
            at = chance.randrange(4096, path.stat().st_size)
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ 1 << chance.randrange(8)]), at)


def cut_off(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(4096, path.stat().st_size))


def swapped(path: Path, chance: random.Random) -> None:
    """Blocks trade places: records under each other's names, payloads behind other headers."""
    n_blocks = path.stat().st_size // 4096
    with path.open("r+b") as file:
        for _ in range(4):
            one, other = (4096 * chance.randrange(1, n_blocks) for _ in range(2))
            blocks = os.pread(file.fileno(), 4096, one), os.pread(file.fileno(), 4096, other)
            os.pwrite(file.fileno(), blocks[1], one)
            os.pwrite(file.fileno(), blocks[0], other)


def headless(path: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        file.write(chance.randbytes(4096))


def foreign(path: Path, chance: random.Random) -> None:
    """Others' files, and a segment's copy under another number."""
    path.with_name(f"{chance.randrange(1 << 20):016x}.kvseg").write_bytes(chance.randbytes(10_000))
    path.with_name(f"{1 << 20:016x}.kvseg").write_bytes(path.read_bytes())


@pytest.mark.one_in(9)
@pytest.mark.parametrize("damage", [bits, cut_off, swapped, headless, foreign])
@pytest.mark.parametrize(("openings", "rounds"), [(1, 6), (4, 1)])
def test_damage_while_a_cache_serves_and_between_is_a_miss(
    tmp_path: Path, damage: Damage, openings: int, rounds: int
) -> None:
    chance, wrong = random.Random(damage.__name__), 0
    for _ in range(openings):
        with traffic_on(tmp_path) as traffic:
            for _ in range(rounds):
                for path in sorted(tmp_path.glob("*.kvseg"))[:4]:
                    if path.stat().st_size > 8192:
                        damage(path, chance)
                for prompt in PROMPTS:
                    traffic.serve(prompt)
                traffic.empty()
                traffic.check()
            counts = traffic.tier.counts()
            wrong += counts.get("get.corrupt", 0)
            assert not counts.get("get.down"), traffic.tier.client.last_error
            traffic.recover()
            traffic.finish()
    assert wrong or damage in (headless, foreign)


def test_data_of_another_fingerprint_is_never_read(tmp_path: Path) -> None:
    """Planted under the names of this one, whole in everything else."""
    prompt = PROMPTS[0]
    with traffic_on(tmp_path) as traffic:
        traffic.serve(prompt)
        traffic.empty()
        places = [
            each
            for component in traffic.cache.tree.components
            for page in addresses(traffic.cache, prompt, component.name)
            for each in page
        ]
        backend = traffic.backend
        assert isinstance(backend, FileBackend)
        names = [component.name for component in traffic.cache.tree.components]
        slabs = dict(zip(names, traffic.tier.context.slabs.nbytes))
        backend.remove([place.key for place in places])
        for place in places:
            payload = memoryview(bytearray(bytes([9]) * slabs[place.component]))
            header = memoryview(bytearray(encode_header(place, bytes(32), payload)))
            assert backend.set_from([place.key], [Value(header, payload)], 5.0) == [Status.OK]
        assert traffic.serve(prompt) == 0
        counts = traffic.tier.counts()
        assert counts["get.stale"], counts
        assert not counts.get("get.ok"), counts
        traffic.settle()
        traffic.empty()
        assert traffic.serve(prompt) == len(prompt) - 1, "damaged data was removed and replaced"
        traffic.finish()
