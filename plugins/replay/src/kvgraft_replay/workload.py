"""Workloads of a replay: requests whose tokens are built only when asked for.

A trace names blocks, not tokens, and can stand for billions of tokens. So every distinct piece of
content owns a range of int32 numbers, its *addresses*. A request keeps a few spans of addresses,
and its tokens are these addresses. So equal content has equal tokens, different content differs in
every token, and no vocabulary or text is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.policies import Hint
from kvgraft_replay.errors import TraceError

__all__ = [
    "ADDRESS_LIMIT",
    "Addresses",
    "Span",
    "Totals",
    "TraceRequest",
    "Workload",
    "clip_spans",
    "doubtful_times",
    "join_spans",
]

ADDRESS_LIMIT = 2**31
"""Addresses are token ids, and token ids are int32."""


class Span(NamedTuple):
    """`length` tokens of content with consecutive addresses from `first` on."""

    first: int
    length: int


def join_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same tokens in the fewest spans, none empty: equal content gives equal tuples."""
    joined: list[Span] = []
    for span in spans:
        if not span.length:
            continue
        if joined and joined[-1].first + joined[-1].length == span.first:
            joined[-1] = Span(joined[-1].first, joined[-1].length + span.length)
        else:
            joined.append(span)
    return tuple(joined)


def clip_spans(spans: Iterable[Span], start: int, stop: int) -> list[Span]:
    """Tokens `[start, stop)` of a sequence of spans; fewer if the sequence is shorter."""
    clipped: list[Span] = []
    position = 0
    for first, length in spans:
        if position >= stop:
            break
        low, high = max(start - position, 0), min(stop - position, length)
        if low < high:
            clipped.append(Span(first + low, high - low))
        position += length
    return clipped


class Addresses:
    """Hands out addresses, each once.

    Args:
        subject: the subject of errors, such as the trace's path.
    """

    __slots__ = ("_next", "_subject")

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._next = 0

    def take(self, n_tokens: int) -> Span:
        """Take `n_tokens` new addresses.

        Raises:
            TraceError: int32 has no room for that many distinct tokens.
        """
        span = Span(self._next, n_tokens)
        self._next += n_tokens
        if self._next > ADDRESS_LIMIT:
            raise TraceError(
                f"{self._subject}: {self._next} distinct tokens, int32 numbers {ADDRESS_LIMIT}; "
                "replay fewer requests with --limit, or look for lengths that are far too large"
            )
        return span


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a workload.

    Attributes:
        index: its index in the workload.
        session: its session's number; requests of a session follow one another.
        arrival_s: open loop: seconds since the workload began (since the session began if the
            format has no absolute times).
        think_s: closed loop: idle seconds between the end of the session's previous request
            and this one; 0 for the first.
        prompt_tokens: length of the prompt, at least 1.
        output_tokens: length of the output, possibly 0.
        content: spans of prompt and output together, in order, `prompt_tokens + output_tokens`
            tokens, as few spans as possible.
        hint: what an engine would know about the session's future when the request ends; None
            without a stop reason in the trace.
        namespace: namespace of its key.
    """

    index: int
    session: int
    arrival_s: float
    think_s: float
    prompt_tokens: int
    output_tokens: int
    content: tuple[Span, ...]
    hint: Hint | None = None
    namespace: str | None = None

    def token_ids(self) -> npt.NDArray[np.int32]:
        """Prompt and output, int32 `[prompt_tokens + output_tokens]`.

        Cost: one vectorised write per span, below 0.2 ms for 118,000 tokens.
        """
        tokens = np.empty(self.prompt_tokens + self.output_tokens, dtype=np.int32)
        position = 0
        for first, length in self.content:
            tokens[position : position + length] = np.arange(first, first + length, dtype=np.int32)
            position += length
        return tokens


LONGEST_GAP_S = 60
"""From this mean time between requests on, the unit of a trace's times is doubted."""
SHORTEST_GAP_S = 0.01
"""Below this mean time it is doubted if some times are no whole numbers of the unit."""
WHOLE = 1e-3
"""A time that differs by less counts as a whole number of units."""


def doubtful_times(name: str, unit_s: float, arrivals_s: Sequence[float]) -> list[str]:
    """A notice if times may be in another unit; none if they look right."""
    n, span_s = len(arrivals_s), max(arrivals_s) - min(arrivals_s)
    fast = unit_s < 1 and span_s < SHORTEST_GAP_S * (n - 1)
    if fast:
        units = [each / unit_s for each in arrivals_s]
        fast = any(abs(each - round(each)) > WHOLE for each in units)
    if not fast and span_s < LONGEST_GAP_S * n:
        return []
    unit, scale = ("ms", 1000) if fast else ("s", 1)
    return [
        f"{n:,} requests of {name} come over {span_s * scale:,.0f} {unit}, one in "
        f"{span_s * scale / n:,.{int(fast)}f} {unit}: its times are read in units of {unit_s:g} s; "
        "if that is wrong, give theirs with --time-unit"
    ]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a workload."""

    requests: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to replay, in order.

    Attributes:
        name: its name in reports: a file's name, or a synthetic kind with its seed.
        format: `"mooncake"`, `"bailian"`, `"agentic"`, `"azure"`, `"burstgpt"` or `"synthetic"`.
        has_absolute_time: whether `arrival_s` counts from the workload's beginning, so that an
            open-loop replay is possible; otherwise it counts from the session's.
        block_tokens: granularity of sharing in the source, in tokens; 1 if exact.
        requests: all requests; `requests[i].index == i`.
        sessions: the same requests by session, in order of each session's first request.
        totals: sums over `requests`.
        notices: notes on the source for readers of results.
    """

    name: str
    format: str
    has_absolute_time: bool
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    sessions: tuple[tuple[TraceRequest, ...], ...]
    totals: Totals
    notices: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        requests: Iterable[TraceRequest],
        *,
        name: str,
        format: str,
        has_absolute_time: bool,
        block_tokens: int,
        notices: tuple[str, ...] = (),
    ) -> Workload:
        """Group requests by session and add them up."""
        ordered = tuple(requests)
        sessions: dict[int, list[TraceRequest]] = {}
        for request in ordered:
            sessions.setdefault(request.session, []).append(request)
        return cls(
            name=name,
            format=format,
            has_absolute_time=has_absolute_time,
            block_tokens=block_tokens,
            requests=ordered,
            sessions=tuple(tuple(session) for session in sessions.values()),
            totals=Totals(
                requests=len(ordered),
                input_tokens=sum(request.prompt_tokens for request in ordered),
                output_tokens=sum(request.output_tokens for request in ordered),
            ),
            notices=notices,
        )
