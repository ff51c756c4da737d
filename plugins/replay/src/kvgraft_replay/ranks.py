"""Ranks of a replay: processes on this machine that replay the same workload, each on its cache."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from kvgraft.errors import KvgraftError
from kvgraft.optional import load_part

__all__ = ["started_ranks"]

START_S = 300.0
"""Longest wait for all processes to start."""

END_S = 30.0
"""Longest wait for the processes to end after rank 0 has."""

Run = Callable[[Any], object]
"""Replays on one rank; gets the process group."""


@contextmanager
def started_ranks(n_ranks: int, run: Run) -> Iterator[Any]:
    """Start the other ranks of a replay, each in a process; the caller is rank 0.

    The processes talk over the loopback interface.

    Args:
        n_ranks: number of ranks, the caller's included.
        run: called on the other ranks, with the process group; it can be pickled.

    Yields:
        The caller's process group; None for one rank.

    Raises:
        ConfigError: `kvgraft-ranks` is not installed.
    """
    if n_ranks == 1:
        yield None
        return
    load_part("ranks")
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgraft-ranks-"))
        meeting = Path(folder) / "meeting"
        others = [
            spawn.Process(target=_run_rank, args=(rank, n_ranks, meeting, run), daemon=True)
            for rank in range(1, n_ranks)
        ]
        for each in others:
            each.start()
            stack.callback(_end, each)
        yield stack.enter_context(_joined(0, n_ranks, meeting))


@contextmanager
def _joined(rank: int, n_ranks: int, meeting: Path) -> Iterator[Any]:
    import torch.distributed

    dist: Any = torch.distributed
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(meeting), n_ranks),
        rank=rank,
        world_size=n_ranks,
        timeout=timedelta(seconds=START_S),
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _run_rank(rank: int, n_ranks: int, meeting: Path, run: Run) -> None:
    try:
        with _joined(rank, n_ranks, meeting) as group:
            run(group)
    except KvgraftError as error:
        print(f"kvgraft: rank {rank}: {error}", file=sys.stderr)  # noqa: T201 - a process of its own
        sys.exit(1)


def _end(process: Any) -> None:
    process.join(END_S)
    if process.is_alive():
        process.kill()
