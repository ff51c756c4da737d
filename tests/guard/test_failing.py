"""An error is reported once, as it was first: the core's, a violation, or the guard's failure."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from kvgraft import ContractViolation, TokenKey, WritePolicy
from kvgraft.errors import IntegrityError
from kvgraft.tree.ledger import Ledger
from kvgraft_guard import Guard, GuardError, hooks
from kvgraft_guard.contents import Contents
from kvgraft_guard.failing import Failing
from kvgraft_guard.hooks import HookGuard
from kvgraft_guard.matches import Matches
from kvgraft_guard.moves import Moves

from ..serving.own_parts import override
from .scene import LONGER, PROMPT, Scene
from .storage_defects import stored


def stumbles(*given: Any, **named: Any) -> None:
    """A check of the guard that meets what it did not expect."""
    hooks._covered(None, 0)  # type: ignore[arg-type]


def fails(*given: Any, **named: Any) -> NoReturn:
    """A core that fails."""
    raise AssertionError("the core's own")


def miscount(scene: Scene) -> None:
    """One slot too many is a request's, by the books."""
    ledger = scene.component("base").device
    assert isinstance(ledger, Ledger)
    ledger.private += 1


def test_a_check_that_raises_is_the_guards_failure_and_names_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    monkeypatch.setattr(Matches, "check", stumbles)
    with pytest.raises(GuardError) as caught:
        scene.begin(PROMPT)
    assert str(caught.value).startswith(
        "the guard failed as it checked begin: TypeError at hooks.py:"
    )
    assert isinstance(caught.value.__cause__, TypeError)
    monkeypatch.undo()
    scene.cache.close()


def test_a_check_that_raises_before_the_call_is_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    request = scene.admitted(PROMPT)
    monkeypatch.setattr(type(scene.cache.guard), "_begins", stumbles)
    with pytest.raises(GuardError, match="as it checked next_chunk"):
        scene.cache.next_chunk(request)


def test_a_check_that_stumbles_over_broken_books_reports_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    scene.nodes[-1].cells[0].device_pins += 1
    monkeypatch.setattr(Matches, "check", stumbles)
    with pytest.raises(IntegrityError, match="L1"):
        scene.begin(LONGER)


@pytest.mark.parametrize("call", ["begin", "finish"])
def test_an_argument_that_a_call_does_not_have_is_the_callers_mistake(call: str) -> None:
    scene = Scene()
    given = scene.computed(PROMPT) if call == "finish" else TokenKey(PROMPT)
    with pytest.raises(TypeError, match="unexpected keyword argument 'ttl'"):
        getattr(scene.cache, call)(given, ttl=0)
    scene.cache.close()


@pytest.mark.parametrize(
    ("owner", "check"), [(Contents, "arrived"), (Moves, "leaves"), (HookGuard, "moves_begin")]
)
def test_a_check_in_the_midst_of_a_call_is_told_from_the_core(
    owner: type[Any], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As data arrives in the tree, leaves it under write-back, and is copied."""
    policy = WritePolicy.WRITE_BACK if check == "leaves" else WritePolicy.WRITE_THROUGH
    scene = Scene(host_tokens=64, policy=policy)
    monkeypatch.setattr(owner, check, stumbles)
    with pytest.raises(GuardError, match="TypeError at"):
        scene.on_host_only(PROMPT)


def test_a_check_around_a_hook_is_told_from_the_component(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    monkeypatch.setattr(hooks, "_spans", stumbles)
    with pytest.raises(GuardError, match="as it checked begin: TypeError at"):
        scene.begin(PROMPT)


def test_an_error_of_the_core_is_not_hidden_by_a_check_that_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    request = scene.computed(PROMPT)
    override(scene.cache.publisher, finish=fails)
    monkeypatch.setattr(Failing, "check", stumbles)
    with pytest.raises(AssertionError, match="the core's own"):
        scene.cache.finish(request)


@pytest.mark.parametrize("first", [AssertionError("first"), ContractViolation("T8", None, "first")])
def test_closing_hides_no_error_that_is_on_its_way(first: Exception) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    miscount(scene)
    with pytest.raises(type(first), match="first"), scene.cache:
        raise first


def test_closing_hides_no_violation_that_was_found_before() -> None:
    scene = Scene()
    request = scene.computed(PROMPT)
    miscount(scene)
    with pytest.raises(ContractViolation, match="T8"):
        scene.cache.checkpoint(request)
    override(scene.cache.journal, drain=fails)
    scene.cache.close()


def test_closing_reports_broken_books_where_nothing_was_found_before() -> None:
    scene = Scene()
    scene.cached(PROMPT)
    miscount(scene)
    with pytest.raises(IntegrityError, match="T8"):
        scene.cache.close()


def test_an_error_in_a_step_of_the_storage_tier_is_not_hidden_by_the_check_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, _ = stored()
    guard = scene.cache.guard
    assert isinstance(guard, Guard)

    def poll() -> None:
        with guard.step():
            monkeypatch.setattr(Guard, "_begins", stumbles)
            fails()

    with pytest.raises(AssertionError, match="the core's own"):
        guard.look("poll", poll)
