"""The engine of accelerators on a torch device: copies run early, and the host learns late.

Copies are submitted to the device at once, after the model's steps, and run when the device gets
there. The caller decides when the host learns that they ended or failed: then it waits for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgraft.errors import TransferError
from kvgraft.transfers import Fence, PlaneCopy, Ticket
from kvgraft_accelerator import Accelerator
from kvgraft_accelerator.protocol import CopySizes
from kvgraft_accelerator.streams import StreamTicket, StreamTransferEngine
from kvgraft_testing.machine.engines import PromptedTransferEngine

__all__ = ["PromptedAcceleratorEngine", "small_accelerator"]

SMALL = CopySizes(3072, 512, 100, piece_nbytes=128, group_nbytes=256, few_nbytes=100, n_streams=2)
"""For pools of some pages: copies take every way of the device, and the ring wraps around."""

DEVICE_S = 60.0
"""Seconds for which copies of some pages are waited for."""


def small_accelerator(name: str) -> Accelerator:
    """A torch device, for caches of some pages.

    Raises:
        ConfigError: torch lacks it here, or its streams.
    """
    return Accelerator(name, SMALL)


class _PromptedTicket(StreamTicket):
    """Ends as soon as somebody waits for it, or tells it to; see `StreamTicket`."""

    __slots__ = ("engine", "may_end")
    engine: PromptedAcceleratorEngine

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.may_end = False

    def wait(self, timeout_s: float) -> bool:
        del timeout_s
        if not self.done:
            self.engine.prompted(self)
        return self.done

    def end(self) -> None:
        """Learn how the copies ended."""
        self.may_end = True
        if not super()._look(DEVICE_S):
            self.finish(TransferError(f"the device did not end it within {DEVICE_S:.0f} s"))

    def _look(self, timeout_s: float | None, n_events: int | None = None) -> bool:
        return self.may_end and super()._look(timeout_s, n_events)


class _Streams(StreamTransferEngine):
    kind = _PromptedTicket


class PromptedAcceleratorEngine(PromptedTransferEngine):
    """Copies on streams of a torch device; see `PromptedTransferEngine`.

    Args:
        name: as torch names it.

    Raises:
        ConfigError: torch has it not here, or not its streams.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.runtime = small_accelerator(name)
        self._streams = _Streams(self.runtime)

    def accept(self, copies: Sequence[PlaneCopy], fence: Fence | None) -> Ticket:
        """Submit to the device."""
        ticket = self._streams.submit(copies, fence)
        assert isinstance(ticket, _PromptedTicket)
        ticket.engine = self
        return ticket

    def step(self, index: int = 0) -> None:
        """Let the host learn of one submission."""
        ticket = self._taken(index)
        ticket.end()
        if ticket.error is not None:
            assert isinstance(ticket.error, Exception)
            self.broken.append((ticket, ticket.error))
            self.failed += 1

    def fail(self, index: int = 0) -> None:
        """Let one submission fail once it ended, whatever it moved."""
        ticket = self._taken(index)
        ticket.failure = TransferError("failed on request")
        ticket.end()
        self.failed += 1

    def close(self) -> None:
        """Let everything end."""
        super().close()
        self._streams.close()

    def _taken(self, index: int) -> _PromptedTicket:
        ticket = self.pending.pop(index)
        assert isinstance(ticket, _PromptedTicket)
        return ticket
