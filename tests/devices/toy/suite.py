"""The accelerator's runtime on the toy device: run by `test_accelerator` in a process of its own.

It shows that torch's generic streams, events and page-locked memory are used as they are meant,
that copies run late and in order, and that a batched call gets the right arrays through ctypes. It
shows nothing of speed, of the real driver, or of kernels.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch

from kvgraft import Cache, CacheConfig, ConfigError, TokenKey, TransferError, WritePolicy
from kvgraft.assembly import parts_of
from kvgraft.config import parse_config
from kvgraft.devices import PlaneCopy
from kvgraft.pools.component import run_copy
from kvgraft_accelerator import Accelerator, streams
from kvgraft_accelerator.cuda_driver import CudaDriver
from kvgraft_accelerator.fragments import Fragmenter, Fragments, Rows
from kvgraft_accelerator.page_locked import page_locked
from kvgraft_accelerator.protocol import CopySizes, Purpose
from kvgraft_accelerator.streams import StreamTransferEngine
from kvgraft_accelerator.tables import Tables
from kvgraft_accelerator.ways import BatchedCopies, Ways
from tests.devices import lost
from tests.devices.torch_player import TorchPlayer
from tests.devices.toy import load

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel's module is imported
TOY = load()
TOY.delay(50)
DRIVER = CudaDriver(ctypes.CDLL(TOY.__file__))
N_ROWS, LANES = 12, 4
READ, WRITE = torch.tensor([9, 2, 3, 11]), torch.tensor([4, 5, 6, 0])


class OlderLibrary:
    """The calls of CUDA 12.8: the one for many copies has an argument more."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.cuMemcpyBatchAsync = library.toyMemcpyBatchAsync
        self.cuGetErrorString = library.cuGetErrorString


class ToyBatches(BatchedCopies):
    """Handles of the toy's streams are their numbers."""

    def handle(self, stream: torch.Stream) -> int:
        return stream.stream_id


class Kernel:
    """Stands for the kernel: moves pieces at its place in the stream, through the toy's call."""

    def __call__(self, fragments: Fragments, stream: torch.Stream) -> None:
        ToyBatches(DRIVER)(fragments, stream)

    def move_rows(self, rows: Rows, stream: torch.Stream) -> None:
        self(rows.fragments(), stream)


OLDER = CudaDriver(OlderLibrary(ctypes.CDLL(TOY.__file__)))  # type: ignore[arg-type]
WAYS = {
    "plain": Ways(),
    "batched": Ways(ToyBatches(DRIVER)),
    "batched, CUDA 12.8": Ways(ToyBatches(OLDER)),
    "kernel": Ways(kernel=Kernel()),
    "both": Ways(ToyBatches(DRIVER), Kernel()),
}


@pytest.fixture(autouse=True)
def _goes_on() -> Iterator[None]:
    yield
    TOY.lose(False)
    TOY.release()


@pytest.fixture(params=WAYS)
def device(request: pytest.FixtureRequest) -> Accelerator:
    return Accelerator("toy", CopySizes(), WAYS[request.param])


def plane(device: Accelerator, where: str) -> torch.Tensor:
    """Rows of numbers: on the device, in page-locked memory, or in other memory of the host."""
    values = torch.arange(N_ROWS * LANES).view(N_ROWS, LANES)
    if where == "page-locked":
        locked = device.page_locked(values.nbytes, "a plane").view(torch.int64)
        return locked.view(N_ROWS, LANES).copy_(values)
    return values.to("toy") if where == "device" else values.clone()


@pytest.mark.parametrize("source", ["device", "page-locked", "pageable"])
@pytest.mark.parametrize("target", ["device", "page-locked", "pageable"])
def test_rows_arrive_wherever_they_are(device: Accelerator, source: str, target: str) -> None:
    rows, into, wanted = plane(device, source), plane(device, target), plane(device, "pageable")
    stream = device.stream(Purpose.BACKUP)
    stream.wait(device.compute().record())
    (event,) = stream.copy([[PlaneCopy(0, rows, into, READ, WRITE)]])
    assert event.wait(10)
    run_copy(PlaneCopy(0, plane(device, "pageable"), wanted, READ, WRITE))
    assert into.cpu().equal(wanted)


@pytest.mark.parametrize("from_device", [True, False])
def test_a_copy_is_late_and_behind_the_events_its_stream_waits_for(
    device: Accelerator, *, from_device: bool
) -> None:
    on_device, locked = plane(device, "device"), plane(device, "page-locked")
    locked.zero_()
    stream = device.stream(Purpose.LOAD_BACK)
    TOY.hold()
    on_device.fill_(7)
    produced = device.compute().record()
    stream.wait(produced)
    pair = (on_device, locked) if from_device else (locked, on_device)
    events = stream.copy([[PlaneCopy(layer, *pair, READ, WRITE)] for layer in range(2)])
    assert len(events) == 2
    assert not any(event.done() for event in (produced, *events))
    assert not events[1].wait(0.01)
    TOY.release()
    assert events[1].wait()
    assert events[0].done()
    found = pair[1].cpu()
    assert found[WRITE].eq(7 if from_device else 0).all()
    assert found[1].tolist() == ([0] * LANES if from_device else [7] * LANES)


def test_a_model_waits_for_an_event_of_the_cache_and_copies_for_one_of_torchs(
    device: Accelerator,
) -> None:
    rows, locked = plane(device, "device"), plane(device, "page-locked")
    models, ours = torch.Stream("toy"), device.stream(Purpose.BACKUP)
    TOY.hold()
    with models:
        rows.fill_(3)
    fence = models.record_event()
    assert device.orders(fence)
    assert not device.orders(object())
    ours.wait(fence)  # type: ignore[arg-type]
    (event,) = ours.copy([[PlaneCopy(0, rows, locked, READ, WRITE)]])
    models.wait_event(event.event)  # type: ignore[attr-defined]
    with models:
        rows.fill_(4)
    TOY.release()
    assert event.wait(10)
    assert locked[WRITE].eq(3).all()


def test_loads_come_before_backups() -> None:
    device = Accelerator("toy", CopySizes(), Ways())
    found = {each: TOY.priority(device.stream(each).raw.stream_id) for each in Purpose}
    assert found[Purpose.LOAD_BACK] == found[Purpose.SCATTER] < 0
    assert found[Purpose.BACKUP] == found[Purpose.GATHER] == 0


def test_copies_within_the_device_go_to_the_models_stream_and_never_batched() -> None:
    device = Accelerator("toy", CopySizes(), WAYS["batched"])
    rows, other = plane(device, "device"), torch.Stream("toy")
    with other:
        device.compute().copy([[PlaneCopy(0, rows, rows, READ, WRITE)]])
        wanted = rows.cpu()
    assert wanted[WRITE].equal(plane(device, "pageable")[READ])


def test_a_call_that_the_driver_refuses_fails_with_its_reason() -> None:
    device = Accelerator("toy", CopySizes(), WAYS["batched"])
    rows, outside = plane(device, "device"), plane(device, "pageable")
    device._locked[outside.untyped_storage().data_ptr()] = outside  # which it is not
    with pytest.raises(TransferError, match=r"toy:0, stream backup: cuMem.*: invalid argument"):
        device.stream(Purpose.BACKUP).copy([[PlaneCopy(0, rows, outside, READ, WRITE)]])


@pytest.mark.parametrize("n_bytes", [1, 4095, 4096, 100_001])
def test_memory_is_page_locked_where_it_is_and_unlocked_with_its_last_tensor(n_bytes: int) -> None:
    before = TOY.n_locked()
    memory = page_locked(DRIVER, n_bytes)
    assert (len(memory), int(memory.sum())) == (n_bytes, 0)
    memory.fill_(1)
    view = memory[-1:]
    assert view.is_pinned()
    del memory
    gc.collect()
    assert TOY.n_locked() == before + 1
    del view
    gc.collect()
    assert TOY.n_locked() == before


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no large pages"
)
def test_page_locked_memory_asks_for_large_pages() -> None:
    memory = page_locked(DRIVER, 8 << 20)
    _, _, here = Path("/proc/self/smaps").read_text().partition(f"{memory.data_ptr():x}-")
    flags = here[here.index("VmFlags:") :].splitlines()[0]
    assert "hg" in flags.split()


def test_memory_of_a_lost_device_goes_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    memory = page_locked(DRIVER, 4096)
    TOY.lose(True)
    del memory
    gc.collect()
    assert told == []


def test_more_page_locked_memory_than_there_is_is_refused() -> None:
    with pytest.raises(MemoryError, match="page-locked bytes of the host: cuMemHostRegister_v2: o"):
        page_locked(DRIVER, (1 << 32) + 4096)


def test_a_table_is_filled_again_when_the_kernel_that_read_it_has_ended() -> None:
    device = Accelerator("toy", CopySizes(), Ways())
    tables = Tables(device.page_locked_for_now)
    stream = device.stream(Purpose.LOAD_BACK).raw
    kernel = plane(device, "device")
    TOY.hold()
    with stream:
        for n in (4, 5000, 4):
            numbers = np.arange(n, dtype=np.int64)
            table = tables.fill([numbers, numbers + 1, numbers + 2])
            kernel.fill_(n)
            table.read(stream)
    assert len(tables) == 3
    assert not table.is_free()
    TOY.release()
    stream.synchronize()
    assert table.numbers[:12].tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5]
    with stream:
        assert tables.fill([numbers]).is_free()
    assert len(tables) == 3


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("from_device", [True, False])
def test_the_kernel_copies_in_the_interpreter(*, from_device: bool) -> None:
    from kvgraft_accelerator.kernels import KernelCopies

    without = Accelerator("toy", CopySizes(), Ways())
    ways = Ways(kernel=KernelCopies(without.device, without.page_locked_for_now))
    device = Accelerator("toy", CopySizes(), ways)
    on_device, locked = plane(device, "device"), plane(device, "page-locked")
    pair = (on_device, locked) if from_device else (locked, on_device)
    wanted = plane(device, "pageable")
    run_copy(PlaneCopy(0, wanted.clone(), wanted, READ, WRITE))
    fragments = Fragmenter().fragments([PlaneCopy(0, *pair, READ, WRITE)])
    stream = device.stream(Purpose.LOAD_BACK)
    stream.wait(device.compute().record())
    stream.move(fragments)
    assert stream.record().wait(10)
    assert pair[1].cpu().equal(wanted)


def test_the_benchmark_of_copies_measures_and_gets_its_bytes_back() -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "device_copies.py"
    spec = spec_from_file_location("device_copies", path)
    assert spec is not None
    assert spec.loader is not None
    benchmark = sys.modules["device_copies"] = module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    sizes = CopySizes(
        1 << 16, 8192, 2048, piece_nbytes=2048, few_nbytes=1024, first_nbytes=3 * 4096
    )
    device = Accelerator("toy", sizes, WAYS["both"])
    rows = (1024, 4096, 16384)
    extent = benchmark.Extent(1 << 18, 1 << 18, rows, 4, 8, 2, 2, 1, rows)
    found = benchmark.measure(device, extent)
    assert len(found) == 3 + 6 * len(rows) + 1 + 2 * len(rows)
    assert {row.unit for row in found} == {
        "GB/s",
        "of one copy",
        "of two copies",
        "µs/piece",
        "ms",
        "%",
    }
    notes = {row.name: row.note for row in found}
    # 14 parts of the ring: 3 slabs, then 5 each; neighbours of HOST are one piece
    moved = "batched 14 calls 41 pieces, kernel 14 calls 256 pieces"
    assert notes["to HOST, rows of 1 KiB"] == moved


def test_a_device_without_streams_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"device 'xpu': torch .* has no streams for it, "):
        Accelerator("xpu")
    with pytest.raises(ConfigError, match="device 'xpu': no XPU device here; use cpu"):
        Cache.open(["full"], device_tokens=64, device="xpu")


# -- the cache


def served(cache: Cache, tokens: Sequence[int]) -> torch.Tensor:
    """Compute a prompt, as stamps; the bytes of its pages as the device has them afterwards."""
    assert cache.drain()
    request = cache.begin(TokenKey(tokens), reserve=0)
    assert cache.admit(request).admitted
    cache.load_back(request)
    assert cache.drain()
    assert request.ready
    assert not request.load_failed
    (mounted,) = cache.mounted
    start = request.computed
    while request.computed < request.prompt:
        n = cache.next_chunk(request)
        assert cache.allocate(request, n)
        for page in range(request.computed // 2, (request.computed + n) // 2):
            slot = int(cache.table(request, "full")[page])
            for index, lanes in enumerate(mounted.component.device.lanes):
                lanes[slot] = 1000 * index + tokens[2 * page]
        cache.computed(request, n)
    table = torch.tensor(cache.table(request, "full")[: len(tokens) // 2].tolist())
    found = torch.stack([lanes.cpu()[table][:, 0] for lanes in mounted.component.device.lanes])
    cache.finish(request)
    served.computed = request.prompt - start  # type: ignore[attr-defined]
    return found


def settings() -> CacheConfig:
    return CacheConfig(
        components={"full": {"n_layers": 2, "n_kv_heads": 1, "head_dim": 16}},
        page_size=2,
        device_tokens=64,
        host_tokens=256,
        write_policy=WritePolicy.WRITE_THROUGH,
        device="toy",
    )


def test_prefixes_go_to_host_and_come_back() -> None:
    cache = Cache(settings())
    engine = cache.journal.engine
    assert isinstance(engine, StreamTransferEngine)
    (mounted,) = cache.mounted
    assert mounted.component.host is not None
    assert mounted.component.host.slab.is_pinned()
    prompts = [[100 * n, *range(100 * n, 100 * n + 19)] for n in range(4)]
    for tokens in prompts:
        served(cache, tokens)
    assert cache.drain()
    cache.evict("full", 32)
    again = served(cache, prompts[2])
    assert served.computed == 2  # type: ignore[attr-defined]
    wanted = torch.tensor(
        [[1000 * index + each for each in prompts[2][::2]] for index in range(len(again))]
    )
    assert again.equal(wanted)
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])
def test_bytes_are_right_where_a_backup_waits_for_compute(
    monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    if not waits:
        start = streams._Lane.start
        monkeypatch.setattr(streams._Lane, "start", lambda self, ticket, _: start(self, ticket, ()))
    cache = Cache(settings())
    (mounted,) = cache.mounted
    tokens = list(range(40))
    request = cache.begin(TokenKey(tokens), reserve=0)
    assert cache.admit(request).admitted
    assert cache.allocate(request, len(tokens))
    TOY.hold()  # the model is far behind when its backup is asked for
    for page, slot in enumerate(cache.table(request, "full").tolist()):
        for lanes in mounted.component.device.lanes:
            lanes[slot] = 1000 + page
    cache.computed(request, len(tokens))
    cache.finish(request)
    TOY.release()
    assert cache.drain()
    cache.evict("full", 20)
    again = cache.begin(TokenKey([*tokens, 99]), reserve=0)
    assert cache.admit(again).admitted
    cache.load_back(again)
    assert cache.drain()
    assert again.computed == len(tokens)
    table = cache.table(again, "full")[: len(tokens) // 2].tolist()
    right = torch.arange(1000, 1020)
    read = [
        lanes.cpu()[table][:, 0].equal(right.to(lanes)) for lanes in mounted.component.device.lanes
    ]
    assert all(read) == waits
    cache.abort(again)
    cache.close()


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_random_requests_read_the_bytes_that_went_through_rings(policy: WritePolicy) -> None:
    sizes = CopySizes(3072, 512, 100, piece_nbytes=128, group_nbytes=256, few_nbytes=100)
    device = Accelerator("toy", sizes, WAYS["both"])
    with torch.Stream("toy"):  # the toy's call refuses the default stream, as CUDA's does
        player = TorchPlayer(device, ("full", "swa", "mamba"), policy)
        player.play(random.Random(str(policy)).randrange, 150)
        player.close()


def test_a_device_that_is_lost_ends_in_tickets_and_lets_the_cache_go() -> None:
    parts = parts_of(parse_config(lost.settings("toy")))
    parts.runtime = Accelerator("toy", CopySizes(), Ways())  # an interpreted kernel would wait
    cache = Cache(parts.config, parts=parts)
    lost.lose_amid_copies(cache, TOY.hold, lambda: TOY.lose(True))
