"""A process that replays one workload at requested sizes, and reports its progress.

Its argument is a file descriptor of a pipe to its parent.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from kvgraft.errors import KvgraftError

if TYPE_CHECKING:
    from kvgraft_replay.replay import ReplaySettings
    from kvgraft_replay.workload import Workload

__all__ = ["Done", "Progress", "Refused", "main", "replay_one"]

STEPS = 100
"""Progress reports per replay, about."""


class Progress(NamedTuple):
    """Ended and expected requests."""

    ended: int
    expected: int


class Done(NamedTuple):
    """A replay ended: its result, without the parts that grow with the workload."""

    result: dict[str, Any]


class Refused(NamedTuple):
    """A replay could not be run."""

    message: str


LONG = ("timeline", "sources", "tree")


def replay_one(
    workload: Workload, settings: ReplaySettings, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """A replay's result, without the parts that grow with the workload.

    Raises:
        KvgraftError: it cannot be run.
    """
    import torch

    from kvgraft_replay.replay import replay

    torch.set_num_threads(1)
    result = replay(workload, settings, progress=progress)
    return {name: value for name, value in result.items() if name not in LONG}


def main(descriptor: int) -> None:
    """Serve until the parent closes its end."""
    with Connection(descriptor) as parent:
        try:
            workload, settings = parent.recv()
            while True:
                settings.cache = parent.recv()
                try:
                    result = replay_one(workload, settings, _teller(parent))
                except KvgraftError as error:
                    parent.send(Refused(str(error)))
                else:
                    parent.send(Done(result))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _teller(parent: Connection) -> Callable[[int, int], None]:
    """Reports progress to the parent, not more often than visible."""
    told = 0

    def tell(ended: int, expected: int) -> None:
        nonlocal told
        step = ended * STEPS // max(expected, 1)
        if step > told:
            told = step
            parent.send(Progress(ended, expected))

    return tell
