"""Logits behind restored prefixes: right components agree with the model, wrong ones are found."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvgraft_mamba.plugin
import kvgraft_swa.plugin
from kvgraft import (
    Component,
    ComponentMatch,
    ConfigError,
    Direction,
    Leading,
    MatchView,
    Reach,
    Term,
    Trailing,
    TransferQuery,
    hookimpl,
)
from kvgraft.packages.registry import Plugin, load_plugin
from kvgraft.transfers import PlaneCopy, pair_planes
from kvgraft_testing import LogitsReport, check_restored_logits

from .small_model import Sees, SmallModel


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small sums are slower on two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SHAPE = {"head_dim": 4, "dtype": "float64"}
PAGE, WINDOW, SINKS = 4, 6, 3


def all_of_it(token: int, other: int) -> bool:
    return other <= token


def window(token: int, other: int) -> bool:
    return token - WINDOW <= other <= token


def window_and_sinks(token: int, other: int) -> bool:
    return other < SINKS <= token or window(token, other)


SEES: dict[str, Sees | None] = {"full": all_of_it, "swa": window, "mamba": None}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": SHAPE,
    "swa": {**SHAPE, "window": WINDOW},
    "mamba": {
        "conv_dim": 0,
        "n_heads": 1,
        "head_dim": 2,
        "state_dim": 2,
        "dtype": "float64",
        "state_dtype": "float64",
    },
}


def check(*names: str, sees: Sees | None = None, **settings: Any) -> LogitsReport:
    """Check layers of these components; `sees` replaces that of the last one."""
    layers = {name: SEES[name] for name in names}
    if sees is not None:
        layers[names[-1]] = sees
    components = {name: OPTIONS[name] for name in names}
    return check_restored_logits(SmallModel(layers), components, tolerance=1e-9, **settings)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("names", [["full"], ["swa"], ["full", "swa", "mamba"]])
def test_right_components_agree_with_the_model_at_every_boundary(names: list[str]) -> None:
    report = check(*names, n_tokens=5 * PAGE)
    assert not report.differences, report
    places = ["device", "host", *(f"host: {name}" for name in names[1:])]
    assert report.restored == dict.fromkeys(places, (4, 8, 12, 16))
    # without a prefix; then every length, origin and place
    assert report.runs == 1 + 4 * 3 * len(places)
    assert 0 < report.distance < 1e-9
    assert "resumed from device: 4 lengths, 4 to 16 tokens" in str(report)


def test_a_sequence_passes_every_border_by_default() -> None:
    model = SmallModel({"swa": lambda token, other: token - 11 <= other <= token})
    report = check_restored_logits(model, {"swa": {**SHAPE, "window": 11}})
    assert not report.differences, report
    assert report.restored["device"] == tuple(range(PAGE, (2 * 3 + 4) * PAGE, PAGE))


def windows(*terms: Term, **hooks: Any) -> Plugin:
    """The component `swa` with another reach, and with hooks of its own."""

    @hookimpl
    def create_component(options: Any, context: Any) -> Component:
        component = kvgraft_swa.plugin.create_component(options, context)
        if terms:
            component.reach = Reach(*terms)
        return component

    declare = kvgraft_swa.plugin.declare_component
    hooks = {name: hookimpl(hook) for name, hook in hooks.items()}
    package = SimpleNamespace(declare_component=declare, create_component=create_component, **hooks)
    return load_plugin("swa", package)


def ended(component: Component, query: TransferQuery) -> None:
    """Nothing to do."""


ENDS = {"commit_hicache_transfers": ended, "abort_hicache_transfers": ended}


def test_a_component_that_restores_another_page_is_found() -> None:
    def build_hicache_transfers(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        slots = query.host_slots
        if query.direction is Direction.LOAD_BACK:  # int32: the last one first
            slots = slots[-4:] + slots[:-4]
        return pair_planes(component, query._replace(host_slots=slots))

    wrong = windows(build_hicache_transfers=build_hicache_transfers, **ENDS)
    report = check("full", "swa", plugins=[wrong], n_tokens=16)
    assert {each.place for each in report.differences} == {"host", "host: swa"}
    assert {each.restored for each in report.differences} == {8, 12}, "one page has no other"
    assert {each.origin for each in report.differences} == {"prompt", "inside", "decoded"}


def test_a_component_that_leaves_a_plane_behind_is_found() -> None:
    def build_hicache_transfers(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        return pair_planes(component, query)[:1]

    wrong = windows(build_hicache_transfers=build_hicache_transfers, **ENDS)
    report = check("swa", plugins=[wrong], n_tokens=16)
    assert {each.place for each in report.differences} == {"host"}
    assert {each.restored for each in report.differences} == {4, 8, 12}


@pytest.mark.parametrize(("short", "page"), [(WINDOW - PAGE, PAGE), (WINDOW - 1, 1)])
def test_a_window_without_its_first_page_is_found(short: int, page: int) -> None:
    report = check("swa", plugins=[windows(Trailing(short))], page_size=page, n_tokens=9)
    assert {each.place for each in report.differences} == {"device", "host"}
    assert all(each.position >= WINDOW for each in report.differences)


def test_a_reach_without_its_sinks_is_found_and_with_them_it_is_right() -> None:
    right = windows(Leading(SINKS), Trailing(WINDOW))
    report = check("full", "swa", sees=window_and_sinks, plugins=[right], n_tokens=16)
    assert not report.differences, report
    report = check("full", "swa", sees=window_and_sinks, n_tokens=16)
    assert any(each.place == "device" and each.restored for each in report.differences)


def test_a_state_that_is_not_copied_is_found() -> None:
    def build_hicache_transfers(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        return []

    hooks = {"build_hicache_transfers": build_hicache_transfers, **ENDS}
    package = SimpleNamespace(
        declare_component=kvgraft_mamba.plugin.declare_component,
        create_component=kvgraft_mamba.plugin.create_component,
        **{name: hookimpl(hook) for name, hook in hooks.items()},
    )
    wrong = load_plugin("mamba", package)
    report = check("full", "mamba", plugins=[wrong], n_tokens=12)
    assert {each.place for each in report.differences} == {"host", "host: mamba"}


def test_a_model_that_differs_without_a_prefix_is_told_apart() -> None:
    class Wrong(SmallModel):
        def step(self, *given: Any) -> torch.Tensor:
            return super().step(*given) + 1e-3

    report = check_restored_logits(Wrong({"full": all_of_it}), {"full": SHAPE}, n_tokens=8)
    assert len(report.differences) == report.runs
    assert str(report.differences[0]) == (
        "without a restored prefix: logits differ by 0.001, first those of token 0"
    )


def test_a_check_that_compares_nothing_is_refused() -> None:
    def finalize_match_result(component: Component, view: MatchView) -> ComponentMatch:
        return ComponentMatch(0)

    shy = windows(finalize_match_result=finalize_match_result)
    with pytest.raises(ConfigError, match="nothing was restored in 1 runs; 16 tokens: anchor"):
        check("full", "swa", plugins=[shy], n_tokens=16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_tokens": 4}, "sequence of 4 tokens in pages of 4: give n_tokens of 2 to 128 pages"),
        ({"n_tokens": 4096}, "sequence of 4096 tokens in pages of 4"),
        ({"device_tokens": 16}, "a sequence of 32 tokens does not fit: "),
        ({"colour": "red"}, "colour"),
    ],
)
def test_settings_that_cannot_work_are_one_line(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        check("full", **settings)
    assert "\n" not in str(refusal.value)


def test_logits_of_another_shape_are_refused() -> None:
    class Wrong(SmallModel):
        def step(self, *given: Any) -> torch.Tensor:
            return super().step(*given)[:, :5]

    with pytest.raises(
        ConfigError, match=r"model.step gave logits \[37, 5\], model.whole \[37, 11"
    ):
        check_restored_logits(Wrong({"full": all_of_it}), {"full": SHAPE})
