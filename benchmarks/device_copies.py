"""Copies between a GPU and page-locked memory, beside one large copy of torch's.

    .venv/bin/python benchmarks/device_copies.py --json copies.json
    .venv/bin/python benchmarks/device_copies.py --sizes '' piece_nbytes=524288,few_nbytes=1

For rows of several sizes: pages of a pool with 64 planes go to HOST and come back through the
transfer engine, as a cache sends them, in no order and with random bytes. HOST has twice the pages,
and a half of them, drawn at random, takes part: pages that are neighbours there cross the bus as
one piece, and two are neighbours on average. Shares are of the speed of a 1 GiB `copy_` in the same
direction, the median of several, in the same process. Both directions at once, eight transfers in
turn, are compared with two such copies at once. The last lines are the time that a matrix product
loses beside copies: pairs of runs, one with copies and one without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvgraft.devices import PlaneCopy
from kvgraft_accelerator import Accelerator
from kvgraft_accelerator.fragments import Fragments, Rows
from kvgraft_accelerator.protocol import CopySizes
from kvgraft_accelerator.streams import StreamTicket, StreamTransferEngine
from kvgraft_accelerator.ways import Way, Ways

KIB = 1 << 10
TO_HOST, TO_DEVICE = "to HOST", "to DEVICE"


class Extent(NamedTuple):
    """How much is moved.

    Attributes:
        whole_nbytes: the copy that others are compared with.
        pages_nbytes: all pages of one transfer.
        rows: bytes of a page in one plane, of each comparison.
        n_planes: planes of a page, two for each layer.
        side: of the square matrices.
        n_products: multiplied in one run.
        pairs: runs with copies, each with one without.
        repeats: times that each transfer is done; the median counts.
        beside: rows whose copies run beside products.
    """

    whole_nbytes: int = 1 << 30
    pages_nbytes: int = 1 << 29
    rows: Sequence[int] = (4 * KIB, 8 * KIB, 16 * KIB, 28 * KIB, 64 * KIB, 256 * KIB)
    n_planes: int = 64
    side: int = 8192
    n_products: int = 8
    pairs: int = 16
    repeats: int = 5
    beside: Sequence[int] = (16 * KIB, 256 * KIB)


class Row(NamedTuple):
    """One measurement.

    Attributes:
        name: what moved where.
        value: in `unit`.
        unit: of value and target.
        target: the bound that it should keep, None without one.
        met: whether it does.
        note: what else is to be known of it.
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    met: bool = True
    note: str = ""


class Counted:
    """A way that counts its calls, and the pieces that went it.

    Args:
        way: which.
    """

    def __init__(self, way: Any) -> None:
        self.way = way
        self.calls = self.pieces = 0

    def __call__(self, fragments: Fragments, stream: torch.Stream) -> None:
        """Count, and submit."""
        self.calls += 1
        self.pieces += len(fragments.nbytes)
        self.way(fragments, stream)

    def move_rows(self, rows: Rows, stream: torch.Stream) -> None:
        """Count, and submit."""
        self.calls += 1
        self.pieces += rows.planes.shape[1] * len(rows.sources)
        self.way.move_rows(rows, stream)


def counted(device: Accelerator, sizes: CopySizes | None = None) -> Accelerator:
    """The same device with ways that count."""
    ways = Ways(*(None if way is None else Counted(_way(way)) for way in device.ways))
    return Accelerator(str(device.device), sizes or device.sizes, ways)


def _way(way: Way) -> Way:
    return way.way if isinstance(way, Counted) else way


def told(device: Accelerator) -> str:
    """The calls and pieces of each way since the last time."""
    found = []
    for name, way in zip(Ways._fields, device.ways):
        if isinstance(way, Counted):
            if way.calls:
                found.append(f"{name} {way.calls} calls {way.pieces} pieces")
            way.calls = way.pieces = 0
    return ", ".join(found) or "plain"


class Pages:
    """Pages of a pool and of the host's slabs, with rows of one size.

    Args:
        device: where.
        memory: of the device.
        locked: twice as much of the host.
        nbytes: of a row.
        n_planes: of a page.
    """

    def __init__(
        self,
        device: Accelerator,
        memory: torch.Tensor,
        locked: torch.Tensor,
        nbytes: int,
        n_planes: int,
    ) -> None:
        self.engine = StreamTransferEngine(device)
        self.device, self.nbytes = device, nbytes
        self.n_pages = len(memory) // (nbytes * n_planes)
        self.moved_nbytes = self.n_pages * nbytes * n_planes
        self.n_pieces = self.n_pages * n_planes
        self.memory = memory[: self.moved_nbytes]
        words = self.memory.view(torch.int64).view(n_planes, self.n_pages, nbytes // 8)
        slabs = locked[: 2 * self.moved_nbytes].view(torch.int64).view(2 * self.n_pages, -1)
        width = nbytes // 8
        self.planes = list(words)
        self.lanes = [slabs[:, at * width : (at + 1) * width] for at in range(n_planes)]
        draw = torch.Generator().manual_seed(0)
        self.here = torch.randperm(self.n_pages, generator=draw)
        self.there = torch.randperm(2 * self.n_pages, generator=draw)[: self.n_pages]

    def copies(self, name: str, pages: slice = slice(None)) -> list[PlaneCopy]:
        """Some pages, one way."""
        here, there = self.here[pages], self.there[pages]
        if name == TO_HOST:
            pairs = zip(self.planes, self.lanes)
            return [PlaneCopy(at // 2, *pair, here, there) for at, pair in enumerate(pairs)]
        pairs = zip(self.lanes, self.planes)
        return [PlaneCopy(at // 2, *pair, there, here) for at, pair in enumerate(pairs)]

    def submit(self, copies: Sequence[PlaneCopy]) -> StreamTicket:
        """Begin a transfer."""
        ticket = self.engine.submit(copies)
        assert isinstance(ticket, StreamTicket)
        return ticket


def measure(device: Accelerator, extent: Extent) -> list[Row]:
    """All of it, with the sizes that the device has."""
    device = counted(device)
    memory = device.zeros((extent.pages_nbytes,), torch.uint8, "benchmark")
    words = memory.view(torch.int32)
    words.copy_(torch.randint(-(1 << 31), 1 << 31, words.shape, dtype=torch.int32))
    locked = device.page_locked_for_now(2 * extent.pages_nbytes)
    whole = _whole(device, extent)
    rows = [Row(f"{name}, one copy", each / 1e9, "GB/s") for name, each in whole.items()]
    for nbytes in extent.rows:
        pages = Pages(device, memory, locked, nbytes, extent.n_planes)
        rows += _pages(pages, extent, whole)
        pages.engine.close()
    rows += _products(device, extent, memory, locked)
    return rows


def _whole(device: Accelerator, extent: Extent) -> dict[str, float]:
    """Bytes per second of one large copy each way, and of both at once together."""
    on_device = device.zeros((2, extent.whole_nbytes), torch.uint8, "benchmark")
    on_host = device.page_locked_for_now(2 * extent.whole_nbytes).view(2, -1)
    streams = [torch.Stream(device.device) for _ in range(2)]

    def to_host() -> None:
        with streams[0]:
            on_host[0].copy_(on_device[0], non_blocking=True)

    def to_device() -> None:
        with streams[1]:
            on_device[1].copy_(on_host[1], non_blocking=True)

    def both() -> None:
        to_host()
        to_device()

    ways: dict[str, tuple[Callable[[], None], int]]
    ways = {TO_HOST: (to_host, 1), TO_DEVICE: (to_device, 1), "both": (both, 2)}
    return {
        name: n * extent.whole_nbytes / statistics.median(_timed(device, extent, copy))
        for name, (copy, n) in ways.items()
    }


def _pages(pages: Pages, extent: Extent, whole: Mapping[str, float]) -> Iterator[Row]:
    """Pages with rows of one size, there and back through the engine."""
    wanted = pages.memory.clone()
    what = f"rows of {pages.nbytes // KIB} KiB"
    for name, target in (
        (TO_HOST, 0.95),
        (TO_DEVICE, 0.85 if pages.nbytes < 64 * KIB else 0.95),
    ):
        cpu_s: list[float] = []
        first_s: list[float] = []
        move = partial(_move, pages, pages.copies(name), cpu_s, first_s)
        told(pages.device)
        move()
        note = told(pages.device)
        seconds = statistics.median(_timed(pages.device, extent, move))
        share = pages.moved_nbytes / seconds / whole[name]
        yield Row(f"{name}, {what}", share, "of one copy", target, share >= target, note)
        per_piece = 1e6 * statistics.median(cpu_s[2:]) / pages.n_pieces
        yield Row(f"{name}, {what}, CPU", per_piece, "µs/piece", 1.0, per_piece <= 1.0)
        if name == TO_DEVICE:
            first_ms = 1e3 * statistics.median(first_s[2:])
            note = f"all layers {1e3 * seconds:.3f} ms"
            yield Row(f"{name}, {what}, first layer", first_ms, "ms", note=note)
        else:
            pages.memory.zero_()
    if not pages.memory.equal(wanted):
        raise RuntimeError(f"rows of {pages.nbytes} bytes: other bytes came back")
    ends = [pages.n_pages * eighth // 8 for eighth in range(9)]
    copies = [
        pages.copies(TO_DEVICE if at % 2 else TO_HOST, slice(*ends[at : at + 2])) for at in range(8)
    ]

    def both() -> None:
        tickets = [pages.submit(some) for some in copies]
        torch.accelerator.synchronize(pages.device.device)
        for ticket in tickets:
            _expect_moved(ticket)

    share = pages.moved_nbytes / statistics.median(_timed(pages.device, extent, both))
    yield Row(f"both directions, {what}", share / whole["both"], "of two copies")


def _move(
    pages: Pages, copies: Sequence[PlaneCopy], cpu_s: list[float], first_s: list[float]
) -> None:
    """One transfer; the processor's time to submit it, and the time until the first layer."""
    began, began_cpu = time.perf_counter(), time.thread_time()
    ticket = pages.submit(copies)
    cpu_s.append(time.thread_time() - began_cpu)
    first = ticket.layer_event(0)
    first.event.synchronize()  # type: ignore[union-attr]
    first_s.append(time.perf_counter() - began)
    torch.accelerator.synchronize(pages.device.device)
    _expect_moved(ticket)


def _expect_moved(ticket: StreamTicket) -> None:
    if not ticket.wait(60) or ticket.error is not None:
        raise RuntimeError(f"a transfer: {ticket.error or 'not done after 60 s'}")


def _products(
    device: Accelerator, extent: Extent, memory: torch.Tensor, locked: torch.Tensor
) -> Iterator[Row]:
    """The time that matrix products lose beside copies, by pairs of runs."""
    shape = (extent.side, extent.side)
    left = torch.randn(shape, dtype=torch.float32).to(device.device).to(torch.bfloat16)
    into = torch.empty_like(left)
    idle = torch.Stream(device.device)

    def run(beside: Callable[[], object]) -> float:
        """The products begin first; copies do not wait for them."""
        torch.accelerator.synchronize(device.device)
        began = time.perf_counter()
        for _ in range(extent.n_products):
            torch.mm(left, left, out=into)
        ended = torch.accelerator.current_stream(device.device).record_event()
        with idle:
            beside()
        ended.synchronize()
        return time.perf_counter() - began

    for _ in range(2 * extent.pairs):  # until the clocks are those of work
        run(lambda: None)
    yield _lost(extent, run, "nothing", lambda: None, None)
    for nbytes in extent.beside:
        pages = Pages(device, memory, locked, nbytes, extent.n_planes)
        for name in (TO_HOST, TO_DEVICE):
            copies = pages.copies(name)
            told(device)
            pages.submit(copies)
            note = told(device)
            what = f"copies {name}, rows of {nbytes // KIB} KiB"
            yield _lost(extent, run, what, partial(pages.submit, copies), 2.0, note)
        pages.engine.close()


def _lost(
    extent: Extent,
    run: Callable[[Callable[[], object]], float],
    what: str,
    beside: Callable[[], object],
    target: float | None,
    note: str = "",
) -> Row:
    lost = []
    for pair in range(extent.pairs):
        order: list[Any] = [beside, lambda: None]
        times = [run(each) for each in (order if pair % 2 else order[::-1])]
        with_copies, alone = times if pair % 2 else times[::-1]
        lost.append(100 * (with_copies / alone - 1))
    low, median, high = statistics.quantiles(lost, n=4)
    note = f"quartiles {low:+.2f} {high:+.2f}{', ' if note else ''}{note}"
    met = target is None or median <= target
    return Row(f"matrix products beside {what} lose", median, "%", target, met, note)


def _timed(device: Accelerator, extent: Extent, submit: Callable[[], object]) -> list[float]:
    """Seconds until the device is through, each time; it ran once before."""
    found = []
    for _ in range(1 + extent.repeats):
        torch.accelerator.synchronize(device.device)
        began = time.perf_counter()
        submit()
        torch.accelerator.synchronize(device.device)
        found.append(time.perf_counter() - began)
    return found[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write it as JSON where that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    parser.add_argument(
        "--sizes", nargs="+", default=[""], help="sets of NAME=BYTES,... of CopySizes to try"
    )
    parser.add_argument("--programs", type=int, help="of the kernel; by default multiprocessors")
    given = parser.parse_args(arguments)
    module = torch.get_device_module(given.device)
    if not module.is_available():
        print(f"no {given.device.upper()} device here: nothing was measured")
        return 0
    device = Accelerator(given.device)
    if given.programs is not None and device.ways.kernel is not None:
        device.ways.kernel.programs = given.programs  # type: ignore[attr-defined]
    print(f"{module.get_device_name(device.device)}, torch {torch.__version__}")
    print(f"batched: {device.ways.batched is not None}, kernel: {device.ways.kernel is not None}")
    programs = getattr(device.ways.kernel, "programs", None)
    found = []
    for text in given.sizes:
        pairs = [each.partition("=") for each in text.split(",") if each]
        named = {name: int(value) for name, _, value in pairs}
        tried = counted(device, CopySizes()._replace(**named))
        ring_nbytes = StreamTransferEngine(tried).ring_nbytes
        print(f"{tried.sizes}, programs {programs}, rings of {ring_nbytes} bytes together")
        for row in measure(tried, Extent()):
            verdict = "" if row.target is None else "met" if row.met else "MISSED"
            told_target = "" if row.target is None else f"target {row.target}: {verdict}"
            print(f"{row.name:56} {row.value:8.3f} {row.unit:12} {told_target:20} {row.note}")
            found.append({**row._asdict(), "sizes": text})
        sys.stdout.flush()
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
