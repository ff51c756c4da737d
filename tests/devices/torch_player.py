"""The engine that plays its model, on a device of torch's: kernels are torch's operators.

Rows that attention would read are gathered as the device gets there, and looked at later; rows of a
step are written behind them. The host waits only where the cache does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvgraft import WritePolicy
from kvgraft_accelerator import Accelerator
from kvgraft_accelerator.streams import StreamTicket

from .player import Player

__all__ = ["TorchPlayer"]

MOST_LATER = 200
"""Rows that are gathered and not looked at."""


class TorchPlayer(Player):
    """Serves requests on a device of torch's; see `Player`.

    Args:
        runtime: the device.
        names: components; all at home on DEVICE.
        policy: when data is backed up.
    """

    def __init__(
        self,
        runtime: Accelerator,
        names: Sequence[str] = ("full",),
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    ) -> None:
        super().__init__(runtime, names, policy, name=str(runtime.device))
        self.runtime = runtime
        self._later: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def _read_arrival(self, ticket: StreamTicket, layer: int) -> None:
        event = ticket.layer_event(layer)
        assert event is not None
        self.runtime.compute().wait(event)
        for copy in ticket.copies:
            if copy.layer == layer:
                found = copy.target.index_select(0, self._on_device(copy.target_rows))
                wanted = copy.source[copy.source_rows].clone()
                self._later.append((f"layer {layer} of a load", found, wanted))

    def _launch(self, label: str, reads: list, writes: list) -> None:  # type: ignore[type-arg]
        for lanes, slots, stamps in reads:
            found = lanes.index_select(0, self._on_device(slots))
            self._later.append((label, found, self._rows_of(stamps, found)))
        for lanes, slots, stamps in writes:
            rows = torch.empty((len(slots), lanes.shape[1]), dtype=lanes.dtype)
            values = self._rows_of(stamps, rows)
            lanes.index_copy_(0, self._on_device(slots), self._on_device(values))
        if len(self._later) > MOST_LATER:
            self.look()

    def _on_device(self, values: torch.Tensor) -> torch.Tensor:
        """A copy that the host does not wait for."""
        return values.pin_memory().to(self.runtime.device, non_blocking=True)

    @staticmethod
    def _rows_of(stamps: npt.NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
        column = torch.from_numpy(stamps).to(like.dtype)[:, None]
        return column.expand(like.shape).contiguous()

    def look(self) -> None:
        """Compare the rows that were gathered."""
        for label, found, wanted in self._later:
            if not found.cpu().equal(wanted):
                self.wrong.append(label)
        self._later.clear()

    def finish(self) -> None:
        """Everything that was submitted has run."""
        torch.accelerator.synchronize(self.runtime.device)
        self.look()
