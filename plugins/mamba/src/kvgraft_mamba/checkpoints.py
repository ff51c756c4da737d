"""Regular boundaries at which a prefill captures its state.

The core decides on resume points: the prompt's end, branches, ends of chunks. An engine that needs
more asks for multiples of an interval, which are the same for all requests over the same tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from kvgraft import MatchView

__all__ = ["CheckpointRule"]


class CheckpointRule(NamedTuple):
    """The boundaries to capture; all in pages.

    Attributes:
        interval: distance between regular checkpoints; None for none.
        most: most checkpoints per request, so that a long prompt is not budgeted more states than
            the pool has.
    """

    interval: int | None
    most: int

    def boundaries(self, view: MatchView) -> tuple[int, ...]:
        """Boundaries above the anchor and up to the limit, ascending.

        If there are too many, the interval is doubled: the remaining ones are multiples of it,
        shared with other requests.
        """
        if self.interval is None or self.most < 1:
            return ()
        stride = self.interval
        while view.limit // stride - view.anchor // stride > self.most:
            stride *= 2
        first = (view.anchor // stride + 1) * stride
        return tuple(range(first, view.limit + 1, stride))
