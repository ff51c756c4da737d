"""Divisions of a request's runs of pages.

Runs and spans are in order; runs do not overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvgraft.tree.component import TreeComponent
from kvgraft.tree.inserting import Run
from kvgraft.tree.pinning import NO_PAGE
from kvgraft.types import Span

__all__ = ["NO_PAGE", "divided", "marked", "needed_between"]


def divided(runs: list[Run], spans: Sequence[Span]) -> tuple[list[Run], list[Run]]:
    """Pages inside and outside `spans`, which are in order and may overlap at their ends."""
    inside: list[Run] = []
    outside: list[Run] = []
    for run in runs:
        position = run.first
        for span in spans:
            start, end = max(position, span.start), min(run.end, span.end)
            if start >= end:
                continue
            if start > position:
                outside.append(run.cut(position, start))
            if (start, end) == (run.first, run.end):
                inside.append(run)
            else:
                part = run.cut(start, end)
                if inside and inside[-1].end == start:
                    inside[-1] = inside[-1].joined(part)
                else:
                    inside.append(part)
            position = end
        if position == run.first:
            outside.append(run)
        elif position < run.end:
            outside.append(run.cut(position, run.end))
    return inside, outside


def marked(runs: list[Run], worth: Sequence[Span]) -> list[Run]:
    """The same pages; those outside `worth` (ordered, disjoint spans) are marked left behind."""
    marked: list[Run] = []
    for run in runs:
        position = run.first
        for start, end in worth:
            if end <= position:
                continue
            if start >= run.end:
                break
            if start > position:
                marked.append(run.cut(position, start, is_left=True))
                position = start
            stop = end if end < run.end else run.end
            marked.append(run.cut(position, stop))
            position = stop
        if position < run.end:
            marked.append(run.cut(position, run.end, is_left=True))
    return marked


def needed_between(
    component: TreeComponent, boundaries: Collection[int], first: int, end: int
) -> list[Span]:
    """Pages between `first` and `end` that a component needs at any of `boundaries`.

    In order and disjoint.
    """
    merged: list[Span] = []
    window = component.window_pages
    if window is not None:
        # The usual case of the general rule below, without the spans in between.
        low = high = -1
        for boundary in sorted(boundaries):
            start = boundary - window if boundary > window else 0
            if boundary <= first or start >= end:
                continue
            if start > high >= 0:
                merged.append(Span(low, high))
            if start > high or high < 0:
                low = start
            high = boundary
        if high >= 0:
            merged.append(Span(low, high))
        return merged
    named = [
        span
        for boundary in boundaries
        if boundary > first
        for span in component.reach_pages.spans(boundary)
        if span.start < end and span.end > first
    ]
    for span in sorted(named) if len(named) > 1 else named:
        if merged and span.start <= merged[-1].end:
            last = merged[-1]
            merged[-1] = Span(last.start, max(last.end, span.end))
        else:
            merged.append(span)
    return merged
