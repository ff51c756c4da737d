"""A cache that keeps the contract hears nothing from the guard, and decides as without it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, Literal

import numpy as np
import pytest
import torch

from kvgraft import (
    Cache,
    ConfigError,
    LeaseError,
    LoadModel,
    LockQuery,
    PluginHookError,
    Reach,
    Span,
    TokenKey,
    WritePolicy,
)
from kvgraft.admission.decision import Outcome
from kvgraft.config import GuardMode
from kvgraft.requests.backup import CleanReserve
from kvgraft.requests.components import Due
from kvgraft.types import Direction
from kvgraft_guard.watching import Guard
from kvgraft_replay.payload import Verify
from kvgraft_replay.replay import ReplaySettings, replay
from kvgraft_replay.synthetic import synthetic_workload
from kvgraft_testing.machine import paged_plugin, setup_for
from kvgraft_testing.machine.setups import engine_for, open_cache
from kvgraft_testing.machine.sizes import Sizes

from ..admission.crowd import Crowd
from ..commands import KVGRAFT, run_forked
from ..model.patterns import Strided
from ..serving.engines import PromptEngine
from ..serving.life import decode, prefill, prefilled, serve
from ..serving.own_parts import override
from ..serving.server import Server, ledgers, tree_dump
from ..serving.setups import SETUPS
from ..storage_tier.shelf import Shelf, settings, step_by_step, tier_of
from .busy import STRAINS, Busy
from .guarded import small
from .scene import LONGER, PAGE, PROMPT, WINDOW, Scene, window_of
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


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.long if seed else ()) for seed in SEEDS]
)
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
    cache = crowd(name, 0, GuardMode.SAMPLED, guard_sample=0.3, guard_full_check=5).cache
    assert isinstance(cache.guard, Guard)
    assert not cache.guard.watched.contents._sources, "of transfers that ended"
    cache.close()


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
    """It is the component's error, named as without a guard, and the state it left is right."""
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("workload", "mode"),
    [
        pytest.param("agents", "on", marks=pytest.mark.long),
        ("chat", "on"),
        pytest.param("rag", "on", marks=pytest.mark.long),
        ("chat", "sampled"),
    ],
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


@pytest.mark.one_in(3)
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
    done = run_forked(*command, "--guard", "on")
    assert (done.returncode, done.stderr) == (0, "")
    refused = run_forked(*command, "--guard", "maybe")
    assert refused.returncode
    assert "'maybe' is not one of 'off', 'sampled', 'on'" in refused.stderr


SMALL: dict[str, Any] = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 2}


def opened(*components: str, **settings: Any) -> Cache:
    """A guarded cache of pages of four tokens; a window of two pages."""
    options = {
        "full": SMALL,
        "swa": {**SMALL, "window": 6, "device_tokens": settings.pop("window_tokens", 64)},
        "mamba": {"states": settings.pop("states", 6)},
    }
    chosen = {name: options[name] for name in components}
    return Cache.open(chosen, page_size=4, guard="on", transfers=PromptEngine(), **settings)


def test_a_chunk_below_a_page_has_its_slack_in_the_page_it_began() -> None:
    with opened("full", "swa", device_tokens=128) as cache:
        server = Server(cache)
        request = server.start(range(25), 40, 3)
        server.prefill(request)
        server.decode(request, 40)
        cache.finish(request)


def test_a_backup_may_wait_where_the_one_above_pinned_the_last_slot() -> None:
    with opened("swa", window_tokens=20, device_tokens=20, host_tokens=96) as cache:
        server = Server(cache)
        request = server.start(range(8), 12)
        server.prefill(request)
        server.decode(request, 4)
        assert cache.tree.component("swa").device.headroom == 1
        cache.finish(request)


def test_a_backup_may_wait_where_a_left_behind_state_took_the_last_slot() -> None:
    components = {"full": {**SMALL, "head_dim": 64}, "mamba": {"states": 4, "host_states": 8}}
    with Cache.open(
        components, page_size=16, device_tokens=256, host_tokens=256, load=None, guard="on"
    ) as cache:
        request = cache.begin(TokenKey(range(161)), reserve=16, resume_at=48)
        assert cache.admit(request).admitted
        for n_tokens in (48, 8, 72):
            assert cache.next_chunk(request, n_tokens) == n_tokens
            assert cache.allocate(request, n_tokens)
            cache.computed(request, n_tokens)
        assert request.state_components[0].due_as is Due.LEFT
        assert cache.tree.component("mamba").device.headroom == 1
        assert cache.checkpoint(request)
        assert not cache.journal.counters[Direction.BACKUP].slots["mamba"]
        cache.abort(request)


def test_evictions_count_where_the_ledgers_are_the_same() -> None:
    """A page is left behind, one is evicted and one is taken, in one allocation."""
    scene = Scene()
    scene.cached(PROMPT)
    guard = scene.cache.guard
    assert isinstance(guard, Guard)
    was = guard.books.read()
    causes = scene.component("base").device.evicted
    causes["deleted"] += 1
    assert guard.books.read_after(was, left=True) == guard.books.read() != was
    causes["deleted"] -= 1
    scene.close()


@pytest.mark.parametrize(
    ("resume_at", "pages"),
    [
        (None, ()),
        (np.array(9), (2,)),
        (np.array([16, 9]), (2, 4)),
        (torch.tensor([16, 9]), (2, 4)),
        (iter([16, 9]), (2, 4)),
        ((at for at in (16, 9)), (2, 4)),
    ],
    ids=["none", "a-number", "numbers", "tensor", "iterator", "generator"],
)
def test_points_of_any_kind_of_sequence_are_read_once(
    resume_at: Any, pages: tuple[int, ...]
) -> None:
    scene = Scene()
    assert scene.begin(PROMPT, resume_at=resume_at).resume_at == pages
    scene.close()


class Three:
    """A number of a library that Python does not know, as tensors are."""

    def __index__(self) -> int:
        return 3


def test_numbers_of_other_libraries_do_not_overflow_in_the_guard() -> None:
    scene = Scene()
    request = scene.admitted(PROMPT)
    assert scene.cache.next_chunk(request, np.uint8(3)) == 3
    assert scene.cache.next_chunk(request, Three()) == 3
    assert scene.cache.allocate(request, np.uint8(3))
    scene.cache.computed(request, np.uint8(3))
    assert request.computed == 3
    scene.cache.evict("base", np.uint8(1))
    scene.cache.evict("base", Three())  # type: ignore[arg-type]
    scene.close()


def test_a_waiting_request_whose_client_left_is_passed_by_nobody() -> None:
    with opened("full", device_tokens=64) as cache:
        running = cache.begin(TokenKey(range(40)))
        assert cache.admit(running).admitted
        left = cache.begin(TokenKey(range(1000, 1040)))
        assert cache.admit(left).outcome is Outcome.DEFERRED
        cache.abort(left)
        del left
        cache.abort(running)
        for first in range(2000, 2000 + 40 * 8, 8):
            later = cache.begin(TokenKey(range(first, first + 8)))
            assert cache.admit(later).admitted
            cache.abort(later)


@pytest.mark.parametrize("mode", [GuardMode.OFF, GuardMode.ON])
@pytest.mark.parametrize("end", ["checkpoint", "finish"])
def test_a_call_refused_for_its_key_takes_no_component_lock(end: str, mode: GuardMode) -> None:
    scene = Scene(host_tokens=64, mode=mode)
    request = scene.computed(PROMPT, reserve=PAGE)
    assert scene.cache.allocate(request, PAGE)
    scene.cache.computed(request, PAGE)
    locked = scene.window.segments.copy()
    with pytest.raises(LeaseError, match="extend the key with the tokens that were decoded"):
        getattr(scene.cache, end)(request)
    assert scene.window.segments == locked
    request.key.extend(range(PAGE))
    getattr(scene.cache, end)(request)
    scene.close()
    assert not scene.window.segments


def test_a_client_that_left_while_its_request_waited_is_not_waited_for() -> None:
    scene = Scene()
    scene.computed(range(900, 932))
    gone = TokenKey(range(2000, 2040))  # a conversation, which the engine keeps
    for turn in range(2):
        request = scene.cache.begin(gone)
        assert scene.cache.admit(request).outcome is Outcome.DEFERRED
        scene.cache.abort(request)
        for number in range(40):
            request = scene.cache.begin(TokenKey([number] * 4))
            assert scene.cache.admit(request).admitted
            scene.cache.abort(request)
        gone.extend([turn])


def test_a_copy_for_one_reserve_is_of_the_data_that_its_victims_take_along() -> None:
    """The copy of all failed, and the node stays in the base's reserve when it is no leaf."""
    scene = Scene(plain=True, state=True, host_tokens=64, policy=WritePolicy.WRITE_BACK)
    prompt = range(len(PROMPT) + 1)
    scene.cached(prompt)
    short = ["base"]

    def fill(reserve: CleanReserve) -> None:
        if short:
            reserve.fill_pool(scene.component(short.pop()), 1)

    override(scene.cache.clean_reserve, fill=fill)
    scene.cache.poll()
    scene.engine.fail(0)
    scene.cached([*prompt, *range(100, 108)])
    short.append("state")
    scene.cache.poll()
    (operation,) = scene.cache.journal.operations()
    assert [pair.component for pair in operation.pairs] == [scene.component("state").index]
    scene.close()


def a_page_more(query: LockQuery) -> list[Span]:
    """The window's pages at a boundary, and the one before them."""
    return [Span(max(0, span.start - 1), span.end) for span in window_of(query)]


@pytest.mark.parametrize("end", ["checkpoint", "finish"])
def test_a_page_that_a_component_asks_to_pin_counts_as_used(end: str) -> None:
    scene = Scene(host_tokens=64)
    scene.window.answers["acquire_component_lock"] = a_page_more
    assert getattr(scene.cache, end)(scene.computed(range(len(PROMPT) + 1)))
    scene.close()


def test_pages_that_a_component_pins_beside_its_reach_are_not_weighed() -> None:
    """Loading the reaches is as fast as computing, and a page more would not be."""
    scene = Scene(host_tokens=64)
    nbytes = [scene.mounted(name).component.device.slot_nbytes for name in ("base", "window")]
    weight = len(PROMPT) // PAGE * nbytes[0] + WINDOW // PAGE * nbytes[1]
    scene.close()
    load = LoadModel(bandwidth_bytes_s=1, latency_s=0, prefill_tokens_s=len(PROMPT) / weight)
    scene = Scene(host_tokens=64, load=load)
    scene.window.answers["acquire_component_lock"] = a_page_more
    scene.on_host_only(PROMPT)
    assert scene.loaded(LONGER).anchor_tokens == len(PROMPT)
    scene.close()


def test_a_decode_keeps_a_state_where_its_prefix_gave_up_the_only_other_slot() -> None:
    with opened("full", "mamba", states=2, device_tokens=256, decode_interval_tokens=0) as cache:
        server = Server(cache)
        server.serve(range(17))
        request = server.start(range(18), 9)
        assert request.anchor_tokens == 16
        assert not request.keeps_decoded
        server.prefill(request)
        server.decode(request, 9)
        assert request.state_components[0].tracked_page
        cache.abort(request)


def test_a_state_whose_canonical_pages_are_promised_away_on_host_is_not_copied_ahead() -> None:
    cache = Cache.open(
        {"hisparse": {"n_layers": 1, "hot_tokens": 4, "max_running": 2}, "mamba": {"states": 3}},
        page_size=4,
        device_tokens=256,
        host_tokens=48,
        write_policy="write-back",
        guard="on",
        transfers=PromptEngine(),
    )
    server = Server(cache)
    server.serve(range(8))
    request = server.start(range(100, 143), chunk=4)
    server.step(request, 4)
    on_host = cache.tree.component("hisparse").host
    assert on_host is not None
    assert on_host.headroom == 0
    assert cache.tree.component("mamba").device.free == 0
    cache.poll()
    assert cache.tree.component("mamba").clean.n_slots == 1
    cache.abort(request)
    cache.close()


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(6), id="some"),
        pytest.param(range(6, 400), id="many", marks=pytest.mark.long),
    ],
)
def test_legal_calls_in_any_order_on_caches_of_any_settings_raise_no_alarm(seeds: range) -> None:
    for seed in seeds:
        Busy(seed).run(120)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("strain", STRAINS)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1), id="one"),
        pytest.param(range(1, 60), id="many", marks=pytest.mark.long),
    ],
)
def test_a_part_of_the_cache_under_strain_raises_no_alarm(seeds: range, strain: str) -> None:
    for seed in seeds:
        Busy(seed, strain).run(250)


def test_a_match_whose_copy_makes_room_on_host_may_take_canonical_data_along() -> None:
    """Room for a state on HOST is a leaf's, where everything goes, also what DEVICE has of it."""
    hisparse = {"n_layers": 1, "hot_tokens": 4, "max_running": 2}
    with Cache.open(
        {"hisparse": hisparse, "mamba": {"states": 6, "host_states": 1}},
        page_size=4,
        device_tokens=256,
        host_tokens=128,
        write_policy="write-through-selective",
        guard="on",
        transfers=PromptEngine(),
    ) as cache:
        server = Server(cache)
        device = cache.tree.component("hisparse").device
        for first in (100, 200):
            server.serve(range(first, first + 9))
            free = device.free
            cache.abort(server.begin(range(first, first + 9)))
            cache.drain()
        assert device.free > free


def test_a_call_for_a_request_that_ended_is_refused_as_without_a_guard() -> None:
    with Cache.open(["full"], page_size=4, device_tokens=64, guard="on") as cache:
        request = cache.begin(TokenKey(range(9), namespace="left with it"))
        assert cache.admit(request).admitted
        cache.abort(request)
        with pytest.raises(LeaseError, match="request is closed"):
            cache.checkpoint(request)


@pytest.mark.parametrize("state", [[], ["mamba"]])
def test_a_key_may_be_cut_below_data_that_was_shared_before_its_request_ends(
    state: list[str],
) -> None:
    """Nothing is left to share, so the end is not refused; the tree has the data it was given."""
    with opened("full", *state, device_tokens=64) as cache:
        request = prefilled(cache, range(8), reserve=4)
        assert cache.checkpoint(request)
        request.key.truncate(4)
        cache.finish(request)
        assert cache.begin(TokenKey(range(9))).anchor_tokens == 8


@pytest.mark.parametrize("end", ["checkpoint", "finish"])
def test_data_stays_without_a_backup_where_a_hook_cannot_build_its_copies(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(host_tokens=64)
    request = scene.computed(PROMPT)
    scene.window.failing["build_hicache_transfers"] = 0
    getattr(scene.cache, end)(request)
    assert "a node stays without a backup: component 'window': hook build_" in caplog.text
    del scene.window.failing["build_hicache_transfers"]
    assert scene.cache.stats().backups.failed == 1
    if end == "checkpoint":
        scene.cache.finish(request)
    scene.close()


@pytest.mark.parametrize("begins_anew", [False, True])
def test_cleared_data_may_leave_device_where_a_match_needs_room_on_host(
    *, begins_anew: bool
) -> None:
    """Data left behind by a running request is copied when it is hit, into room of cleared data."""
    states = {"states": 8, "host_states": 4}
    with SETUPS["full+mamba"].open(
        page_size=1, host_tokens=9, guard=GuardMode.ON, mamba=states
    ) as cache:
        serve(cache, [9, 9, 9])
        assert cache.drain()
        follower = TokenKey([*PROMPT[:8], 1])
        waiting = cache.begin(follower) if begins_anew else None
        cache.evictor.sweeper.n_steps = 0
        cache.clear()
        running = cache.begin(TokenKey(PROMPT[:8]), reserve=6)
        assert cache.admit(running).admitted
        prefill(cache, running)
        decode(cache, running, range(5))
        cache.evictor.sweeper.n_steps = 3
        free = cache.tree.by_name["full"].device.free
        if waiting is None:
            waiting = cache.begin(follower)
        else:
            assert cache.admit(waiting).admitted
        assert waiting.anchor_tokens == 8
        assert cache.tree.by_name["full"].device.free > free
        assert cache.stats().backups.in_flight


@pytest.mark.parametrize("by_hand", [False, True])
def test_drafts_cut_from_a_key_count_in_no_later_step_whoever_steps_between(
    *, by_hand: bool
) -> None:
    with opened("full", device_tokens=512, max_drafts=3) as cache:
        first, other = (
            prefilled(cache, range(start, start + 100), reserve=60) for start in (0, 1000)
        )
        for _ in range(4):  # every request takes the fast path once
            step = cache.step([first], [[1, 2, 3, 4]], n_drafts=3)
            assert step.requests == [first]
            computed = first.computed
            first.key.truncate(computed + 2)
            if by_hand:
                cache.computed(first, 2)
            for _ in range(2):
                cache.step([other], [[1, 2, 3, 4]], n_drafts=3)
                other.key.truncate(other.computed + 1)
            cache.step([first, other], [[1], [2]])
            assert first.computed == computed + 2


def test_a_reach_that_grows_with_the_prompt_delays_no_guard() -> None:
    """No grid of its points is affordable, and nothing is counted up to where one would be."""
    setup = replace(setup_for([paged_plugin("strided", Reach(Strided(6, 2)))]), guarded=True)
    cache = open_cache(setup, Sizes(), engine_for("cpu"))
    guard = cache.guard
    assert guard is not None
    cache.abort(cache.begin(TokenKey(range(8))))
    assert guard.looked_at
    cache.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_pass_with_drafts_may_end_behind_the_reservation(seed: int) -> None:
    """An ending request hands over the pages behind its window, also if it jumps over its end."""
    rnd = Random(seed)
    components = {"full": SMALL, "swa": {**SMALL, "window": 40}}
    with Cache.open(components, device_tokens=6400, guard="on", max_drafts=4) as cache:
        request = prefilled(cache, range(68), reserve=60)
        cache.step([request], n_tokens=0)
        given = 0
        for n_drafts in rnd.choices((0, 2, 4), k=60):
            n = rnd.randint(1, given) if given else 0
            request.key.extend([rnd.randrange(50) for _ in range(n)])
            step = cache.step([request], n_drafts=n_drafts, n_computed=n)
            if step.refused:
                break
            given = 1 + n_drafts
        assert request.computed > request.total
