"""A hook that raises, or returns a value that the contract forbids, does no damage (I8).

Two components with every hook implemented; the second in the tree's order misbehaves, so that the
first one's hooks have to be undone. Books are compared page by page.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import (
    Cache,
    CacheConfig,
    ComponentMatch,
    ContractViolation,
    Demand,
    Direction,
    Everything,
    PluginError,
    PluginHookError,
    Reach,
    Span,
    Tier,
    TokenKey,
    Trailing,
    TransferQuery,
    WritePolicy,
)
from kvgraft.requests.request import Request, Stage
from kvgraft_testing.stepped import SteppedTransferEngine

from .switchable import Package

PAGE = 4
PROMPT = list(range(32))
LONGER = [*PROMPT, 99]


class Scene:
    """A cache of two components with every hook, over pools of 16 pages."""

    def __init__(
        self, host_tokens: int = 0, policy: WritePolicy = WritePolicy.WRITE_THROUGH
    ) -> None:
        self.first = Package("first", Reach(Everything()))
        self.second = Package("second", Reach(Trailing(8)))
        self.engine = SteppedTransferEngine()
        config = CacheConfig(
            components={"first": {}, "second": {}},
            page_size=PAGE,
            device_tokens=64,
            host_tokens=host_tokens,
            write_policy=policy,
            load=None,
        )
        plugins = [self.first.plugin, self.second.plugin]
        self.cache = Cache(config, plugins=plugins, transfers=self.engine)

    def admitted(self, tokens: list[int], chunk: int | None = None) -> Request:
        request = self.cache.begin(TokenKey(tokens), chunk=chunk)
        assert self.cache.admit(request).admitted
        self.cache.load_back(request)
        return request

    def computed(self, tokens: list[int]) -> Request:
        """A request whose prompt is computed and not shared yet."""
        request = self.admitted(tokens)
        left = request.prompt - request.computed
        assert self.cache.allocate(request, left)
        self.cache.computed(request, left)
        return request

    def cached(self, tokens: list[int]) -> None:
        self.cache.finish(self.computed(tokens))
        self.engine.run_all()
        self.cache.drain()

    def on_host_only(self, tokens: list[int]) -> None:
        self.cached(tokens)
        for name in ("first", "second"):
            self.cache.evict(name, 16)

    def books(self) -> dict[str, Any]:
        """Every page's slots and pins, every ledger, every request's accounts."""
        tree = self.cache.tree
        books: dict[str, Any] = {}
        for node in tree.nodes():
            for component in tree.components:
                cell = node.cells[component.index]
                for tier, slots, pins in (
                    ("device", cell.device, cell.device_pins),
                    ("host", cell.host, cell.host_pins),
                ):
                    for page in range(node.start, node.end):
                        at = (page - node.start) * 4
                        books[f"{component.name} {tier} {_prefix(node)[: (page + 1) * PAGE]}"] = (
                            slots[at : at + 4] if slots else None,
                            pins,
                        )
        for component in tree.components:
            for ledger in (component.device, component.host):
                if ledger is not None:
                    books[f"{component.name} {ledger.tier}"] = (
                        *ledger.counts().items(),
                        ledger.promised,
                    )
        for request in self.cache.requests.values():
            books[f"request {request.prompt}"] = (
                request.stage,
                request.computed,
                request.allocated,
                request.anchor_tokens,
                [list(part.runs) for part in request.components],
                [(part.account.held, part.account.promised) for part in request.components],
            )
        return books

    def assert_nothing_is_held(self) -> None:
        """Every request ended: all there is belongs to the free list or the tree, unpinned."""
        self.first.failing.clear()
        self.second.failing.clear()
        for request in list(self.cache.requests.values()):
            self.cache.abort(request)
        self.engine.run_all()
        self.cache.drain()
        self.cache.check_integrity()
        assert not self.first.segments
        assert not self.second.segments
        for component in self.cache.tree.components:
            for ledger in (component.device, component.host):
                if ledger is not None:
                    held = (ledger.pinned, ledger.private, ledger.in_flight, ledger.promised)
                    assert held == (0, 0, 0, 0)


def _prefix(node: Any) -> list[int]:
    parts: list[bytes] = []
    while node.parent is not None:
        parts.append(node.key)
        node = node.parent
    return memoryview(b"".join(reversed(parts))).cast("i").tolist()


def fails(scene: Scene, hook: str, call: Any) -> dict[str, Any]:
    """`call` raises the hook's error, with both named; returns the books before it."""
    scene.second.failing[hook] = 0
    before = scene.books()
    with pytest.raises(PluginHookError, match=f"component 'second': hook {hook} raised ") as caught:
        call()
    assert (caught.value.plugin, caught.value.hook) == ("second", hook)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    scene.second.failing.clear()
    return before


@pytest.mark.parametrize("hook", ["finalize_match_result", "acquire_component_lock"])
def test_a_match_that_fails_leaves_no_request_and_no_pin(hook: str) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    before = fails(scene, hook, lambda: scene.cache.begin(TokenKey(PROMPT)))
    assert scene.books() == before
    assert not scene.cache.requests
    assert not scene.first.segments
    scene.assert_nothing_is_held()


def test_an_admission_that_fails_promises_nothing() -> None:
    scene = Scene()
    scene.cached(PROMPT[:16])
    request = scene.cache.begin(TokenKey(PROMPT))
    before = fails(scene, "budget_contribution", lambda: scene.cache.admit(request))
    assert scene.books() == before
    assert request.stage is Stage.LEASED
    assert scene.cache.admit(request).admitted
    scene.assert_nothing_is_held()


def test_a_load_back_that_fails_keeps_its_promise_and_can_be_tried_again() -> None:
    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT)
    request = scene.cache.begin(TokenKey(LONGER))
    assert request.needs_load_back
    assert scene.cache.admit(request).admitted
    before = fails(scene, "build_hicache_transfers", lambda: scene.cache.load_back(request))
    assert scene.books() == before
    assert scene.cache.load_back(request)
    scene.engine.run_all()
    scene.cache.drain()
    assert scene.cache.allocate(request, 1)
    scene.assert_nothing_is_held()


@pytest.mark.parametrize("ending", ["checkpoint", "finish"])
def test_a_request_that_cannot_share_its_data_can_still_be_dropped(ending: str) -> None:
    scene = Scene(host_tokens=64)
    scene.cached(PROMPT[:8])
    request = scene.computed([*PROMPT[:8], *range(100, 116)])
    fails(scene, "acquire_component_lock", lambda: getattr(scene.cache, ending)(request))
    scene.cache.check_integrity()
    scene.assert_nothing_is_held()


@pytest.mark.parametrize("ending", ["checkpoint", "finish"])
def test_computed_pages_are_shared_even_if_their_backup_cannot_be_built(
    ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(host_tokens=64)
    scene.cached(PROMPT[:8])
    request = scene.computed([*PROMPT[:8], *range(100, 116)])
    failed = scene.cache.journal.counters[Direction.BACKUP].failed
    scene.second.failing["build_hicache_transfers"] = 0
    assert getattr(scene.cache, ending)(request)
    assert scene.cache.journal.counters[Direction.BACKUP].failed == failed + 1
    assert "'second': hook build_hicache_transfers raised" in caplog.text
    scene.cache.check_integrity()
    scene.assert_nothing_is_held()


def test_a_checkpoint_whose_pin_fails_leaves_books_and_request_as_they_were() -> None:
    scene = Scene()
    scene.cached(PROMPT[:8])
    request = scene.computed([*PROMPT[:8], *range(100, 116)])
    before = fails(scene, "acquire_component_lock", lambda: scene.cache.checkpoint(request))
    assert scene.books() == before
    assert scene.cache.checkpoint(request)
    scene.assert_nothing_is_held()


def test_a_restart_that_fails_leaves_a_request_that_can_be_dropped() -> None:
    scene = Scene()
    scene.cached(PROMPT[:16])
    request = scene.admitted(PROMPT)
    fails(scene, "acquire_component_lock", lambda: scene.cache.restart(request))
    scene.cache.check_integrity()
    scene.assert_nothing_is_held()


@pytest.mark.parametrize("ending", ["abort", "finish", "checkpoint"])
def test_a_release_that_fails_leaves_no_pin_behind(ending: str) -> None:
    scene = Scene()
    request = scene.computed(PROMPT)
    fails(scene, "release_component_lock", lambda: getattr(scene.cache, ending)(request))
    scene.cache.check_integrity()
    scene.assert_nothing_is_held()


@pytest.mark.parametrize("hook", ["commit_hicache_transfers", "abort_hicache_transfers"])
def test_a_transfer_ends_even_if_its_last_hook_raises(hook: str) -> None:
    scene = Scene(host_tokens=64)
    scene.cache.finish(scene.computed(PROMPT))
    while scene.engine.pending:
        if hook.startswith("commit"):
            scene.engine.step()
        else:
            scene.engine.fail()
    fails(scene, hook, scene.cache.poll)
    scene.cache.check_integrity()
    scene.cache.poll()
    scene.assert_nothing_is_held()


def test_a_match_whose_backup_cannot_be_built_is_a_match() -> None:
    scene = Scene(host_tokens=64, policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    scene.cached(PROMPT)
    scene.second.failing["build_hicache_transfers"] = 0
    assert scene.cache.begin(TokenKey(LONGER)).anchor_tokens == len(PROMPT)
    assert scene.cache.journal.counters[Direction.BACKUP].failed == 1
    scene.assert_nothing_is_held()


# -- answers the contract forbids


def test_a_match_made_longer_breaks_m5() -> None:
    scene = Scene()
    scene.cached(PROMPT)
    scene.second.answers["finalize_match_result"] = lambda view: ComponentMatch(view.anchor + 1)
    before = scene.books()
    with pytest.raises(ContractViolation, match="lengthened the match from 8 to 9 pages") as caught:
        scene.cache.begin(TokenKey(LONGER))
    assert (caught.value.rule, caught.value.component) == ("M5", "second")
    assert scene.books() == before
    scene.assert_nothing_is_held()


def test_a_match_made_shorter_is_taken_by_all_components() -> None:
    scene = Scene()
    scene.cached(PROMPT[:16])
    scene.cached(PROMPT)
    scene.second.answers["finalize_match_result"] = lambda view: ComponentMatch(4)
    assert scene.cache.begin(TokenKey(LONGER)).anchor_tokens == 16
    scene.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("spans", "rule"),
    [
        ([Span(7, 8)], "L3"),
        ([], "L3"),
        ([Span(5, 9)], "L3"),
    ],
)
def test_a_pin_that_leaves_out_the_reach_or_escapes_the_base_is_refused(
    spans: list[Span], rule: str
) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    scene.second.answers["acquire_component_lock"] = lambda query: spans
    before = scene.books()
    with pytest.raises(ContractViolation, match="acquire_component_lock") as caught:
        scene.cache.begin(TokenKey(LONGER))
    assert (caught.value.rule, caught.value.component) == (rule, "second")
    assert scene.books() == before
    assert not scene.cache.requests
    assert not scene.first.segments


def test_a_pin_wider_than_the_reach_is_kept_and_undone_by_its_release() -> None:
    scene = Scene()
    scene.cached(PROMPT)
    scene.second.answers["acquire_component_lock"] = lambda query: [Span(4, query.boundary)]
    request = scene.cache.begin(TokenKey(LONGER))
    assert request.anchor_tokens == 32
    assert scene.second.segments == [[Span(4, 8)]]
    scene.cache.abort(request)
    scene.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("demand", "cached", "rule"),
    [(Demand(0, 0), PROMPT, "A3"), (Demand(0, 0), [], "A1"), (Demand(15, -1), PROMPT, "A1")],
)
def test_a_budget_without_the_host_hits_breaks_a3_and_one_without_the_step_a1(
    demand: Demand, cached: list[int], rule: str
) -> None:
    scene = Scene(host_tokens=64)
    if cached:
        scene.on_host_only(cached)
    request = scene.cache.begin(TokenKey(LONGER))
    scene.second.answers["budget_contribution"] = lambda query: demand
    before = scene.books()
    with pytest.raises(ContractViolation, match="budget_contribution") as caught:
        scene.cache.admit(request)
    assert (caught.value.rule, caught.value.component) == (rule, "second")
    assert scene.books() == before
    scene.assert_nothing_is_held()


def test_evicting_calls_no_hook() -> None:
    scene = Scene()
    scene.cached(PROMPT)
    scene.first.calls.clear()
    scene.second.calls.clear()
    assert scene.cache.evict("first", 4, Tier.DEVICE) >= 4
    assert not scene.first.calls
    assert not scene.second.calls


ANSWERS_OF_ANOTHER_FORM: list[tuple[str, object, str]] = [
    ("finalize_match_result", (1, 2), "M5"),
    ("finalize_match_result", ComponentMatch(1.0), "M5"),  # type: ignore[arg-type]
    ("finalize_match_result", ComponentMatch(None), "M5"),  # type: ignore[arg-type]
    ("finalize_match_result", ComponentMatch(0, None), "M5"),  # type: ignore[arg-type]
    ("finalize_match_result", ComponentMatch(0, ("4",)), "M5"),  # type: ignore[arg-type]
    ("budget_contribution", (1, 2), "A1"),
    ("budget_contribution", Demand(1.5, 0), "A1"),  # type: ignore[arg-type]
    ("budget_contribution", Demand(9, 0, 3), "A1"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("hook", "answer", "rule"), ANSWERS_OF_ANOTHER_FORM)
def test_an_answer_of_another_form_names_plugin_hook_rule_and_right_form(
    hook: str, answer: object, rule: str
) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    scene.second.answers[hook] = lambda query: answer
    with pytest.raises(PluginError, match=f"'second': {hook} returned .*; return ") as caught:
        scene.admitted(LONGER)
    assert caught.value.rule == rule
    scene.second.answers.clear()
    scene.cache.check_integrity()


@pytest.mark.parametrize("answer", [[3], [(0, 1, 2)], [(0.0, 1.0)], [("a", "b")]])
def test_a_lock_that_answers_no_spans_breaks_l3(answer: object) -> None:
    scene = Scene()
    scene.second.answers["acquire_component_lock"] = lambda query: answer
    with pytest.raises(ContractViolation, match=r"returned .*, not a list of Span") as caught:
        scene.cache.begin(TokenKey(PROMPT))
    assert caught.value.rule == "L3"
    scene.assert_nothing_is_held()


@pytest.mark.parametrize("answer", [3, [1, 2], iter([])])
def test_a_transfer_built_of_something_else_names_the_hook_and_leaves_no_trace(
    answer: object,
) -> None:
    scene = Scene()
    scene.second.answers["build_hicache_transfers"] = lambda query: answer
    mounted = next(each for each in scene.cache.mounted if each.name == "second")
    assert mounted.transfer_hooks is not None
    query = TransferQuery(Direction.BACKUP, b"", b"")
    with pytest.raises(PluginError, match="return a list of PlaneCopy or None") as caught:
        mounted.transfer_hooks.build(query)
    assert caught.value.rule == "R2"


def test_a_hook_that_exits_does_not_end_the_process() -> None:
    def leave(query: object) -> None:
        raise SystemExit(3)

    scene = Scene()
    scene.second.answers["finalize_match_result"] = leave
    with pytest.raises(PluginHookError, match="finalize_match_result raised SystemExit: 3"):
        scene.cache.begin(TokenKey(PROMPT))
    scene.assert_nothing_is_held()
