"""A cache that keeps the contract hears nothing from the guard, and decides as without it."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import pytest

from kvgraft import ConfigError, LeaseError, PluginHookError, TokenKey
from kvgraft.config import GuardMode
from kvgraft_replay.payload import Verify
from kvgraft_replay.replay import ReplaySettings, replay
from kvgraft_replay.synthetic import synthetic_workload

from ..admission.crowd import Crowd
from ..commands import KVGRAFT, run
from ..serving.server import ledgers, tree_dump
from ..serving.setups import SETUPS
from ..storage_tier.shelf import Shelf, settings, step_by_step, tier_of
from .guarded import small
from .scene import LONGER, PROMPT, Scene
from .storage_defects import stored

SEEDS = range(3)
MOVES = 100


def crowd(name: str, seed: int, mode: GuardMode, **settings: Any) -> Crowd:
    """A crowd that was let go to its end."""
    random = Random(f"{name} {seed}")
    cache, engine = small(SETUPS[name], random, mode, **settings)
    crowd = Crowd(cache, engine, random)
    for _ in range(MOVES):
        crowd.move()
    crowd.run_to_the_end()
    for request in list(cache.requests.values()):
        cache.abort(request)
    crowd.settle()
    return crowd


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SETUPS)
def test_a_crowd_of_requests_raises_no_alarm_and_ends_as_without_a_guard(
    name: str, seed: int
) -> None:
    guarded = crowd(name, seed, GuardMode.ON, guard_full_check=20)
    alone = crowd(name, seed, GuardMode.OFF)
    assert guarded.outcomes == alone.outcomes
    assert ledgers(guarded.cache) == ledgers(alone.cache)
    assert tree_dump(guarded.cache) == tree_dump(alone.cache)
    guard = guarded.cache.guard
    assert guard is not None
    assert guard.looked_at > MOVES // 2
    assert guard.full_checks == guard.looked_at // 20
    guarded.cache.close()


@pytest.mark.parametrize("name", SETUPS)
def test_a_sampled_guard_raises_no_alarm_either(name: str) -> None:
    crowd(name, 0, GuardMode.SAMPLED, guard_sample=0.3, guard_full_check=5).cache.close()


@pytest.mark.parametrize(
    "hook",
    [
        "finalize_match_result",
        "acquire_component_lock",
        "release_component_lock",
        "build_hicache_transfers",
        "budget_contribution",
    ],
)
def test_a_hook_that_raises_is_no_alarm(hook: str) -> None:
    """It is the component's error, named as without a guard, and whatever it left is right."""
    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT)
    scene.window.failing[hook] = 0
    with pytest.raises(PluginHookError, match=f"'window': hook {hook} raised ZeroDivisionError"):
        scene.cache.abort(scene.loaded(LONGER))
    scene.window.failing.clear()
    scene.close()
    assert not scene.window.segments


def test_misuse_is_refused_as_without_a_guard() -> None:
    scene = Scene()
    request = scene.admitted(PROMPT)
    for error, misuse in (
        (ConfigError, lambda: scene.cache.begin(TokenKey([]))),
        (LeaseError, lambda: scene.cache.admit(request)),
        (LeaseError, lambda: scene.cache.computed(request, 1)),
        (ConfigError, lambda: scene.cache.evict("nobody", 1)),
        (TypeError, lambda: scene.cache.evict("base")),  # type: ignore[call-arg]
    ):
        with pytest.raises(error):
            misuse()
    scene.cache.abort(request)
    with pytest.raises(LeaseError):
        scene.cache.finish(request)
    scene.close()


@pytest.mark.parametrize(
    ("workload", "mode"), [("agents", "on"), ("chat", "on"), ("rag", "on"), ("chat", "sampled")]
)
def test_a_replay_is_the_same_with_a_guard(
    workload: Literal["agents", "chat", "rag"], mode: str
) -> None:
    cache = {
        "components": {"full": {}, "swa": {"window": 256}, "mamba": {}},
        "device_tokens": 200_000,
        "host_tokens": 400_000,
        "load": None,
    }
    results: list[dict[str, Any]] = []
    for guard in (mode, "off"):
        settings = ReplaySettings(cache={**cache, "guard": guard}, verify=Verify.SAMPLED)
        requests = synthetic_workload(workload, requests=60, seed=0)
        result: dict[str, Any] = {**replay(requests, settings)}
        assert not result["first_problem"]
        del result["cpu_us_per_request"], result["wall_s"]
        results.append(result)
    assert results[0] == results[1]


@pytest.mark.parametrize("policy", ["write-through", "write-back", "write-through-selective"])
def test_a_guard_is_silent_about_pools_without_payload(policy: str) -> None:
    settings = ReplaySettings(
        cache={
            "components": {"full": {}, "swa": {"window": 256}, "mamba": {}},
            "device_tokens": 60_000,
            "host_tokens": 100_000,
            "write_policy": policy,
            "load": None,
            "guard": "on",
        },
        verify=Verify.OFF,
    )
    result = replay(synthetic_workload("agents", requests=20, seed=0), settings)
    assert result["settings"]["payload"] is False
    assert result["hit_tokens"]["host"]
    assert not result["first_problem"]


def test_pins_are_accounted_for_between_any_two_steps_of_the_storage_tier() -> None:
    scene, tier = stored()
    tier.pace = step_by_step()
    tier.prefetch(TokenKey([*LONGER, 1]))
    while tier.n_in_flight:
        scene.cache.poll()
        scene.cache.check_integrity()
    scene.close()


def test_pins_are_accounted_for_while_several_nodes_have_just_been_stored() -> None:
    scene = Scene(plain=True, host_tokens=64, storage=settings())
    shelf, tier = Shelf(), tier_of(scene.cache)
    tier.pace = step_by_step()
    tier.attach(shelf)
    shelf.gate.clear()
    for first in (500, 600, 700):
        scene.cached(range(first, first + 16))
    for _ in range(6):
        scene.cache.poll()
    assert len(tier.receipts()) > 1
    shelf.gate.set()
    while not all(each.ticket.done for each in tier.storing._sent):
        tier.client.poll()
    while tier.n_in_flight:
        scene.cache.poll()
        scene.cache.check_integrity()
    scene.close()


def test_the_command_line_replays_with_a_guard() -> None:
    command = (KVGRAFT, "replay", "--synthetic", "chat", "--requests", "10", "--component", "full")
    done = run(*command, "--guard", "on")
    assert (done.returncode, done.stderr) == (0, "")
    refused = run(*command, "--guard", "maybe")
    assert refused.returncode
    assert "'maybe' is not one of 'off', 'sampled', 'on'" in refused.stderr
