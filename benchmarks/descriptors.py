"""The scheduler's share of a copy: processor time per page and plane, and Python calls.

A transfer of scattered pages through the engine of devices, on a simulated device that is given
every copy and runs none: pairing the planes, making arrays of addresses and sizes, choosing the
way of each piece. Beside it the CPU engine, whose worker moves the rows itself. The bar is 1 µs per
page and plane. Calls do not grow with the pages where nothing is done in Python for each piece.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Sequence
from time import thread_time_ns
from typing import Any

import numpy as np
import torch
from _measure import Figure, arguments, figures, grid, heading

from kvgraft import Component, Everything, Reach
from kvgraft.pools import DevicePool, HostMirror, PlaneSpec
from kvgraft.pools.plan import PoolPlan
from kvgraft.transfers import PlaneCopy, pair_planes
from kvgraft.transfers.engine import Ticket, run_layers
from kvgraft.types import Direction, TransferQuery
from kvgraft_accelerator.fragments import Fragments, Rows
from kvgraft_accelerator.protocol import CopySizes
from kvgraft_accelerator.streams import StreamTransferEngine
from kvgraft_accelerator.ways import Ways, parted
from kvgraft_testing.simulated import SimulatedDevice
from kvgraft_testing.simulated.streams import SimulatedStream, Work

N_LAYERS, N_SLOTS = 32, 1024
PLANES = [
    PlaneSpec(layer, name, (16, 16), torch.bfloat16)
    for layer in range(N_LAYERS)
    for name in ("k", "v")
]
"""Rows of 512 bytes: calls are measured, and not bytes."""

BAR_US = 1.0
"""Of processor time per page and plane."""

NOTHING = Fragments(*np.zeros((3, 0), np.int64))

BATCH_NBYTES = 256
"""Pieces of this size and more are batched: all that are copied to or from the host."""


class Nowhere:
    """Stands for the driver's call and the kernel."""

    def __call__(self, fragments: Fragments, stream: torch.Stream) -> None:
        """Nothing is moved."""

    def move_rows(self, rows: Rows, stream: torch.Stream) -> None:
        """Nothing is moved."""


class ToldDevice(SimulatedDevice):
    """Is given copies as an accelerator is, and runs none."""

    ways = Ways(Nowhere(), Nowhere())

    def submit_rows(self, stream: SimulatedStream, rows: Rows) -> None:
        """The kernel gets the rows, and makes their pieces itself."""
        self.submit_moves(stream, NOTHING)

    def _moves(self, fragments: Fragments) -> list[Callable[[Work], None]]:
        for way, some in parted(self.ways, self.sizes, fragments, crosses_bus=True):
            way(some, None)  # type: ignore[arg-type]
        return []


def pools(device: SimulatedDevice | None) -> Component:
    """A pool and its mirror, on a device or on the CPU."""
    with PoolPlan(runtime=device).building("pages"):
        name = "cpu" if device is None else device.device
        pool, mirror = DevicePool(PLANES, N_SLOTS, name), HostMirror(PLANES, N_SLOTS)
    return Component(Reach(Everything()), pool, mirror)


def slots(n: int, seed: int) -> bytes:
    """Scattered ones."""
    drawn = random.Random(seed).sample(range(0, N_SLOTS, 1 + (n <= N_SLOTS // 2)), n)
    return np.array(drawn, np.int32).tobytes()


def measured(transfer: Callable[[], object], end: Callable[[], object], turns: int) -> float:
    """Median processor time of this thread in ns."""
    times = []
    for turn in range(turns + 2):
        start = thread_time_ns()
        transfer()
        took = thread_time_ns() - start
        end()
        if turn > 1:
            times.append(took)
    return statistics.median(times)


def calls(transfer: Callable[[], object]) -> int:
    """Calls of Python's functions and of C's."""
    n = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal n
        n += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        transfer()
    finally:
        sys.setprofile(None)
    return n


def nothing() -> None:
    """The CPU's copies are done."""


def by_cpu(copies: Sequence[PlaneCopy]) -> None:
    """The work of a worker of the CPU engine."""
    run_layers(Ticket(copies))


def main() -> None:
    quick = arguments(__doc__).parse_args().quick
    turns = 10 if quick else 60
    torch.set_num_threads(1)
    heading("descriptors", layers=N_LAYERS, planes=len(PLANES), row_nbytes=512, turns=turns)
    on_cpu = pools(None)
    rows = []
    staged = CopySizes(batched_nbytes=BATCH_NBYTES, few_nbytes=1)
    straight = staged._replace(straight_nbytes=0)
    ways = {
        "load-back, scattered": (Direction.LOAD_BACK, staged),
        "load-back, straight": (Direction.LOAD_BACK, straight),
        "backup, gathered": (Direction.BACKUP, staged),
        "backup, straight": (Direction.BACKUP, straight),
    }
    for name, (direction, sizes) in ways.items():
        device = ToldDevice(sizes=sizes)
        engine, there = StreamTransferEngine(device), pools(device)
        for n in (16, 64, 256, N_SLOTS):
            query = TransferQuery(direction, slots(n, 1), slots(n, 2))

            def submit() -> None:
                engine.submit(pair_planes(there, query))  # noqa: B023 - called at once

            def move() -> None:
                by_cpu(pair_planes(on_cpu, query))  # noqa: B023 - called at once

            n_fragments = n * len(PLANES)
            ours = measured(submit, device.synchronize, turns) / n_fragments / 1e3
            theirs = measured(move, nothing, turns) / n_fragments / 1e3
            figures([Figure("Processor time per page and plane", f"{name}, {n} pages", ours)])
            verdict = "ok" if ours <= BAR_US else "over"
            n_calls = calls(submit)
            device.synchronize()
            rows.append([name, str(n), f"{ours:.3f}", verdict, str(n_calls), f"{theirs:.3f}"])
    grid(["transfer", "pages", "µs each", f"bar {BAR_US:.0f}", "calls", "CPU engine, µs"], rows)


if __name__ == "__main__":
    main()
