"""One request on its way here, as its engine sees it."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from kvgraft import ConfigError, Decision, LeaseError, Request, TokenKey, TransferError
from kvgraft_nixl.memory import Payload
from kvgraft_nixl.transport import Read

if TYPE_CHECKING:
    from kvgraft_nixl.messages import Offer

__all__ = ["Arrival", "Stage"]

PAUSE_S = 0.0002
"""Pause between two looks at a transfer, for a caller that waits."""


class Stage(enum.Enum):
    """How far an arrival is."""

    ASKING = "asking"
    """A peer was asked whether it has the prefix; nothing is admitted yet."""
    LOADING = "loading"
    """Admitted; the part that this cache has on HOST is on its way to DEVICE."""
    PULLING = "pulling"
    """Its slots are taken, and the data behind this cache's own prefix is being read."""
    READY = "ready"
    """All data came, was verified and is published: `Arrival.take` has the request."""
    TAKEN = "taken"
    """The engine took the request; or nobody did in time, and its data is in the cache."""
    FAILED = "failed"
    """Nothing came of it, and nothing was published: begin the request as if it were new."""


class Arrival:
    """A request that comes from another cache, or is fetched from a peer; made by `HandOver`.

    Attributes:
        key: its tokens; the request runs with a copy.
        stage: how far it is.
        reason: why it failed; else empty.
        decision: the answer of admission; None before it.
        offer: the offer that it follows; None while a peer is asked.
        nbytes: bytes to read.
        received_nbytes: of them, those of layers that came and were verified.
    """

    def __init__(
        self,
        key: TokenKey,
        arguments: Mapping[str, Any],
        until: float,
        advance: Callable[[], None],
    ) -> None:
        self.key = key
        self.stage = Stage.ASKING
        self.reason = ""
        self.decision: Decision | None = None
        self.offer: Offer | None = None
        self.nbytes = self.received_nbytes = 0
        # for `Receiving`
        self.arguments = arguments
        self.until = until
        self.own: Request | None = None
        self.peer = ""
        self.boundary = self.first = 0
        self.begun_s = self.asked_s = 0.0
        self.slots: Any = None
        self.sources: Any = None
        self.digests: Mapping[Payload, bytes] | None = None
        self.waiting: list[int] = []
        """Layers whose reads have not started."""
        self.reads: dict[int, Read | None] = {}
        """By layer that was started; None once all came."""
        self.checks: dict[int, Future[dict[Payload, bytes]]] = {}
        self.verified: set[int] = set()
        self.layers: Sequence[int] = ()
        self.advance = advance

    def __repr__(self) -> str:
        said = f": {self.reason}" if self.reason else ""
        return f"<Arrival {self.stage.value}, {self.received_nbytes} of {self.nbytes} bytes{said}>"

    @property
    def ended(self) -> bool:
        """Whether it is ready, taken or failed."""
        return self.stage in (Stage.READY, Stage.TAKEN, Stage.FAILED)

    @property
    def failed(self) -> bool:
        """Whether the request must be begun as if it were new."""
        return self.stage is Stage.FAILED

    def take(self) -> Request:
        """The admitted request, computed up to the offer's boundary: the engine's from now on.

        Its key is a copy of `key`.

        Raises:
            LeaseError: it is not ready, failed, or was taken.
        """
        if self.stage is not Stage.READY or self.own is None:
            said = f" ({self.reason})" if self.reason else ""
            raise LeaseError(
                f"take: the arrival is {self.stage.value}{said}; wait until it is ready"
            )
        self.stage, request = Stage.TAKEN, self.own
        self.own = None
        return request

    @property
    def request(self) -> Request:
        """The admitted request while its data still comes, to compute the tokens behind it.

        Allocate slots for them, and run each layer after `wait_layer`. The tokens count as computed
        with `Cache.computed` only after `take`. If the arrival fails, drop the pass.

        Raises:
            LeaseError: it is not admitted, failed, or was taken.
            ConfigError: the cache has states: the pass would write to the state that arrives.
        """
        if self.own is None or self.stage not in (Stage.PULLING, Stage.READY):
            raise LeaseError(f"request: the arrival is {self.stage.value}")
        if self.own.state_components and self.stage is not Stage.READY:
            name = self.own.state_components[0].component.name
            raise ConfigError(f"request: {name!r} keeps states; wait until the arrival is ready")
        return self.own

    def layer_ready(self, layer: int) -> bool:
        """Whether a layer's data came and was verified; layers without data are ready."""
        if self.stage in (Stage.READY, Stage.TAKEN):
            return True
        if self.stage is not Stage.PULLING:
            return False
        return layer in self.verified or layer not in self.layers

    def wait_layer(self, layer: int, timeout_s: float) -> None:
        """Wait until a layer's data can be read; it polls meanwhile.

        Raises:
            TransferError: the arrival failed, or the layer took longer than `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        while not self.layer_ready(layer):
            self.advance()
            if self.failed:
                raise TransferError(f"layer {layer}: {self.reason}; compute the request")
            if self.layer_ready(layer):
                return
            if time.monotonic() > end:
                raise TransferError(f"layer {layer}: not here after {timeout_s} s")
            time.sleep(PAUSE_S)
