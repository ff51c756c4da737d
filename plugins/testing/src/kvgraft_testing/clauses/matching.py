"""Clauses about a component's additions to a match (M)."""

from __future__ import annotations

from collections.abc import Iterator

from kvgraft.types import MatchView
from kvgraft_testing.clause import clause, expect
from kvgraft_testing.subject import Subject

__all__ = ["views"]

BOUNDARIES = (0, 1, 2, 3, 5, 8, 13)


def views() -> Iterator[MatchView]:
    """Matches of every shape: on DEVICE, on HOST, cut short by others or by the limit."""
    for limit in BOUNDARIES:
        for base in (each for each in BOUNDARIES if each <= limit):
            for anchor in (each for each in BOUNDARIES if each <= base):
                for device in {0, anchor // 2, anchor}:
                    yield MatchView(anchor, device, base, limit, anchor - device)


def _finalizes(subject: Subject) -> str | None:
    return None if subject.has("finalize_match_result") else "the hook is left to the core"


@clause("M5", "A match may be made shorter, never longer.", needs=_finalizes)
def a_match_is_never_lengthened(subject: Subject) -> None:
    for page_size in subject.page_sizes:
        hook = subject.mount(page_size).finalize_match_result
        assert hook is not None
        for view in views():
            answer = hook(view)
            expect(
                answer is None or 0 <= answer.limit_pages <= view.anchor,
                "M5",
                subject,
                f"finalize_match_result answered {answer} to {view}",
            )


@clause("M5", "States are captured only at boundaries the request will pass.", needs=_finalizes)
def checkpoints_lie_ahead(subject: Subject) -> None:
    for page_size in subject.page_sizes:
        hook = subject.mount(page_size).finalize_match_result
        assert hook is not None
        for view in views():
            answer = hook(view)
            if answer is None:
                continue
            pages = answer.checkpoint_pages
            first, last = answer.limit_pages + 1, view.limit
            expect(
                all(first <= page <= last for page in pages),
                "M5",
                subject,
                f"finalize_match_result captures states at {pages}; a request "
                f"that resumes at {answer.limit_pages} passes {first} to {last}: {view}",
            )


@clause("M2", "The same match is answered the same way.", needs=_finalizes)
def a_match_repeated_is_the_same(subject: Subject) -> None:
    for page_size in subject.page_sizes:
        hook = subject.mount(page_size).finalize_match_result
        assert hook is not None
        for view in views():
            first, second = hook(view), hook(view)
            expect(first == second, "M2", subject, f"{view} is answered {first}, then {second}")


@clause("M6", "A match allocates nothing.", needs=_finalizes)
def a_match_allocates_nothing(subject: Subject) -> None:
    mounted = subject.mount(subject.page_size)
    pools = [mounted.component.device.allocator, *(p.allocator for p in mounted.component.private)]
    if mounted.component.host is not None:
        pools.append(mounted.component.host.allocator)
    before = [sorted(pool.free_slots()) for pool in pools]
    hook = mounted.finalize_match_result
    assert hook is not None
    for view in views():
        hook(view)
        free = [sorted(pool.free_slots()) for pool in pools]
        expect(free == before, "M6", subject, f"free slots changed from {before} to {free}: {view}")
