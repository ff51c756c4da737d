"""Copying states of 48 layers in a device pool: calls of torch, and the host time that they take.

One state, and one state of each of 64 requests. `copy_slots` on this machine's processor; the copy
that devices make, `copy_rows`, run on the processor; and one plane after the other as before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from time import thread_time_ns
from typing import Any

import numpy as np
import torch
from _measure import Figure, arguments, figures, grid, heading
from torch.utils._python_dispatch import TorchDispatchMode

from kvgraft.pools import DevicePool, PlaneSpec, slot_index
from kvgraft.pools.device import copy_rows, stack_lanes

N_LAYERS, N_SLOTS, N_STATES = 48, 130, 64
PLANES = [
    spec
    for layer in range(N_LAYERS)
    for spec in (
        PlaneSpec(layer, "conv", (8, 3), torch.bfloat16),
        PlaneSpec(layer, "recurrent", (1, 4, 4), torch.float32),
    )
]
"""Small, as the cost of calls is measured: 48 and 64 bytes in each layer."""


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of torch inside its block."""

    n = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.n += 1
        return func(*args, **(kwargs or {}))


def slots(first: int, n: int) -> bytes:
    return np.arange(first, first + n, dtype=np.int32).tobytes()


def measured(copy: Callable[[], object], turns: int) -> tuple[int, float]:
    """Calls of torch, and the median time in ns."""
    copy()
    calls = Calls()  # type: ignore[no-untyped-call]
    with calls:
        copy()
    times = []
    for _ in range(turns):
        start = thread_time_ns()
        copy()
        times.append(thread_time_ns() - start)
    return calls.n, statistics.median(times)


def main() -> None:
    turns = 50 if arguments(__doc__).parse_args().quick else 500
    torch.set_num_threads(1)
    heading("copies of states", layers=N_LAYERS, turns=turns, device="cpu, one thread")
    pool = DevicePool(PLANES, N_SLOTS)
    stacks, lanes = stack_lanes(pool.lanes), pool.lanes

    def in_stacks(source: bytes, target: bytes) -> None:
        read, write = slot_index(source), slot_index(target)
        for stack in stacks:
            copy_rows(stack, read, write)

    def by_plane(source: bytes, target: bytes) -> None:
        read, write = slot_index(source), slot_index(target)
        for rows in lanes:
            rows[write] = rows[read]

    ways: dict[str, Callable[[bytes, bytes], None]] = {
        "on the CPU: copy_slots": pool.copy_slots,
        "as on a device: copy_rows": in_stacks,
        "plane by plane": by_plane,
    }
    rows = []
    for name, copy in ways.items():
        cells = [name]
        for n in (1, N_STATES):
            source, target = slots(0, n), slots(N_STATES, n)
            calls, ns = measured(lambda: copy(source, target), turns)  # noqa: B023 - called at once
            cells += [str(calls), f"{ns / 1e3:.1f}"]
            figures([Figure("States of 48 layers", f"{name}, {n} at once", ns / 1e3)])
        rows.append(cells)
    grid(["", "1 state: calls", "µs", f"{N_STATES} states: calls", "µs"], rows)


if __name__ == "__main__":
    main()
