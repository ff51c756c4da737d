"""Copies between a GPU and page-locked memory, beside one large copy of torch's.

    .venv/bin/python benchmarks/device_copies.py --json copies.json

For rows of several sizes: pages of a pool with 64 planes go to HOST and come back through the
transfer engine, as a cache sends them. Shares are of the speed of a 1 GiB `copy_` in the same
direction, the median of several, in the same process. The last line is the time that a matrix
product loses while batched copies run beside it. Nobody has run it on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from kvgraft.devices import PlaneCopy
from kvgraft_accelerator import Accelerator
from kvgraft_accelerator.protocol import Purpose
from kvgraft_accelerator.streams import StreamTransferEngine

KIB = 1 << 10


class Extent(NamedTuple):
    """How much is moved.

    Attributes:
        whole_nbytes: the copy that others are compared with.
        pages_nbytes: all pages of one transfer.
        rows: bytes of a page in one plane, of each comparison.
        n_planes: planes of a page.
        side: of the square matrices.
        repeats: times that each is done; the median counts.
    """

    whole_nbytes: int = 1 << 30
    pages_nbytes: int = 1 << 29
    rows: Sequence[int] = (4 * KIB, 8 * KIB, 16 * KIB, 28 * KIB, 64 * KIB, 256 * KIB)
    n_planes: int = 64
    side: int = 8192
    repeats: int = 5


class Row(NamedTuple):
    """One measurement.

    Attributes:
        name: what moved where.
        value: in `unit`.
        unit: of value and target.
        target: the bound that it should keep, None without one.
        met: whether it does.
    """

    name: str
    value: float
    unit: str
    target: float | None
    met: bool


def measure(device: Accelerator, extent: Extent) -> list[Row]:
    """All of it."""
    rows = []
    whole = _whole(device, extent)
    for name, nbytes_per_s in whole.items():
        rows.append(Row(f"{name}, one copy", nbytes_per_s / 1e9, "GB/s", None, met=True))
    for nbytes in extent.rows:
        rows += _pages(device, extent, nbytes, whole)
    rows.append(_matmul(device, extent))
    return rows


def _whole(device: Accelerator, extent: Extent) -> dict[str, float]:
    """Bytes per second of one large copy each way."""
    on_device = device.zeros((extent.whole_nbytes,), torch.uint8, "benchmark")
    on_host = device.page_locked_for_now(extent.whole_nbytes)
    to_host = _median(device, extent, lambda: on_host.copy_(on_device, non_blocking=True))
    to_device = _median(device, extent, lambda: on_device.copy_(on_host, non_blocking=True))
    return {"to HOST": extent.whole_nbytes / to_host, "to DEVICE": extent.whole_nbytes / to_device}


def _pages(device: Accelerator, extent: Extent, nbytes: int, whole: dict[str, float]) -> list[Row]:
    """Pages with rows of one size, there and back through the engine."""
    n_pages = max(4, extent.pages_nbytes // (nbytes * extent.n_planes))
    planes = [
        device.zeros((n_pages, nbytes // 8), torch.int64, "benchmark")
        for _ in range(extent.n_planes)
    ]
    slab_nbytes = n_pages * nbytes * extent.n_planes
    slabs = device.page_locked_for_now(slab_nbytes).view(torch.int64).view(n_pages, -1)
    width = nbytes // 8
    lanes = [slabs[:, at * width : (at + 1) * width] for at in range(extent.n_planes)]
    draw = torch.Generator().manual_seed(0)
    here, there = (torch.randperm(n_pages, generator=draw) for _ in range(2))
    backup = [PlaneCopy(at, *pair, here, there) for at, pair in enumerate(zip(planes, lanes))]
    load = [PlaneCopy(at, *pair, there, here) for at, pair in enumerate(zip(lanes, planes))]
    for at, plane in enumerate(planes):
        plane.fill_(at + 1)
    engine = StreamTransferEngine(device)
    rows = []
    small = nbytes < 64 * KIB
    for name, copies, target in (
        ("to HOST", backup, 0.95),
        ("to DEVICE", load, 0.85 if small else 0.95),
    ):
        cpu_s: list[float] = []
        move = partial(_move, engine, copies, cpu_s)
        share = slab_nbytes / _median(device, extent, move) / whole[name]
        what = f"{name}, rows of {nbytes // KIB} KiB"
        rows.append(Row(what, share, "of one copy", target, met=share >= target))
        per_piece = 1e6 * statistics.median(cpu_s) / (n_pages * extent.n_planes)
        rows.append(Row(f"{what}, CPU", per_piece, "µs/piece", 1.0, met=per_piece <= 1.0))
    if not all(bool((plane.cpu() == at + 1).all()) for at, plane in enumerate(planes)):
        raise RuntimeError(f"rows of {nbytes} bytes: other bytes came back")
    engine.close()
    return rows


def _move(engine: StreamTransferEngine, copies: Sequence[PlaneCopy], cpu_s: list[float]) -> None:
    """One transfer; the processor's time for its submission is added to `cpu_s`."""
    began = time.thread_time()
    ticket = engine.submit(copies)
    cpu_s.append(time.thread_time() - began)
    if not ticket.wait(60) or ticket.error is not None:
        raise RuntimeError(f"a transfer: {ticket.error or 'not done after 60 s'}")


def _matmul(device: Accelerator, extent: Extent) -> Row:
    """The time that a matrix product loses beside copies of 256 KiB."""
    left = torch.ones((extent.side, extent.side), dtype=torch.bfloat16, device=device.device)
    nbytes = 256 * KIB
    n_rows = max(1, extent.pages_nbytes // nbytes)
    rows = device.zeros((n_rows, nbytes // 8), torch.int64, "benchmark")
    locked = device.page_locked_for_now(n_rows * nbytes).view(torch.int64).view(n_rows, -1)
    order = torch.randperm(n_rows, generator=torch.Generator().manual_seed(0))
    copies = [PlaneCopy(0, locked, rows, order, torch.arange(n_rows))]
    stream = device.stream(Purpose.LOAD_BACK)

    def products() -> None:
        for _ in range(20):
            torch.mm(left, left)

    def beside() -> None:
        for _ in range(4):
            stream.copy([copies])
        products()

    alone = _median(device, extent, products)
    loss = 100 * (_median(device, extent, beside) / alone - 1)
    name = "batched" if device.ways.batched is not None else "other"
    return Row(f"matrix products beside {name} copies lose", loss, "%", 2.0, met=loss <= 2.0)


def _median(device: Accelerator, extent: Extent, submit: Callable[[], object]) -> float:
    """Seconds from submission until the current stream is through; the others may go on."""
    found = []
    for _ in range(1 + extent.repeats):
        torch.accelerator.synchronize(device.device)
        began = time.perf_counter()
        submit()
        torch.accelerator.current_stream(device.device).synchronize()
        found.append(time.perf_counter() - began)
    torch.accelerator.synchronize(device.device)
    return statistics.median(found[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write it as JSON where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    given = parser.parse_args(arguments)
    module = torch.get_device_module(given.device)
    if not module.is_available():
        print(f"no {given.device.upper()} device here: nothing was measured")
        return 0
    device = Accelerator(given.device)
    print(f"{module.get_device_name(device.device)}, torch {torch.__version__}, {device.sizes}")
    print(f"batched: {device.ways.batched is not None}, kernel: {device.ways.kernel is not None}")
    rows = measure(device, Extent())
    for row in rows:
        told = (
            "" if row.target is None else f"target {row.target}: {'met' if row.met else 'MISSED'}"
        )
        print(f"{row.name:52} {row.value:9.3f} {row.unit:12} {told}")
    if given.json is not None:
        given.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
