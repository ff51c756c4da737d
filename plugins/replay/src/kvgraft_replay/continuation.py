"""Finds the request that continues an earlier one, and so the earlier one's output.

Traces name only the blocks of prompts. An output, and the part of a prompt behind its last whole
block, appears again in the prompt of the conversation's next turn, which starts with all whole
blocks of the earlier prompt and is longer. So the earliest such request gives the content behind
the earlier request's whole blocks. A request that none continues gets content that never recurs.

A request continues only one request: the one that it shares most with, the latest among equals.
Others that it could continue share an opening with it (a system prompt), not a conversation. They
stay without a continuation, because two different prompts cannot both be the start of a third.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from kvgraft_replay.workload import Addresses, Span, clip_spans, join_spans

__all__ = ["Recorded", "contents", "continuations"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request as a trace records it.

    Attributes:
        whole: the prompt's whole blocks, as few spans as possible.
        whole_tokens: their length.
        tail: first address of the rest of the prompt, `tail .. tail + tail_tokens`; requests with
            equal tails have equal prompts. Without meaning if the prompt is whole blocks only.
        prompt_tokens: length of the prompt.
        output_tokens: length of the output.
    """

    whole: tuple[Span, ...]
    whole_tokens: int
    tail: int
    prompt_tokens: int
    output_tokens: int

    @property
    def tail_tokens(self) -> int:
        """Length of the prompt behind its whole blocks."""
        return self.prompt_tokens - self.whole_tokens

    def address_at(self, position: int) -> int:
        """The address at a block boundary of the prompt."""
        for first, length in self.whole:
            if position < length:
                return first + position
            position -= length
        return self.tail


class _Waiting:
    """Requests without a continuation, by the last address of their whole blocks."""

    def __init__(self, requests: Sequence[Recorded]) -> None:
        self._requests = requests
        self._by_key: dict[int, list[int]] = {}
        self._keys: list[int] = []

    def add(self, index: int) -> None:
        request = self._requests[index]
        if not request.whole:
            return  # without a whole block it cannot be recognised
        key = sum(request.whole[-1]) - 1
        if key not in self._by_key:
            insort(self._keys, key)
        self._by_key.setdefault(key, []).append(index)

    def take_prefixes_of(self, later: Recorded) -> list[int]:
        """Remove and return the requests whose whole blocks open `later`, the longest last."""
        taken: list[int] = []
        position = 0
        for first, length in later.whole:
            low = bisect_left(self._keys, first)
            high = bisect_left(self._keys, first + length)
            for key in self._keys[low:high]:
                taken += self._take(key, position + key - first + 1, later)
            position += length
        return taken

    def _take(self, key: int, end: int, later: Recorded) -> list[int]:
        taken: list[int] = []
        left: list[int] = []
        opening = join_spans(clip_spans(later.whole, 0, end))
        for index in self._by_key[key]:
            request = self._requests[index]
            opens = request.prompt_tokens < later.prompt_tokens and request.whole == opening
            (taken if opens else left).append(index)
        if left:
            self._by_key[key] = left
        else:
            del self._by_key[key]
            del self._keys[bisect_left(self._keys, key)]
        return taken


class _Tails:
    """Tails behind whole blocks of prompts; each has at most one continuation, and back."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[int, int, int]] = {}
        """Tail to (prompt_tokens, whole_tokens, continuing request) of those that have it."""
        self._recorded: dict[int, int] = {}
        self._claimed: set[int] = set()

    def claim(self, request: Recorded, later: Recorded, later_index: int) -> bool:
        """Record that `later` continues `request`; False if that contradicts known content."""
        if not request.tail_tokens:
            return True
        address = later.address_at(request.whole_tokens)
        known = self._recorded.get(request.tail)
        if known is not None:
            return known == address
        if address in self._claimed:
            return False
        self._claimed.add(address)
        self._recorded[request.tail] = address
        self.answers[request.tail] = (request.prompt_tokens, request.whole_tokens, later_index)
        return True


def continuations(
    requests: Sequence[Recorded],
) -> tuple[list[int | None], dict[int, tuple[Span, ...]]]:
    """For each request the index of the one that continues it, and the content of known tails.

    Cost: O(spans · log requests) per request, plus the waiting requests it matches.
    """
    links: list[int | None] = [None] * len(requests)
    waiting, tails = _Waiting(requests), _Tails()
    for index, later in enumerate(requests):
        for earlier in reversed(waiting.take_prefixes_of(later)):
            if tails.claim(requests[earlier], later, index):
                links[earlier] = index
                break
        waiting.add(index)

    known: dict[int, tuple[Span, ...]] = {}
    # Longest prompt first: a tail may lie in the tail of the longer prompt that continues it.
    for tail, answer in sorted(tails.answers.items(), key=lambda item: -item[1][0]):
        stop, start, later_index = answer
        known[tail] = tuple(clip_spans(_prompt(requests[later_index], known), start, stop))
    return links, known


def contents(
    requests: Sequence[Recorded],
    links: Sequence[int | None],
    known_tails: dict[int, tuple[Span, ...]],
    addresses: Addresses,
) -> list[tuple[Span, ...]]:
    """Prompt and output of every request as spans, from the links of `continuations`."""
    result: list[tuple[Span, ...]] = []
    for request, link in zip(requests, links, strict=True):
        spans = _prompt(request, known_tails)
        own = request.output_tokens
        if link is not None:
            stop = request.prompt_tokens + request.output_tokens
            output = clip_spans(_prompt(requests[link], known_tails), request.prompt_tokens, stop)
            own -= sum(span.length for span in output)
            spans += output
        if own:
            spans.append(addresses.take(own))
        result.append(join_spans(spans))
    return result


def _prompt(request: Recorded, known_tails: dict[int, tuple[Span, ...]]) -> list[Span]:
    if not request.tail_tokens:
        return list(request.whole)
    own = (Span(request.tail, request.tail_tokens),)
    return [*request.whole, *known_tails.get(request.tail, own)]
