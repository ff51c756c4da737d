"""Clauses about a component's pins (L)."""

from __future__ import annotations

from collections.abc import Iterator

from kvgraft.errors import ContractViolation
from kvgraft.packages.dispatch import are_spans, shown
from kvgraft.reach import PageReach
from kvgraft.types import LockQuery, Span
from kvgraft_testing.clause import clause, expect
from kvgraft_testing.subject import Subject

__all__ = ["a_pin_covers_the_reach", "a_pin_is_repeatable", "a_window_pins_no_more_than_it_must"]

BOUNDARIES = range(24)


def _locks(subject: Subject) -> str | None:
    return None if subject.has("acquire_component_lock") else "the hook is left to the core"


def _locks_a_window(subject: Subject) -> str | None:
    return _locks(subject) or subject.unbounded


def _spans(subject: Subject, answer: object) -> list[Span]:
    """The spans of a pin's answer, in whole pages; anything else covers nothing."""
    if not are_spans(answer):
        said = f"acquire_component_lock returned {shown(answer)}, not a list of Span in whole pages"
        raise ContractViolation("L3", subject.name, said)
    assert isinstance(answer, (list, tuple))
    return [Span(*span) for span in answer]


def _pages(spans: list[Span]) -> set[int]:
    return {page for span in spans for page in range(span.start, span.end)}


def _pinned(subject: Subject) -> Iterator[tuple[PageReach, int, list[Span]]]:
    """Every reach and boundary, with the pages that the component pins there of its own accord."""
    for page_size in subject.page_sizes:
        mounted = subject.mount(page_size)
        reach = PageReach(mounted.component.reach, page_size)
        lock = mounted.lock_hooks
        assert lock is not None
        for boundary in BOUNDARIES:
            answer = lock.acquire(LockQuery(boundary, page_size))
            if answer is not None:
                yield reach, boundary, _spans(subject, answer)
                lock.release(answer)


@clause("L3", "A pin covers the reach and nothing behind the boundary.", needs=_locks)
def a_pin_covers_the_reach(subject: Subject) -> None:
    for reach, boundary, spans in _pinned(subject):
        needed = _pages(list(reach.spans(boundary)))
        expect(
            needed <= _pages(spans),
            "L3",
            subject,
            f"at boundary {boundary} it pins {spans}, its reach needs pages {sorted(needed)}",
        )
        expect(
            all(0 <= span.start <= span.end <= boundary for span in spans),
            "L3",
            subject,
            f"at boundary {boundary} it pins {spans}",
        )


@clause("L7", "A window pins at most its pages and one more.", needs=_locks_a_window)
def a_window_pins_no_more_than_it_must(subject: Subject) -> None:
    for reach, boundary, spans in _pinned(subject):
        held = len(_pages(spans))
        most = reach.width(boundary)
        expect(
            held <= most + 1,
            "L7",
            subject,
            f"at boundary {boundary} it pins {held} pages, its reach is {most}",
        )


@clause("L1", "A pin taken again after its release is the same pin.", needs=_locks)
def a_pin_is_repeatable(subject: Subject) -> None:
    for page_size in subject.page_sizes:
        mounted = subject.mount(page_size)
        lock = mounted.lock_hooks
        assert lock is not None
        for boundary in BOUNDARIES:
            answers = []
            for _ in range(2):
                answer = lock.acquire(LockQuery(boundary, page_size))
                answers.append(None if answer is None else _spans(subject, answer))
                if answer is not None:
                    lock.release(answer)
            expect(
                answers[0] == answers[1],
                "L1",
                subject,
                f"boundary {boundary} is pinned as {answers[0]}, after a release as {answers[1]}",
            )
