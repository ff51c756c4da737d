"""A process that replays one workload at the sizes it is told, and says how far it is.

It is started with the number of a file descriptor, the other end of which its parent has.
"""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from kvgraft.errors import KvgraftError

__all__ = ["Done", "Progress", "Refused", "main"]

STEPS = 100
"""Progress is told about this often per replay."""


class Progress(NamedTuple):
    """Requests that ended, of those expected."""

    ended: int
    expected: int


class Done(NamedTuple):
    """A replay ended: its result, without the parts that grow with the workload."""

    result: dict[str, Any]


class Refused(NamedTuple):
    """A replay could not be run."""

    message: str


LONG = ("timeline", "sources", "tree")


def main(descriptor: int) -> None:
    """Serve until the parent closes its end."""
    import torch

    from kvgraft_replay.replay import replay

    torch.set_num_threads(1)
    with Connection(descriptor) as parent:
        try:
            workload, settings = parent.recv()
            while True:
                settings.cache = parent.recv()
                try:
                    result = replay(workload, settings, progress=_teller(parent))
                except KvgraftError as error:
                    parent.send(Refused(str(error)))
                    continue
                kept: Mapping[str, Any] = {k: v for k, v in result.items() if k not in LONG}
                parent.send(Done(dict(kept)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _teller(parent: Connection) -> Any:
    told = 0

    def tell(ended: int, expected: int) -> None:
        nonlocal told
        step = ended * STEPS // max(expected, 1)
        if step > told:
            told = step
            parent.send(Progress(ended, expected))

    return tell
