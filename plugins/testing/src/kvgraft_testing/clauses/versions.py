"""Whether a component keeps working when the core moves to a later minor version (P3)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

from kvgraft import contract
from kvgraft.errors import ContractViolation, PluginHookError
from kvgraft.types import Direction, LockQuery, TransferQuery
from kvgraft_testing.clause import clause, expect
from kvgraft_testing.clauses.budgeting import queries
from kvgraft_testing.clauses.matching import views
from kvgraft_testing.clauses.moving import some_slots
from kvgraft_testing.clauses.packaging import in_a_fresh_process, last_line
from kvgraft_testing.growing import grown
from kvgraft_testing.subject import Subject

__all__ = ["queries_may_grow", "the_api_version_is_a_literal"]

BOUNDARIES = range(24)

DECLARE_BESIDE_ANOTHER = """
import sys, importlib_metadata, kvgraft, kvgraft.contract
kvgraft.API_VERSION = kvgraft.contract.API_VERSION = "0.0"
points = importlib_metadata.entry_points(group=kvgraft.contract.ENTRY_POINT_GROUP, name=sys.argv[1])
print(next(iter(points)).load().declare_component().api_version)
"""


@clause("P3", "The API version is a literal, not the installed core's version.")
def the_api_version_is_a_literal(subject: Subject) -> None:
    here = subject.plugin.declaration.api_version
    elsewhere = _declared_beside_another_core(subject)
    expect(
        elsewhere == here,
        "P3",
        subject,
        f"declares {here!r}, and {elsewhere!r} beside another core; write the version out",
    )


def _declared_beside_another_core(subject: Subject) -> object:
    """The component's declaration beside a core of another version.

    An installed package is loaded afresh in a process of its own: it may have taken the version
    when it was imported.
    """
    if subject.plugin.distribution:
        done = in_a_fresh_process(DECLARE_BESIDE_ANOTHER, subject.name)
        expect(done.returncode == 0, "P3", subject, last_line(done.stderr))
        return last_line(done.stdout)
    kvgraft = importlib.import_module("kvgraft")
    with patch.object(kvgraft, "API_VERSION", "0.0"), patch.object(contract, "API_VERSION", "0.0"):
        declared = subject.plugin.implementation.declare_component()  # type: ignore[attr-defined]
    return declared.api_version


Form = Callable[[Any], Any]
"""Changes a query before a hook gets it."""


def _matches(subject: Subject, form: Form) -> list[object]:
    mounted = subject.mount(subject.page_size)
    hook = mounted.finalize_match_result
    assert hook is not None
    return [hook(form(view)) for view in views()]


def _pins(subject: Subject, form: Form) -> list[object]:
    mounted = subject.mount(subject.page_size)
    lock = mounted.lock_hooks
    assert lock is not None
    answers: list[object] = []
    for boundary in BOUNDARIES:
        segment = lock.acquire(form(LockQuery(boundary, subject.page_size)))
        answers.append(None if segment is None else [tuple(span) for span in segment])
        if segment is not None:
            lock.release(segment)
    return answers


def _transfers(subject: Subject, form: Form) -> list[object]:
    mounted = subject.mount(subject.page_size)
    answers: list[object] = []
    hooks = mounted.transfer_hooks
    if mounted.component.host is None or hooks is None:
        return answers
    slots = some_slots(mounted, seed=10)
    for direction in Direction:
        for end in (hooks.commit, hooks.abort):
            query = form(TransferQuery(direction, *slots))
            copies = hooks.build(query)
            answers.append(
                None
                if copies is None
                else [
                    (each.layer, each.source_rows.tolist(), each.target_rows.tolist())
                    for each in copies
                ]
            )
            end(query)
    return answers


def _demands(subject: Subject, form: Form) -> list[object]:
    mounted = subject.mount(subject.page_size)
    hook = mounted.budget_contribution
    assert hook is not None
    return [hook(form(query)) for query in queries(subject.page_size)]


class Asked(NamedTuple):
    """Hooks that are called together, if a component has one of them.

    Attributes:
        hooks: their names.
        ask: calls them on many queries and returns their answers.
    """

    hooks: tuple[str, ...]
    ask: Callable[[Subject, Form], list[object]]


ASKED = (
    Asked(("finalize_match_result",), _matches),
    Asked(("acquire_component_lock",), _pins),
    Asked(
        ("build_hicache_transfers", "commit_hicache_transfers", "abort_hicache_transfers"),
        _transfers,
    ),
    Asked(("budget_contribution",), _demands),
)
"""Every hook that takes a query."""


def _is_asked(subject: Subject) -> str | None:
    if any(subject.has(hook) for asked in ASKED for hook in asked.hooks):
        return None
    return "the hooks that are given queries are left to the core"


@clause("P3", "A query that has one field more is answered like one without.", needs=_is_asked)
def queries_may_grow(subject: Subject) -> None:
    for hooks, ask in ASKED:
        if not any(map(subject.has, hooks)):
            continue
        today = ask(subject, lambda query: query)
        try:
            later = ask(subject, grown)
        except PluginHookError as error:
            raise ContractViolation(
                "P3", subject.name, f"given a query with one field more, {error.reason}"
            ) from error
        for one, two in zip(today, later):
            expect(
                one == two,
                "P3",
                subject,
                f"{hooks[0]} answers {one}, and {two} where the query has one field more; "
                "read its fields by name",
            )
