"""The backend without SGLang: stores that are damaged, hang, or hold another engine's data."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kvgraft import ConfigError
from kvgraft_sglang import BackendSettings, Engine, PageStore, Pool
from kvgraft_storage import Capabilities, Status, StorageBackend, Value, open_storage
from kvgraft_testing.storage import MemoryBackend

SIZE = 4096
KV_POOL = Pool("kv", "MHATokenToKVPoolHost", "page_first", 16, SIZE, "bfloat16", parts=True)
STATES = Pool("mamba", "MambaPoolHost", "page_first", 1, SIZE, "float32")
ENGINE = Engine(
    version="0.5.23", model="tiny", weights="one", replicated=False, ranks={"tp": (0, 2)}
)
SETTINGS = BackendSettings.of({"path": "/tmp", "lookup_timeout_s": 0.2, "call_timeout_s": 0.2})
KEYS = [f"{number:064x}" for number in range(8)]


class Hanging(MemoryBackend):
    """Claims to be synchronous, and hangs while its gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    @property
    def capabilities(self) -> Capabilities:
        return super().capabilities._replace(synchronous=True)

    def clear(self) -> None:
        self.gate.wait()
        super().clear()

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self.gate.wait()
        return super().exists(keys)

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self.gate.wait()
        return super().get_into(keys, values, deadline_s)


def page(number: int) -> bytes:
    return bytes([number]) * SIZE


def halves(content: bytes | bytearray) -> tuple[memoryview, memoryview]:
    """A page in two buffers, as keys and values are."""
    view = memoryview(content)
    return view[: SIZE // 2], view[SIZE // 2 :]


def page_store(backend: StorageBackend, engine: Engine = ENGINE, kv: Pool = KV_POOL) -> PageStore:
    made = PageStore(engine, kv, SETTINGS, backend)
    made.add_pool(STATES)
    return made


def saved(store: PageStore, n: int = 4) -> PageStore:
    assert store.store(KEYS[:n], [halves(page(number)) for number in range(n)]) == [True] * n
    return store


def loaded(store: PageStore, n: int = 4) -> list[bytes | None]:
    targets = [bytearray(SIZE) for _ in range(n)]
    here = store.load(KEYS[:n], [halves(each) for each in targets])
    return [bytes(each) if ok else None for each, ok in zip(targets, here)]


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    backend = Hanging()
    yield backend
    backend.gate.set()


def test_pages_in_buffers_are_found_and_loaded_after_a_restart(tmp_path: Path) -> None:
    first = saved(page_store(open_storage(f"file:{tmp_path}")))
    assert first.close()
    second = page_store(open_storage(f"file:{tmp_path}"))
    assert second.n_leading(KEYS) == 4
    assert loaded(second, 5) == [*(page(number) for number in range(4)), None]
    assert second.counts()["get.ok"] == 4
    assert second.close()


def test_a_damaged_page_is_a_miss_and_counted(tmp_path: Path) -> None:
    assert saved(page_store(open_storage(f"file:{tmp_path}"))).close()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            path.write_bytes(content.replace(page(2), page(2)[:-1] + b"x"))
    store = page_store(open_storage(f"file:{tmp_path}"))
    assert loaded(store) == [page(0), page(1), None, page(3)]
    assert store.counts()["get.corrupt"] == 1
    assert store.n_leading(KEYS) == 2
    assert store.close()


@pytest.mark.parametrize(
    "other",
    [
        replace(ENGINE, weights="two"),
        replace(ENGINE, model="other"),
        replace(ENGINE, version="0.5.24"),
        replace(ENGINE, ranks={"tp": (1, 2)}),
        replace(ENGINE, ranks={"tp": (0, 4)}),
        replace(ENGINE, replicated=True),
        replace(ENGINE, computes="fp8"),
        replace(ENGINE, salt="mine"),
    ],
    ids=["weights", "model", "version", "rank", "size", "mla", "computes", "salt"],
)
def test_another_engines_pages_are_not_found(other: Engine) -> None:
    backend = MemoryBackend()
    saved(page_store(backend))
    assert page_store(backend, other).n_leading(KEYS) == 0


@pytest.mark.parametrize(
    "other",
    [
        replace(KV_POOL, layout="layer_first"),
        replace(KV_POOL, dtype="float16"),
        replace(KV_POOL, page_size=32),
        replace(KV_POOL, parts=False),
        replace(KV_POOL, shape=(("head_num", 8),)),
    ],
    ids=["layout", "dtype", "page_size", "parts", "shape"],
)
def test_pages_of_another_form_are_not_found(other: Pool) -> None:
    backend = MemoryBackend()
    saved(page_store(backend))
    assert page_store(backend, kv=other).n_leading(KEYS) == 0


def test_ranks_of_mla_share_the_cache_and_not_states() -> None:
    backend, one = MemoryBackend(), replace(ENGINE, replicated=True)
    first = saved(page_store(backend, one))
    assert first.store(KEYS[:1], [memoryview(page(9))], "mamba") == [True]
    second = page_store(backend, replace(one, ranks={"tp": (1, 2)}))
    assert loaded(second) == loaded(first)
    assert (second.find(KEYS[:1], "mamba"), first.find(KEYS[:1], "mamba")) == ([False], [True])


def test_a_hybrid_prefix_is_as_long_as_its_states_reach() -> None:
    store = saved(page_store(MemoryBackend()), 6)
    states = [memoryview(page(9))] * 2
    store.store([KEYS[1], KEYS[3]], states, "mamba")
    found = store.find_restorable(KEYS, {"mamba": 1})
    assert (found.lengths, found.longest) == ([2, 4], 4)
    assert found.hits == {"kv": 6, "mamba": 4}
    assert store.find_restorable(KEYS, {"mamba": None}).longest == 0


def test_transfers_are_reported_once() -> None:
    store = saved(page_store(MemoryBackend()))
    loaded(store, 5)
    store.load(KEYS[5:6], [memoryview(bytearray(SIZE))])
    (stored,), (fetched,) = store.take_stores(), store.take_loads()
    assert (stored.n_pages, fetched.n_pages, fetched.nbytes) == (4, 4, 4 * SIZE)
    assert fetched.duration_s > 0
    assert store.take_stores() == store.take_loads() == []


def test_waits_for_a_store_that_hangs_end_and_leave_memory_alone(hanging: Hanging) -> None:
    store = saved(page_store(hanging))
    hanging.gate.clear()
    target = bytearray(SIZE)
    assert store.load(KEYS[:1], [halves(target)]) == [False]
    assert store.n_leading(KEYS) == 0
    hanging.gate.set()
    assert not store.close() or bytes(target) == bytes(SIZE)
    assert bytes(target) == bytes(SIZE)


def test_a_store_that_others_may_use_is_not_cleared_unless_that_is_allowed() -> None:
    backend = MemoryBackend()
    other = saved(page_store(backend, replace(ENGINE, model="other")))
    store = saved(page_store(backend))
    with pytest.raises(ConfigError, match='set "allow_clear"') as refused:
        store.clear()
    assert "\n" not in str(refused.value)
    assert (store.n_leading(KEYS), other.n_leading(KEYS)) == (4, 4)
    allowed = SETTINGS.model_copy(update={"allow_clear": True})
    PageStore(ENGINE, KV_POOL, allowed, backend).clear()
    assert (store.n_leading(KEYS), other.n_leading(KEYS)) == (0, 0)


def test_a_clear_that_does_not_end_is_an_error(hanging: Hanging) -> None:
    allowed = SETTINGS.model_copy(update={"allow_clear": True})
    store = PageStore(ENGINE, KV_POOL, allowed, hanging)
    hanging.gate.clear()
    with pytest.raises(TimeoutError, match=r"not cleared in 0\.2 s"):
        store.clear()


def test_threads_load_store_and_look_up_at_the_same_time() -> None:
    store = saved(page_store(MemoryBackend()), 8)
    with ThreadPoolExecutor(4) as threads:
        loads = [threads.submit(loaded, store, 8) for _ in range(8)]
        saves = [threads.submit(saved, store, 8) for _ in range(4)]
        finds = [threads.submit(store.n_leading, KEYS) for _ in range(4)]
        assert all(each.result() == [page(n) for n in range(8)] for each in loads)
        assert all(each.result() is store for each in saves)
        assert all(each.result() == 8 for each in finds)


def test_options_are_the_stores_and_sglangs_names_are_left_out() -> None:
    given = {"path": "/a b", "capacity": "4MB", "class_name": "KvgraftStorage"}
    assert BackendSettings.of(given, {"class_name"}).url == "file:/a%20b?capacity=4MB"
    with pytest.raises(ConfigError, match="kvgraft-sglang: path is missing"):
        BackendSettings.of({})
