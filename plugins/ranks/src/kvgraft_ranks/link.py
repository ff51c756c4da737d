"""The process group: messages of one size from all ranks to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvgraft.errors import ConfigError
from kvgraft_ranks.errors import RanksError

__all__ = ["Link"]

LONGER = 2
"""The group gives an operation up after this multiple of the time for which a rank waits for it."""


class Link:
    """Gathers messages on the ranks of one process group.

    Args:
        group: a `torch.distributed` process group with a backend for the CPU, such as gloo; no
            other thread uses it.
        timeout_s: longest wait for the other ranks.

    Attributes:
        rank: this rank.
        size: number of ranks.

    Raises:
        ConfigError: no process group, or one without a backend for the CPU.
    """

    def __init__(self, group: Any, timeout_s: float) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"ranks {group!r:.40}; give a process group of torch.distributed, such as "
                "torch.distributed.group.WORLD after init_process_group('gloo')"
            )
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.timeout_s = timeout_s
        self._group = group
        options: Any = dist.distributed_c10d  # its stub leaves them out
        self._options = options.AllgatherOptions()
        self._options.timeout = timedelta(seconds=LONGER * timeout_s)
        self._work: Any = None
        self._gathered: list[torch.Tensor] = []

    def start(self, message: bytes) -> None:
        """Send this rank's message, as long as those of the others; returns at once.

        Raises:
            RanksError: the group does not work any more.
        """
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self._gathered = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            self._work = self._group.allgather([self._gathered], [mine], self._options)
        except RuntimeError as error:
            raise self._failed(error) from error

    def finish(self) -> Sequence[bytes]:
        """The messages that were started last, by rank; waits for them.

        Raises:
            RanksError: a rank is dead, or has not sent its message after `timeout_s`.
        """
        work, self._work = self._work, None
        try:
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise self._failed(error) from error
        return [each.numpy().tobytes() for each in self._gathered]

    def _failed(self, error: RuntimeError) -> RanksError:
        said = str(error).lower()
        reason = "does not answer: it hangs, or takes longer for a step"
        if "connection" in said or "read error" in said or "reset" in said:
            reason = "has ended: its connection is closed"
        return RanksError(
            f"ranks: rank {self.rank} of {self.size} waited for the others, at most "
            f"{self.timeout_s:g} s, and one of them {reason}; nothing is served any more: close "
            "the cache, and start all ranks again"
        )
