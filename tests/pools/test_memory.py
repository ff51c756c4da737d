"""Memory is counted before it is taken."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgraft import Cache, ConfigError, TokenKey
from kvgraft.config import parse_config
from kvgraft.pools import SlotAllocator
from kvgraft.pools.plan import host_available_nbytes
from kvgraft_storage import open_storage

from ..serving import life

GEOMETRY = {"n_layers": 2, "n_kv_heads": 2, "head_dim": 64}
"""1,024 bytes a token."""
MIXED: dict[str, Any] = {"full": GEOMETRY, "swa": {**GEOMETRY, "window": 64}, "mamba": {}}


def opened(components: dict[str, Any], n_available: int, **settings: Any) -> Cache:
    config = parse_config({"components": components, "page_size": 16, **settings})
    return Cache(config, available=lambda device: n_available)


def test_pools_larger_than_the_memory_are_refused_with_the_sum_per_component_and_tier() -> None:
    sizes = {"device_tokens": 10_000, "host_tokens": 20_000}
    with pytest.raises(ConfigError) as refused:
        opened(MIXED, 30_000_000, **sizes)
    assert str(refused.value) == (
        "pools need 61.5 MB (full: device 10.2 MB, host 20.5 MB; swa: device 10.2 MB, host "
        "20.5 MB; mamba: device 3.6 kB, host 8.2 kB), the machine has 30.0 MB available; lower "
        "setting host_tokens or setting device_tokens"
    )
    opened(MIXED, 62_000_000, **sizes).close()


def test_pools_behind_a_private_pool_count_as_well() -> None:
    hidden = {"hisparse": {**GEOMETRY, "max_running": 1000, "hot_tokens": 1024}}
    with pytest.raises(ConfigError, match=r"\(hisparse: device 1\.\d GB, host"):
        opened(hidden, 1_000_000_000, device_tokens=1024, host_tokens=1024)


@pytest.mark.parametrize("payload", ["on", "off"])
def test_a_request_takes_the_same_steps_without_payload(payload: str) -> None:
    cache = opened(
        MIXED,
        10**9,
        device_tokens=2048,
        host_tokens=4096,
        load=None,
        payload=payload == "on",
        guard="on",
    )
    hits = []
    for number in (0, 1, 2, 0, 1, 2, 0):
        request = cache.begin(TokenKey(range(10_000 * number, 10_000 * number + 1000)))
        hits.append((request.anchor_tokens, request.device_tokens))
        assert cache.admit(request).admitted
        cache.load_back(request)
        assert cache.drain()
        assert request.ready
        life.prefill(cache, request)
        cache.finish(request)
        assert cache.drain()
    cache.check_integrity()
    cache.close()
    assert hits == [(0, 0)] * 3 + [(992, 0)] * 4


def test_pools_without_payload_take_no_memory() -> None:
    cache = opened(
        MIXED, 0, device_tokens=10**11, page_size=64, host_tokens=12 * 10**10, payload=False
    )
    full = cache.mounted[0].component
    assert full.host is not None
    assert full.device.capacity * 64 == 99_999_999_936 + 64
    assert full.device.planes[0].device == full.host.slab.device == torch.device("meta")
    cache.close()


def test_storage_needs_payload(tmp_path: Path) -> None:
    storage = {"url": f"file:{tmp_path}", "model": "m", "weights": "1"}
    with pytest.raises(ConfigError, match="payload=False: storage keeps payloads"):
        opened(MIXED, 10**9, device_tokens=512, host_tokens=512, payload=False, storage=storage)


def test_a_pool_of_many_slots_is_opened_at_once() -> None:
    allocator = SlotAllocator(2**31 - 1)
    assert allocator.n_free == 2**31 - 1
    taken = allocator.allocate(3)
    assert taken is not None
    assert memoryview(taken).cast("i").tolist() == [2, 1, 0]
    assert allocator.n_free == 2**31 - 4


def test_the_books_of_a_pool_of_many_slots_are_checked_without_a_look_at_each() -> None:
    cache = Cache.open(
        ["full"], page_size=1, device_tokens="100M", host_tokens="100M", payload=False
    )
    request = cache.begin(TokenKey(range(5000)))
    assert cache.admit(request).admitted
    assert cache.allocate(request, 5000)
    tracemalloc.start()
    cache.check_integrity()
    _, peak_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_nbytes < 4_000_000
    cache.close()


Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    return _write


MEMINFO = "MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:    8000000 kB\n"


def test_the_machine_has_its_available_memory(tmp_path: Path, write: Write) -> None:
    write("proc/meminfo", MEMINFO)
    write("proc/self/cgroup", "0::/\n")
    assert host_available_nbytes(tmp_path) == 8_000_000 * 1024


def test_a_control_group_leaves_its_limit_less_its_usage(tmp_path: Path, write: Write) -> None:
    write("proc/meminfo", MEMINFO)
    write("proc/self/cgroup", "0::/service/worker\n")
    group = "sys/fs/cgroup/service"
    write(f"{group}/worker/memory.max", "max\n")
    write(f"{group}/worker/memory.current", "500\n")
    write(f"{group}/memory.max", "10000\n")
    write(f"{group}/memory.current", "7000\n")
    write(f"{group}/memory.stat", "anon 4000\ninactive_file 1000\nactive_file 1500\nslab 9\n")
    assert host_available_nbytes(tmp_path) == 10_000 - (7000 - 2500)


def test_an_older_control_group_counts_as_well(tmp_path: Path, write: Write) -> None:
    write("proc/meminfo", MEMINFO)
    write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    # a container sees its own group as the root
    group = "sys/fs/cgroup/memory"
    write(f"{group}/memory.limit_in_bytes", "10000\n")
    write(f"{group}/memory.usage_in_bytes", "7000\n")
    write(f"{group}/memory.stat", "inactive_file 1\ntotal_inactive_file 2000\n")
    assert host_available_nbytes(tmp_path) == 10_000 - 5000


def test_elsewhere_the_system_is_asked(tmp_path: Path) -> None:
    found = host_available_nbytes(tmp_path)
    assert found is None or found > 0


@pytest.mark.parametrize(
    ("size", "n_tokens"),
    [(4_000_000, 4_000_000), ("4M", 4_000_000), ("1.5k", 1500), ("64Ki", 65_536), ("4_096", 4096)],
)
def test_tokens_are_written_as_people_write_them(size: object, n_tokens: int) -> None:
    config = parse_config({"components": ["full"], "device_tokens": size})
    assert config.device_tokens == n_tokens


@pytest.mark.parametrize("unit", ["tokens", "bytes"])
def test_pools_sized_in_bytes_are_the_largest_that_stay_within_them(unit: str) -> None:
    sizes = {"device": "10MB", "host": "10MiB"}
    cache = opened(MIXED, 10**9, **{f"{t}_{unit}": n for t, n in sizes.items()})
    needed = {"device": 0, "host": 0}
    for each in cache.mounted:
        component = each.component
        assert component.host is not None
        needed["device"] += component.device.capacity * component.device.slot_nbytes
        needed["host"] += component.host.slab.nbytes
    assert 10_000_000 - 2 * 1024 * 16 - 300 < needed["device"] <= 10_000_000
    assert 10 * 2**20 - 2 * 1024 * 16 - 3 * 4096 - 300 < needed["host"] <= 10 * 2**20
    assert cache.config.device_tokens == 16 * cache.mounted[0].component.device.capacity
    assert cache.config.host_tokens > cache.config.device_tokens
    cache.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"device_tokens": "40G"},
            r"'40G' is no number of tokens; give tokens, such as 4M, or .* such as 40GB",
        ),
        ({"device_tokens": "2 Ti"}, "setting device_tokens='2 Ti' is no number of tokens"),
        ({"device_tokens": "5_0"}, "setting device_tokens='5_0' is no size"),
        ({"device_tokens": "many"}, "setting device_tokens='many' is no size; give tokens"),
        ({"device_bytes": "many"}, "setting device_bytes='many' is no size; write for"),
        ({"device_bytes": "1kB"}, "1.0 kB are less than the smallest pools take, 32.8 kB"),
        ({"device_memory": "1kB"}, "setting device_memory: 1.0 kB are less than the smallest"),
        ({"device_bytes": "1MB", "device_tokens": 9}, "device_bytes='1MB': give one of the two"),
        ({"device_bytes": "1MB", "device_tokens": 1}, "device_bytes='1MB': give one of the two"),
        ({"device_tokens": "\u0664k"}, "setting device_tokens='\u0664k' is no size"),
        ({"host_tokens": 9}, "setting device_tokens is missing; give for example"),
    ],
)
def test_sizes_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened({"full": GEOMETRY, "swa": GEOMETRY}, 10**9, **settings)


def test_bytes_that_no_pool_follows_are_refused() -> None:
    components = {"full": {**GEOMETRY, "device_tokens": "4k"}}
    with pytest.raises(ConfigError, match="setting device_bytes: every component has a pool size"):
        opened(components, 10**9, device_bytes="40MB")


@pytest.mark.parametrize(
    ("text", "nbytes"), [("2MB", 2_000_000), ("2MiB", 2 << 20), ("2m", 2_000_000)]
)
def test_a_store_is_sized_in_the_same_words(tmp_path: Path, text: str, nbytes: int) -> None:
    store = open_storage(f"file:{tmp_path}?capacity={text}")
    assert store.stats().capacity_nbytes == nbytes
    store.close()
