"""The tier without vLLM: stores that fail, hang, fill up or hold another model's data."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgraft import ConfigError
from kvgraft_storage import Capabilities, Status, StorageBackend, Value, open_storage
from kvgraft_testing.storage import MemoryBackend
from kvgraft_testing.storage.traffic import until
from kvgraft_vllm import Engine, Group, StoreTier, TierSettings

SIZE = 4096
ENGINE = Engine(
    version="0.32",
    model="tiny",
    weights="one",
    dtype="float16",
    tokens_per_hash=16,
    blocks_per_chunk=1,
    chunk_nbytes=SIZE,
    groups=(Group(("layers.0",), 16), Group(("layers.1",), 16, 2)),
    parallel={"tp_size": 1},
)
SETTINGS = TierSettings.of({"path": "/tmp", "lookup_timeout_s": 0.2, "deadline_s": 0.2})


class Gated(MemoryBackend):
    """Claims to be synchronous, and hangs while its gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.n_questions = 0

    @property
    def capabilities(self) -> Capabilities:
        return super().capabilities._replace(synchronous=True)

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self.n_questions += 1
        self.gate.wait()
        return super().exists(keys)

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self.gate.wait()
        return super().get_into(keys, values, deadline_s)

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self.gate.wait()
        return super().set_from(keys, values, deadline_s)


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


KEYS = [key(number) for number in range(4)]


class Rig:
    """A tier over memory of eight chunks."""

    def __init__(self, backend: StorageBackend, engine: Engine = ENGINE, **settings: Any) -> None:
        self.memory = bytearray(8 * SIZE)
        self.tier = StoreTier(
            engine, SETTINGS.model_copy(update=settings), backend, memoryview(self.memory)
        )

    def fill(self, chunk: int, byte: int) -> None:
        self.memory[chunk * SIZE : (chunk + 1) * SIZE] = bytes([byte]) * SIZE

    def chunk(self, chunk: int) -> bytes:
        return bytes(self.memory[chunk * SIZE : (chunk + 1) * SIZE])

    def store(self, keys: Sequence[bytes] = KEYS) -> tuple[Status, ...]:
        for number in range(len(keys)):
            self.fill(number, number + 1)
        self.tier.store(1, keys, range(len(keys)))
        assert self.tier.drain(10)
        (finished,) = self.tier.take_finished()
        return finished.statuses

    def load(self, keys: Sequence[bytes], request: str = "r", first: int = 4) -> Any:
        chunks = range(first, first + len(keys))
        self.tier.load(2, keys, chunks, request, [16 * each + 16 for each in range(len(keys))])
        self.tier.drain(10)
        (finished,) = self.tier.take_finished()
        return finished

    def found(self, keys: Sequence[bytes], request: str = "r") -> list[Status | None]:
        """Answers to a request, after as many steps as they take."""
        told: list[Status | None] = []
        for _ in range(200):
            self.tier.poll()
            told = [self.tier.lookup(each, request) for each in keys]
            if None not in told:
                return told
            self.tier.end_step()
            self.tier._link.done.wait(0.05)
        return told


@pytest.fixture
def backend() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()


def counted(tier: StoreTier) -> Mapping[tuple[str, tuple[str, ...]], int]:
    return tier.take_metrics().counters


def test_chunks_that_one_tier_stored_are_found_and_loaded_by_the_next(tmp_path: Path) -> None:
    url = f"file:{tmp_path}?capacity=1MiB"
    first = Rig(open_storage(url))
    assert first.store() == (Status.OK,) * 4
    assert first.tier.close()
    second = Rig(open_storage(url))
    assert second.found([*KEYS, key(9)]) == [Status.OK] * 4 + [Status.MISS]
    finished = second.load(KEYS)
    assert finished.success
    assert finished.nbytes == 4 * SIZE
    assert [second.chunk(4 + number)[0] for number in range(4)] == [1, 2, 3, 4]
    assert second.tier.close()


def test_a_step_asks_the_store_once_for_all_chunks(backend: Gated) -> None:
    rig = Rig(backend)
    assert [rig.tier.lookup(each, "a") for each in KEYS] == [None] * 4
    assert [rig.tier.lookup(each, "b") for each in KEYS] == [None] * 4
    rig.tier.end_step()
    assert rig.found(KEYS, "a") == rig.found(KEYS, "b") == [Status.MISS] * 4
    assert backend.n_questions == 1


def test_a_store_that_hangs_answers_late_and_no_request_waits_longer(backend: Gated) -> None:
    rig = Rig(backend)
    backend.gate.clear()
    assert rig.found(KEYS[:1]) == [Status.TIMEOUT]
    backend.gate.set()
    later = map(str, itertools.count())  # a slow machine's answer may be late again
    until(lambda: rig.found(KEYS[:1], next(later)) == [Status.MISS])
    assert rig.tier.close()


def test_a_question_that_waits_in_line_behind_hanging_loads_is_late(backend: Gated) -> None:
    rig = Rig(backend, deadline_s=30)
    rig.store()
    backend.gate.clear()
    for number in range(rig.tier.storage.limits.n_workers):
        rig.tier.load(number, KEYS[:1], [4])
    assert rig.found([key(9)]) == [Status.TIMEOUT]
    assert backend.n_questions == 1, "the question was asked, and did not wait in line"
    backend.gate.set()
    assert rig.tier.close()


def test_a_load_that_hangs_ends_and_its_memory_is_the_engines_again(backend: Gated) -> None:
    rig = Rig(backend)
    rig.store()
    backend.gate.clear()
    finished = rig.load(KEYS[:1])
    assert finished.statuses == (Status.TIMEOUT,)
    rig.fill(4, 77)
    backend.gate.set()
    assert rig.tier.close()
    assert rig.chunk(4) == bytes([77]) * SIZE


def test_a_damaged_chunk_is_a_failed_load_of_that_chunk_and_counted(backend: Gated) -> None:
    rig = Rig(backend)
    rig.store()
    place = rig.tier._address(KEYS[1]).key
    header, payload = backend.stored[place]
    backend.stored[place] = header, b"\xff" + payload[1:]
    assert rig.found(KEYS) == [Status.OK] * 4
    finished = rig.load(KEYS)
    assert finished.statuses == (Status.OK, Status.CORRUPT, Status.OK, Status.OK)
    assert finished.ok_keys == (KEYS[0], KEYS[2], KEYS[3])
    assert rig.tier.lookup(KEYS[1], "r") is Status.CORRUPT, "the request would load it for ever"
    assert rig.tier.lookup(KEYS[0], "r") is Status.OK
    rig.tier.finish_request("r")
    told = counted(rig.tier)
    assert told["kvgraft:loads_failed", ("corrupt",)] == 1
    assert told["kvgraft:hits_ended", ("0", "corrupt")] == 1
    assert told["kvgraft:chunks", ("get", "corrupt")] == 1
    assert rig.found(KEYS[1:2], "next") == [Status.MISS], "a damaged chunk was kept"


def test_more_than_may_be_on_its_way_is_not_stored_and_counted(backend: Gated) -> None:
    rig = Rig(backend, store_nbytes=SIZE)
    backend.gate.clear()
    for number in range(3):
        rig.tier.store(number, [KEYS[number]], [number])
    refused = [finished.job.number for finished in rig.tier.take_finished()]
    assert refused == [1, 2]
    assert counted(rig.tier)["kvgraft:chunks_refused", ()] == 2
    backend.gate.set()
    assert rig.tier.close()


def test_draining_is_bounded_and_ends_every_job(backend: Gated) -> None:
    rig = Rig(backend, shutdown_s=0.1)
    rig.store()
    backend.gate.clear()
    rig.tier.load(2, KEYS, range(4, 8))
    assert not rig.tier.drain(0.05)
    (finished,) = rig.tier.take_finished()
    assert finished.statuses == (Status.TIMEOUT,) * 4
    backend.gate.set()
    assert rig.tier.close()


def test_closing_is_bounded_while_loads_and_stores_hang(backend: Gated) -> None:
    rig = Rig(backend, shutdown_s=0.1)
    rig.store()
    backend.gate.clear()
    rig.tier.load(2, KEYS[:1], [4])
    rig.tier.store(3, [key(9)], [0])
    assert not rig.tier.close()
    assert {finished.job.number for finished in rig.tier._transfers.take()} == {2, 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "0.33"},
        {"model": "other"},
        {"weights": "two"},
        {"dtype": "bfloat16"},
        {"tokens_per_hash": 32},
        {"blocks_per_chunk": 2},
        {"groups": ENGINE.groups[:1]},
        {"groups": (Group(("layers.0",), 16), Group(("layers.1",), 16, 3))},
        {"layout": ("HND",)},
        {"parallel": {"tp_size": 2}},
        {"computes": ("fp8",)},
        {"hashing": ("sha256", "1")},
        {"salt": "tenant"},
    ],
    ids=str,
)
def test_another_engines_data_is_not_found_nor_removed(changes: dict[str, Any]) -> None:
    backend = MemoryBackend()
    mine = Rig(backend)
    mine.store()
    other = Rig(backend, replace(ENGINE, **changes))
    assert other.found(KEYS) == [Status.MISS] * 4
    assert not other.load(KEYS).ok_keys
    assert mine.load(KEYS).success


def test_a_store_that_cannot_take_a_chunk_is_refused() -> None:
    small = MemoryBackend(max_payload_nbytes=SIZE - 1)
    with pytest.raises(ConfigError, match=r"a chunk has 4096 bytes, .* takes 4095 at most"):
        Rig(small)
    assert small.closed


def test_uses_are_reported_once_a_step_heads_last() -> None:
    told: list[list[bytes]] = []

    class Touched(MemoryBackend):
        @property
        def capabilities(self) -> Capabilities:
            return super().capabilities._replace(touch=True)

        def touch(self, keys: Sequence[bytes]) -> None:
            told.append(list(keys))

    rig = Rig(Touched())
    rig.store()
    assert rig.found(KEYS[:2]) == [Status.OK] * 2
    rig.tier.touch(KEYS[1:3])
    rig.tier.end_step()
    rig.tier.end_step()
    assert rig.tier.close()
    assert told == [[rig.tier._address(each).key for each in reversed(KEYS[:3])]]


def test_groups_of_one_block_hash_are_apart(backend: Gated) -> None:
    rig = Rig(backend)
    assert rig.store([key(1, group=0)]) == (Status.OK,)
    assert rig.found([key(1, group=0), key(1, group=1)]) == [Status.OK, Status.MISS]


def test_a_requests_line_names_group_chunk_and_reason(
    backend: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvgraft.vllm")
    rig = Rig(backend)
    rig.store(KEYS[:2])
    for number in range(3):
        rig.found([KEYS[number]])
        rig.tier.lookup(KEYS[number], "r", 16 * number + 16)
    window = key(2, group=1)
    rig.tier.lookup(window, "r", 48)
    rig.tier.end_step()
    while rig.tier.lookup(window, "r", 48) is None:
        rig.tier._link.done.wait(0.05)
        rig.tier.poll()
    rig.tier.finish_request("r")
    assert [record.getMessage() for record in caplog.records] == [
        "kvgraft: request r: 2 chunks from the store, ended by group 1: chunk 2 is not there; "
        "group 0 (1 layers, needs all chunks): 2 found; "
        "group 1 (1 layers, needs the last 2): 0 found"
    ]
    assert counted(rig.tier)["kvgraft:hits_ended", ("1", "miss")] == 1
    assert not counted(rig.tier), "counts are reported once"


def test_events_name_vllms_keys_when_stored_and_when_dropped(backend: Gated) -> None:
    rig = Rig(backend, enable_kv_events=True)
    rig.store(KEYS[:2])
    ((gone, keys),) = rig.tier.take_events()
    assert (gone, sorted(keys)) == (False, KEYS[:2])
    address = rig.tier._address(KEYS[0])
    assert rig.tier.storage.remove([address]).wait(10)
    assert rig.tier.take_events() == [(True, KEYS[:1])]
    assert rig.tier.storage.clear().wait(10)
    assert rig.tier.take_events() == [(True, KEYS[1:2])]


def test_a_store_that_is_left_alone_shows_and_is_a_miss_at_once() -> None:
    class Gone(MemoryBackend):
        def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
            raise OSError("gone")

        def healthy(self) -> bool:
            return False

    rig = Rig(Gone())
    for number in range(3):
        assert rig.found([KEYS[0]], f"r{number}") == [Status.DOWN]
    assert rig.tier.lookup(KEYS[0], "next") is Status.DOWN
    assert rig.tier.take_metrics().gauges["kvgraft:store_up", ("read",)] == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "path is missing"),
        ({"path": "/x", "deadline_s": 0}, "deadline_s"),
        ({"path": "/x", "locality": "near"}, "locality"),
        ({"path": "/x", "store_nbytes": "much"}, "store_nbytes"),
        ({"path": "/x", "capacity": ["40GB"]}, "capacity"),
        ({"path": "/x", "backend": "File:"}, "backend"),
    ],
)
def test_impossible_settings_are_one_line_with_their_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        TierSettings.of(given)
    assert "\n" not in str(refused.value)


def test_settings_that_are_not_the_tiers_are_the_backends() -> None:
    settings = TierSettings.of(
        {"backend": "valkey", "path": "host:1,host:2", "cluster": True, "ttl_s": 60}
    )
    assert settings.url == "valkey:host:1,host:2?cluster=true&ttl_s=60"
    assert TierSettings.of({"path": "/a b?c"}).url == "file:/a%20b%3Fc"
