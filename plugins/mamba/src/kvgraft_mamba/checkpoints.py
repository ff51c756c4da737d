"""Where a prefill should capture its state.

A state can be resumed only where one was captured, so reuse depends on choosing boundaries that
later requests will share: where this request leaves a known prefix, and multiples of an interval,
which every request over the same tokens lands on.
"""

from __future__ import annotations

from typing import NamedTuple

from kvgraft import MatchView

__all__ = ["CheckpointRule"]


class CheckpointRule(NamedTuple):
    """Which boundaries to capture; all in pages.

    Attributes:
        interval: distance between regular checkpoints; None for none.
        at_branch: whether to capture where the known prefix ends.
        most: checkpoints per request at most, so that one long prompt is not budgeted more
            states than there are.
    """

    interval: int | None
    at_branch: bool
    most: int

    def boundaries(self, view: MatchView) -> tuple[int, ...]:
        """Boundaries above the anchor and up to the limit, ascending.

        The branch comes first. Regular checkpoints that are too many are thinned by doubling
        their interval: what remains are still multiples of it, shared with other requests.
        """
        branches = self.at_branch and self.most > 0 and view.anchor < view.base <= view.limit
        if self.interval is None:
            return (view.base,) if branches else ()
        marks = {view.base} if branches else set()
        room = self.most - len(marks)
        if room > 0:
            stride = self.interval
            while view.limit // stride - view.anchor // stride > room:
                stride *= 2
            first = (view.anchor // stride + 1) * stride
            marks.update(range(first, view.limit + 1, stride))
        return tuple(sorted(marks))
