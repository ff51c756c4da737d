"""kvgraft as vLLM's cache manager, under vLLM's own scheduler; needs vLLM's Python files only."""

from __future__ import annotations

import logging
import random
import re
import socket
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM's files are not at hand: make test-engine-files")

from plugins.vllm.tests.schedulers import (
    Engine,
    Sizes,
    Traffic,
    Worker,
    drafting,
    drive,
    engine_config,
    sha,
)
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_manager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched import scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import RequestStatus

from kvgraft import ConfigError, GuardMode
from kvgraft_identity.spans import Identities
from kvgraft_vllm.block_layout import STATE
from kvgraft_vllm.general_plugin import install
from kvgraft_vllm.interface import MANAGER_INTERFACE
from kvgraft_vllm.manager import KvgraftCacheManager, put_in, refusals
from kvgraft_vllm.manager_settings import VARIABLE, ManagerSettings

FULL = Sizes()
WINDOWS = Sizes(windows=(None, 16, 16, 16), n_blocks=161)
OTHER_WINDOWS = Sizes(windows=(None, 9, 30), n_blocks=161)
STATES = Sizes(windows=(None, STATE), n_blocks=90)
QWEN = Sizes(windows=(STATE, STATE, STATE, None), n_blocks=161, exports=True)
ALL = Sizes(windows=(None, 16, STATE, 16), n_blocks=161)
SMALL = replace(FULL, n_blocks=33), replace(WINDOWS, n_blocks=121)
SETTINGS = ManagerSettings(reserve=0, point_tokens=16)
N_SEEDS = 20
FEW_SEEDS = [0, 1, 2, 5]
"""Among them is one that preempts, with every set of components and policy."""
SEEDS = [
    pytest.param(FEW_SEEDS, id="4 seeds"),
    pytest.param(
        [seed for seed in range(N_SEEDS) if seed not in FEW_SEEDS],
        id="16 more",
        marks=pytest.mark.long,
    ),
]

Put = Callable[[ManagerSettings], None]


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """Puts the manager in, until the test's end."""
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "KVCacheManager", scheduler.KVCacheManager)
        patch.setattr(scheduler.Scheduler, "__init__", scheduler.Scheduler.__init__)
        patch.setattr(EngineCore, "preprocess_add_request", EngineCore.preprocess_add_request)
        yield put_in


def run(sizes: Sizes, seed: int) -> tuple[Engine, Worker]:
    """Random traffic to its end; nothing is held any more then."""
    engine = Engine(sizes)
    assert isinstance(engine.manager, KvgraftCacheManager)
    worker = drive(engine, Traffic(seed))
    assert engine.manager.usage == 0
    assert not engine.manager.cache.requests
    engine.manager.cache.check_integrity()
    return engine, worker


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("policy", ["fcfs", "priority", "async"])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(FULL, id="full"),
        pytest.param(WINDOWS, id="windows"),
        pytest.param(STATES, id="states"),
        pytest.param(QWEN, id="qwen"),
        pytest.param(OTHER_WINDOWS, id="other_windows", marks=pytest.mark.long),
        pytest.param(ALL, id="all", marks=pytest.mark.long),
    ],
)
def test_every_position_that_is_attended_to_holds_its_own_token(
    put: Put, sizes: Sizes, policy: str, seeds: list[int]
) -> None:
    put(SETTINGS)
    sizes = replace(sizes, depth=2) if policy == "async" else replace(sizes, policy=policy)
    workers = [run(sizes, seed)[1] for seed in seeds]
    assert not any(worker.wrong for worker in workers)
    assert sum(worker.stats.hits > 0 for worker in workers) >= len(seeds) - 1
    assert sum(worker.n_resumed for worker in workers)


@pytest.mark.parametrize("sizes", [FULL, WINDOWS, STATES], ids=["full", "windows", "states"])
def test_the_guard_finds_no_broken_rule(put: Put, sizes: Sizes) -> None:
    put(SETTINGS.model_copy(update={"guard": GuardMode.ON}))
    assert run(sizes, seed=1)[1].wrong == 0


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("sizes", SMALL, ids=["full", "windows"])
def test_no_position_is_wrong_with_drafts(
    put: Put, sizes: Sizes, policy: str, seeds: list[int]
) -> None:
    put(SETTINGS)
    sizes = replace(sizes, policy=policy, drafts=5)
    workers = [run(sizes, seed)[1] for seed in seeds]
    assert not any(worker.wrong for worker in workers)
    for count in ("n_resumed", "n_accepted", "n_rejected"):
        assert sum(getattr(worker, count) for worker in workers), count


def test_a_conversation_goes_on_behind_an_answer_that_ends_among_drafts(put: Put) -> None:
    put(SETTINGS)
    for max_tokens in range(4, 20):
        engine = Engine(replace(FULL, drafts=5))
        engine.add("first", range(18), max_tokens)
        serve(engine)
        text = engine.worker.texts["first"].tokens[: 18 + max_tokens]
        engine.add("second", [*text, 1, 2, 3], max_tokens=2)
        assert serve(engine).wrong == 0
        assert engine.worker.stats.hits >= (18 + max_tokens - 1) // 4 * 4


def test_drafts_with_states_are_refused_by_name(put: Put) -> None:
    put(SETTINGS)
    assert type(Engine(replace(STATES, drafts=5)).manager) is KVCacheManager


def swapping(checkpoint: Callable[[Any], bool], request: Any, *, keep_slots: bool) -> bool:
    assert keep_slots
    return checkpoint(request)


def impatient(new: Callable[[Any], Any], request: Any) -> Any:
    """A sequence that does not wait for data that others compute: it computes it once more."""
    sequence = new(request)
    sequence.waited = True
    return sequence


def test_a_manager_that_swaps_slots_is_caught(put: Put) -> None:
    put(SETTINGS)
    wrong = 0
    for seed in range(N_SEEDS):
        engine = Engine(WINDOWS)
        engine.manager._new_sequence = partial(impatient, engine.manager._new_sequence)
        engine.manager.cache.checkpoint = partial(swapping, engine.manager.cache.checkpoint)
        wrong += drive(engine, Traffic(seed)).wrong
        if wrong:
            return
    raise AssertionError("no position was wrong")


def test_a_manager_that_leaves_the_copies_of_states_out_is_caught(put: Put) -> None:
    put(SETTINGS)
    engine = Engine(STATES)
    engine.manager.take_kv_cache_block_copies = lambda: ([], [])
    worker = drive(engine, Traffic(0))
    assert worker.stats.hits
    assert worker.wrong


def moving(sizes: Sizes, seed: int) -> Engine:
    """An engine in which the boundary between two components moves in most steps."""
    engine = Engine(sizes)
    manager, rng = engine.manager, random.Random(seed)
    names = [each.component for each in manager.layout.ranges]
    take = manager.take_kv_cache_block_copies

    def moved() -> Any:
        manager.cache.move_memory(*rng.sample(names, 2))
        return take()

    manager.take_kv_cache_block_copies = moved
    return engine


@pytest.mark.one_in(3)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sizes", [WINDOWS, STATES, QWEN], ids=["windows", "states", "qwen"])
def test_no_position_is_wrong_while_the_boundary_moves(put: Put, sizes: Sizes, depth: int) -> None:
    put(SETTINGS)
    engines = [moving(replace(sizes, depth=depth), seed) for seed in range(5)]
    assert not any(drive(engine, Traffic(seed)).wrong for seed, engine in enumerate(engines))
    arenas = [engine.manager.cache.arenas for engine in engines]
    assert sum(arena.moves for each in arenas for arena in each.by_tier.values()) > 50
    assert sum(each.moved_slots for each in arenas) > 10
    for engine in engines:
        engine.manager.cache.check_integrity()


def test_a_boundary_that_moves_what_tables_name_is_caught(put: Put) -> None:
    put(SETTINGS)
    engine = moving(WINDOWS, seed=0)
    engine.manager.cache.arenas.mover.keeps_tables = False
    assert drive(engine, Traffic(0)).wrong


@pytest.mark.parametrize("sizes", [FULL, STATES, QWEN], ids=["full", "states", "qwen"])
def test_a_worker_finds_nothing_wrong_with_vllms_own_manager(sizes: Sizes) -> None:
    worker = drive(Engine(sizes), Traffic(0))
    assert worker.stats.hits
    assert worker.wrong == 0


# -- which manager vLLM has


def test_nothing_changes_unless_the_variable_says_so(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    install()
    assert type(Engine(FULL).manager) is KVCacheManager
    monkeypatch.setenv(VARIABLE, '{"policy": "lru", "reserve": 7}')
    install()
    install()
    engine = Engine(FULL)
    assert engine.manager.cache.config.policy == "lru"
    assert engine.manager.settings.reserve == 7


@pytest.mark.parametrize(
    ("text", "said"), [("yes", "give 1, or settings"), ('{"polcy": "lru"}', "polcy")]
)
def test_impossible_settings_are_refused_in_a_line(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=said) as refused:
        install()
    assert "\n" not in str(refused.value)


def asked_of_the_engine(**asked: Any) -> Any:
    config = engine_config(FULL)
    for place, value in asked.items():
        part, _, name = place.rpartition("__")
        setattr(getattr(config, part) if part else config, name, value)
    return config


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"cache_config__enable_prefix_caching": False}, "prefix caching is off"),
        ({"speculative_config": drafting("eagle3")}, "speculative decoding by eagle3"),
        ({"model_config__max_model_len": 4096}, "max_model_len=4096 tokens .* never fits"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_an_engine_that_asks_for_more_keeps_vllms_manager(
    put: Put, asked: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(SETTINGS)
    with caplog.at_level(logging.WARNING, "kvgraft.vllm"):
        engine = Engine(FULL, asked_of_the_engine(**asked))
    assert type(engine.manager) is KVCacheManager
    (line,) = [each.getMessage() for each in caplog.records if each.name == "kvgraft.vllm"]
    assert "vLLM's own cache manager stays" in line
    assert re.search(said, line)


STATE_SHAPE = {"block_size": 4, "shapes": ((8,),), "dtypes": ()}
ATTENTION_SHAPE = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([MambaSpec(**STATE_SHAPE, mamba_cache_mode="align")], "states without attention"),
        (
            [FullAttentionSpec(**ATTENTION_SHAPE), MambaSpec(**STATE_SHAPE)],
            "states with mamba_cache_mode none",
        ),
        (
            [ChunkedLocalAttentionSpec(**ATTENTION_SHAPE, attention_chunk_size=8)],
            "KV cache groups of ChunkedLocalAttentionSpec",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_other_kinds_of_groups_are_refused_by_name(specs: list[Any], said: str) -> None:
    assert refusals(engine_config(FULL), arguments(*specs)) == [said]


def arguments(*specs: Any, **more: Any) -> dict[str, Any]:
    """The part of those of vLLM's `KVCacheManager` that is looked at."""
    specs = specs or (FullAttentionSpec(**ATTENTION_SHAPE),)
    hosted = more.pop("host_resident", False)
    groups = [SimpleNamespace(kv_cache_spec=spec, host_resident=hosted) for spec in specs]
    given = {"hash_block_size": 4, "enable_caching": True, "metrics_collector": None}
    return {"kv_cache_config": SimpleNamespace(kv_cache_groups=groups), **given, **more}


@pytest.mark.parametrize(
    ("asked", "more", "said"),
    [
        (
            {"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")},
            {},
            "KV connector NixlConnector",
        ),
        ({"ec_transfer_config": SimpleNamespace()}, {}, "an encoder cache connector"),
        ({"parallel_config__decode_context_parallel_size": 2}, {}, "context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, {}, "context parallelism"),
        ({"model_config__is_encoder_decoder": True}, {}, "an encoder-decoder model"),
        ({"model_config__is_diffusion": True}, {}, "a diffusion model"),
        ({"aux_output_config__enabled": True}, {}, "auxiliary outputs"),
        ({"speculative_config": drafting("mtp")}, {}, "speculative decoding by mtp"),
        ({}, {"metrics_collector": SimpleNamespace()}, "KV cache residency metrics"),
        ({}, {"hash_block_size": 2}, "blocks of several sizes"),
        ({}, {"host_resident": True}, "blocks in host memory"),
        ({}, {"enable_caching": False}, "prefix caching is off"),
        ({}, {}, ""),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_other_features_are_refused_by_name(
    asked: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    found = refusals(asked_of_the_engine(**asked), arguments(**more))
    assert found == ([said] if said else [])


# -- requests


def serve(engine: Engine) -> Worker:
    """Steps until all requests have ended."""
    return drive(engine, Traffic(0, n_requests=0, aborts=0, resets=0))


def test_a_request_of_the_longest_context_is_served(put: Put) -> None:
    put(SETTINGS)
    engine = Engine(replace(FULL, n_blocks=27))
    engine.add("long", range(90), max_tokens=6)
    worker = serve(engine)
    assert worker.wrong == 0
    assert len(worker.texts["long"].tokens) == FULL.max_model_len


def test_others_resume_from_a_prompt_while_its_request_decodes(put: Put) -> None:
    put(SETTINGS)
    engine = Engine(FULL)
    engine.add("first", range(40), max_tokens=20)
    for _ in range(4):
        engine.step()
    engine.add("second", [*range(36), 1, 2, 3], max_tokens=2)
    engine.step()
    assert engine.manager.cache.stats().tokens.device == 36


def test_a_request_resumes_from_what_its_own_step_computes(put: Put) -> None:
    put(SETTINGS)
    engine = Engine(FULL)
    engine.add("first", range(18), max_tokens=2)
    engine.add("second", [*range(16), 1, 2, 3], max_tokens=2)
    engine.step()
    assert set(engine.worker.tables) == {"first", "second"}
    assert engine.worker.stats.hits == 16
    assert serve(engine).wrong == 0


@pytest.mark.parametrize("sizes", [WINDOWS, STATES], ids=["windows", "states"])
def test_a_request_waits_a_step_for_what_another_computes(put: Put, sizes: Sizes) -> None:
    put(SETTINGS)
    engine = Engine(sizes)
    engine.add("first", range(18), max_tokens=2)
    engine.add("second", [*range(16), 1, 2, 3], max_tokens=2)
    engine.step()
    assert set(engine.worker.tables) == {"first"}
    engine.step()
    assert engine.worker.stats.hits == 16
    assert serve(engine).wrong == 0


def test_a_state_is_hit_in_the_step_after_the_one_that_reached_it(put: Put) -> None:
    put(SETTINGS)
    engine = Engine(STATES)
    engine.add("first", range(10), max_tokens=4)
    engine.step()
    engine.add("second", [*range(8), 50, 51, 52], max_tokens=2)
    engine.step()
    assert engine.worker.stats.hits == 8
    assert serve(engine).wrong == 0


def test_states_are_kept_where_prompts_depart_from_one_another(put: Put) -> None:
    put(SETTINGS)
    engine = Engine(STATES)
    hits = []
    for name in "abc":
        tail = 100 * ord(name)
        engine.add(name, [*range(18), *range(tail, tail + 18)], max_tokens=2)
        serve(engine)
        hits.append(engine.worker.stats.hits)
    assert hits == [0, 0, 16]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_conversation_goes_on_behind_its_last_answer(put: Put, depth: int) -> None:
    put(SETTINGS.model_copy(update={"reserve": 32}))
    engine = Engine(replace(STATES, depth=depth))
    engine.add("first", range(18), max_tokens=9)
    serve(engine)
    engine.add("second", [*engine.worker.texts["first"].tokens, 1, 2, 3], max_tokens=2)
    assert serve(engine).wrong == 0
    assert engine.worker.stats.hits == 24


def test_requests_that_share_nothing_leave_nothing_behind(put: Put) -> None:
    put(SETTINGS)
    engine = Engine(ALL)
    for name in "ab":
        engine.add(name, range(60), max_tokens=4).skip_reading_prefix_cache = True
        serve(engine)
    tree = engine.manager.cache.tree
    assert engine.worker.stats.hits == 0
    assert all(each.device.free == each.device.capacity for each in tree.components)


def test_salts_and_adapters_share_nothing(put: Put) -> None:
    put(SETTINGS)
    engine = Engine(FULL)
    for name, salt in (("a", None), ("b", "salt"), ("c", "salt"), ("d", None)):
        engine.add(name, range(30), max_tokens=2, salt=salt)
        serve(engine)
    assert engine.manager.cache.stats().tokens.device == 2 * 28


@pytest.mark.parametrize("sizes", [FULL, WINDOWS, STATES], ids=["full", "windows", "states"])
def test_equal_images_are_shared_and_others_are_not(put: Put, sizes: Sizes) -> None:
    """Each prompt has the same tokens; the worker knows which image it sees."""
    put(SETTINGS)
    engine, hits = Engine(sizes), []
    for number, identity in enumerate(["cat", "dog", "cat", "owl", "dog"]):
        prompt = [1, 2, 3, 4, *[77] * 24, *range(5, 17)]
        engine.add(f"{number}", prompt, max_tokens=3, images=[(4, 24, identity)])
        assert serve(engine).wrong == 0
        hits.append(engine.worker.stats.hits)
    again = [behind - before for before, behind in pairwise(hits)]
    assert max(hits[0], again[0], again[2]) <= 4, "the text before the image at most"
    assert min(again[1], again[3]) >= 28, "all of the image that was seen before"


def test_random_requests_with_images_attend_to_their_own(put: Put) -> None:
    """Of three images behind equal placeholders; some are too short to be told apart."""
    put(SETTINGS)
    chance, engine = random.Random(1), Engine(WINDOWS)
    for number in range(60):
        prompt, images = [1, 2, 3], []
        for _ in range(chance.randrange(1, 4)):
            length = chance.choice([5, 12, 16])
            images.append((len(prompt), length, f"{chance.randrange(3)}"))
            prompt += [*[77] * length, *range(chance.randrange(3))]
        engine.add(f"{number}", prompt, max_tokens=chance.randrange(1, 5), images=images)
        if number % 4 == 3:
            assert serve(engine).wrong == 0
    assert engine.worker.stats.hits > 100


def settle(engine: Engine, name: str) -> None:
    """Run until a session waits for more input."""
    for _ in range(60):
        engine.step()
        if engine.scheduler.requests[name].status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            return
    raise AssertionError(f"session {name} goes on")


def test_images_that_share_data_anyway_are_caught(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(SETTINGS)
    appended = Identities.appended
    monkeypatch.setattr(
        Identities,
        "appended",
        lambda key, ids, images, fewest: appended(key, ids, [], fewest=fewest),
    )
    engine = Engine(FULL)
    for identity in ("cat", "dog"):
        engine.add(identity, [77] * 40, max_tokens=2, images=[(0, 40, identity)])
        found = serve(engine)
    assert found.wrong > 0


@pytest.mark.parametrize("sizes", [FULL, STATES], ids=["full", "states"])
@pytest.mark.parametrize(
    "images",
    [
        [(8, 4, "short")],
        [(8, 100, "long")],
        [(8, 20, "one"), (12, 4, "inside it")],
        [(8, 12, "one"), (20, 4, "short"), (24, 12, "other")],
    ],
    ids=["short", "in steps", "overlapping", "several"],
)
def test_a_session_of_streamed_input_shares_up_to_what_cannot_be_told_apart(
    put: Put, sizes: Sizes, images: list[tuple[int, int, str]]
) -> None:
    """The engine goes on with the session; another with the same images reads its own data."""
    put(SETTINGS)
    engine = Engine(replace(sizes, max_model_len=256))
    for name in "ab":
        engine.add(name, range(20), max_tokens=2, resumable=True)
        settle(engine, name)
        end = max(offset + length for offset, length, _ in images)
        update = [*range(8), *[77] * (end - 8), *range(8)]
        engine.add(name, update, max_tokens=2, images=images, resumable=True)
        settle(engine, name)
        assert engine.worker.wrong == 0
        engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    assert engine.worker.stats.hits >= 16


def test_what_hints_retain_outlasts_later_requests_and_wrong_hints_are_ignored(
    put: Put, caplog: pytest.LogCaptureFixture
) -> None:
    put(SETTINGS)
    hits = []
    for payload in ({"priority": 2}, {"priority": "much"}):
        engine = Engine(FULL)
        action = KvHintAction("1", "kv.retain", "1.0", payload)
        for name in ("first", *"abcdefghij", "again"):
            start = ord(name[-1]) if len(name) == 1 else 7
            request = engine.add(name, range(start * 100, start * 100 + 40), max_tokens=2)
            if name == "first":
                request.kv_hints = KvHintsEnvelope("0.1", "m", [action])
            before = engine.worker.stats.hits
            assert serve(engine).wrong == 0
        hits.append(engine.worker.stats.hits - before)
    assert hits == [36, 0]
    assert "request first: kv_hints: kv.retain: priority 'much'" in caplog.text


def test_nothing_is_hit_after_a_reset(put: Put) -> None:
    put(SETTINGS)
    engine = Engine(FULL)
    for name in "ab":
        engine.add(name, range(30), max_tokens=2)
        serve(engine)
        assert engine.scheduler.reset_prefix_cache()
    assert engine.manager.cache.stats().tokens.device == 0


# -- KV events


class Router:
    """Follows KV events.

    Attributes:
        blocks: what they tell of blocks, by group and hash.
        reasons: why blocks left, as they say.
    """

    def __init__(self, engine: Engine) -> None:
        self.blocks: dict[tuple[int, Any], tuple[Any, ...]] = {}
        self.reasons: set[str] = set()
        engine.scheduler.kv_event_publisher = self

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                self.reasons.add(getattr(event, "reason", "none"))
                for each in event.block_hashes:
                    del self.blocks[event.group_idx, each]
            else:
                self.store(event)

    def store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        kind = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, event.medium
        size = event.block_size
        for at, each in enumerate(event.block_hashes):
            tokens = event.token_ids[at * size : at * size + size]
            place = event.group_idx, each
            assert place not in self.blocks
            self.blocks[place] = (parent, list(tokens), event.extra_keys[at], kind)
            parent = each


def with_events(sizes: Sizes) -> tuple[Engine, Router]:
    config = engine_config(sizes)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = Engine(sizes, config)
    return engine, Router(engine)


def test_kv_events_are_those_of_vllms_manager(put: Put) -> None:
    told = []
    for own in (True, False):
        if not own:
            put(SETTINGS)
        engine, router = with_events(FULL)
        assert isinstance(engine.manager, KvgraftCacheManager) is not own
        engine.add("first", range(30), max_tokens=20)
        engine.add("second", [*range(16), *range(70, 95)], max_tokens=3, salt="salt")
        serve(engine)
        engine.add("third", [*range(20), 1, 2, 3, 4, 5], max_tokens=2)
        serve(engine)
        seen = [(6, 10, "cat"), (16, 8, "dog")]
        engine.add("fourth", [*range(6), *[77] * 18, *range(4)], max_tokens=2, images=seen)
        serve(engine)
        told.append(router.blocks)
    assert len(told[0]) == 12 + 10 + 1 + 6
    assert told[0] == told[1]


@pytest.mark.parametrize("sizes", [FULL, WINDOWS], ids=["full", "windows"])
def test_kv_events_tell_what_the_cache_holds(put: Put, sizes: Sizes) -> None:
    put(SETTINGS)
    for seed in range(5):
        engine, router = with_events(sizes)
        drive(engine, Traffic(seed))
        tree = engine.manager.cache.tree
        held: dict[int, int] = {}
        for each in engine.manager.layout.ranges:
            books = tree.component(each.component).device
            held |= dict.fromkeys(each.groups, books.capacity - books.free)
        counted = Counter(group for group, _ in router.blocks)
        assert counted == held
        assert min(held.values()) > 0
        assert router.reasons
        assert router.reasons <= {"deleted", "leaf", "cascade"}


def hashes_of_a_request(engine: Engine) -> list[Any]:
    """The hashes that vLLM's engine makes for a request of two blocks."""
    core: Any = EngineCore.__new__(EngineCore)
    core.scheduler, core.mm_receiver_cache = engine.scheduler, None
    core.structured_output_manager = engine.scheduler.structured_output_manager
    core.request_block_hasher = get_request_block_hasher(FULL.block_size, sha)
    params = SamplingParams(max_tokens=2)
    params.update_from_generation_config({}, eos_token_id=-1)
    given = dict.fromkeys(EngineCoreRequest.__struct_fields__) | {
        "request_id": "hashed",
        "prompt_token_ids": [*range(2 * FULL.block_size)],
        "sampling_params": params,
        "arrival_time": 0.0,
        "client_index": 0,
        "current_wave": 0,
        "priority": 0,
        "resumable": False,
        "abort_immediately": False,
    }
    request, _ = core.preprocess_add_request(EngineCoreRequest(**given))
    return list(request.block_hashes)


def test_blocks_are_hashed_for_kv_events_and_for_vllms_manager_alone(put: Put) -> None:
    own = Engine(FULL)
    put(SETTINGS)
    assert len(hashes_of_a_request(own)) == 2
    assert len(hashes_of_a_request(with_events(FULL)[0])) == 2
    assert hashes_of_a_request(Engine(FULL)) == []


# -- metrics


def test_kvgrafts_metrics_are_served_and_a_port_in_use_is_refused(put: Put) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    put(SETTINGS.model_copy(update={"metrics_port": port}))
    engine = Engine(FULL)
    for name in "ab":
        engine.add(name, range(30), max_tokens=2)
        serve(engine)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        found = page.read().decode()
    assert 'kvgraft_tokens_total{tier="device"} 28.0' in found
    with pytest.raises(ConfigError, match=f'"metrics_port" {port}: Address already in use'):
        Engine(FULL)


# -- vLLM's interface


@pytest.mark.parametrize("name", MANAGER_INTERFACE.signatures)
def test_the_signature_is_the_one_relied_on(name: str) -> None:
    found = MANAGER_INTERFACE.differences(vars(kv_cache_manager) | {"EngineCore": EngineCore})
    assert [line for line in found if line.startswith((f"{name}(", f"{name} "))] == []


LEFT_TO_VLLM = {
    "create_kv_cache_blocks",
    "get_block_ids",
    "get_num_common_prefix_blocks",
    "make_prefix_cache_stats",
    "prefix_cache_lookup_enabled",
    "record_prefix_cache_stats",
    # of connectors, which are refused
    "get_block_ids_for_computed_tokens",
    "get_computed_blocks_for_connector",
    "record_blocks_for_zeroing",
    "truncate_computed_blocks",
    "take_events",
    # always empty: of connectors, too
    "finalize_partial_tail_offloads",
    "take_boundary_state_offloads",
}
"""Methods that are right as they are over kvgraft's blocks, or never called."""


def test_each_method_of_vllms_manager_is_replaced_or_known_to_do() -> None:
    theirs = {name for name in vars(KVCacheManager) if not name.startswith("_")}
    assert theirs - {*vars(KvgraftCacheManager)} == LEFT_TO_VLLM
