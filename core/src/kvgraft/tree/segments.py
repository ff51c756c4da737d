"""Page ranges: a component's reach in pages, and set operations on such ranges."""

from __future__ import annotations

from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft.types import Span

__all__ = ["common_pages", "default_segment", "pages_without", "segment_ahead", "whole_nodes"]


def default_segment(component: TreeComponent, boundary: int) -> tuple[Span, ...]:
    """The pages a component's reach covers at a boundary; a pin's default (L3)."""
    return component.segment_at(boundary)


def segment_ahead(component: TreeComponent, boundary: int, position: int) -> tuple[Span, ...]:
    """The part of the reach at a boundary that a request at page `position` still needs (L6)."""
    segment = default_segment(component, boundary)
    if position <= boundary or component.is_prefix_closed:
        return segment
    return common_pages(default_segment(component, position), segment)


def common_pages(segment: tuple[Span, ...], other: tuple[Span, ...]) -> tuple[Span, ...]:
    """Pages in both; each is in order and disjoint. O(spans)."""
    common: list[Span] = []
    mine, its = 0, 0
    while mine < len(segment) and its < len(other):
        start = max(segment[mine].start, other[its].start)
        end = min(segment[mine].end, other[its].end)
        if start < end:
            common.append(Span(start, end))
        if segment[mine].end == end:
            mine += 1
        else:
            its += 1
    return tuple(common)


def whole_nodes(anchor: Node, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Spans grown to the boundaries of the nodes they begin and end inside."""
    grown: list[Span] = []
    for start, end in spans:
        low, high = start, end
        node: Node | None = anchor
        while node is not None and node.parent is not None and node.end > start:
            if node.start < end < node.end:
                high = node.end
            if node.start < start:
                low = node.start
            node = node.parent
        if grown and low <= grown[-1].end:
            grown[-1] = Span(grown[-1].start, max(grown[-1].end, high))
        else:
            grown.append(Span(low, high))
    return tuple(grown)


def pages_without(segment: tuple[Span, ...], kept: tuple[Span, ...]) -> tuple[Span, ...]:
    """Pages of `segment` outside `kept`; a state's empty span when nothing is kept."""
    given: list[Span] = []
    for span in segment:
        if span.start == span.end:
            given.append(span)
            continue
        low = span.start
        for keep in kept:
            if keep.end <= low or keep.start >= span.end:
                continue
            if keep.start > low:
                given.append(Span(low, keep.start))
            low = max(low, keep.end)
        if low < span.end:
            given.append(Span(low, span.end))
    return tuple(given)
