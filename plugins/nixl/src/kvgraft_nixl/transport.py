"""Moves bytes between two processes, as the hand-over needs it; NIXL is one such transport.

A transport reads memory that another process registered, one-sided: the other side does not take
part. Beside that it carries short messages. It promises neither that a message arrives nor that a
read ends.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Message", "Pieces", "Read", "ReadState", "Region", "Transport"]

Pieces = npt.NDArray[np.uint64]
"""Pieces of memory, `[n, 2]`: address and bytes of each."""


class Region(NamedTuple):
    """Memory that others may read, and that reads may write to.

    Attributes:
        address: of its first byte.
        nbytes: its length.
    """

    address: int
    nbytes: int


class Message(NamedTuple):
    """A message that arrived.

    Attributes:
        peer: the sender's name; `Transport.connect` returns the same one for its address.
        payload: what it sent.
    """

    peer: str
    payload: bytes


class ReadState(enum.Enum):
    """How far a read is."""

    MOVING = "moving"
    """Bytes may still be written to its targets, whether anybody waits for them or not."""
    DONE = "done"
    FAILED = "failed"
    """It ended without all of its bytes; none is written to its targets any more."""


class Read(Protocol):
    """One read that was started."""

    def state(self) -> ReadState:
        """How far it is, without waiting; never raises."""


class Transport(Protocol):
    """One process's end; its calls come from one thread, and none of them waits.

    Attributes:
        address: others `connect` to this; valid after `register`.
    """

    @property
    def address(self) -> bytes:
        """The address, with what others must know of the registered memory."""

    def register(self, regions: Sequence[Region]) -> None:
        """Let others read these; raises `TransferError` where that cannot be."""

    def connect(self, address: bytes) -> str:
        """The name of the process with that address; raises `TransferError` for no address."""

    def read(self, peer: str, source: Pieces, target: Pieces) -> Read:
        """Start to copy pieces of a peer's memory here, one for one, in any order.

        Raises:
            TransferError: nothing was started.
        """

    def send(self, peer: str, payload: bytes) -> None:
        """Send a message; raises `TransferError` where the peer is known to be gone."""

    def received(self) -> list[Message]:
        """The messages that arrived since the last call."""

    def close(self) -> None:
        """Stop; afterwards no read writes to memory here."""
