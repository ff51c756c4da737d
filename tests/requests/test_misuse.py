"""Calls that cannot be meant are refused in one line, and change nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvgraft import Cache, ConfigError, LeaseError, PluginError, Tier, TokenKey
from kvgraft.config import CacheConfig, parse_config
from kvgraft.refusals import ELSEWHERE, VALUES
from kvgraft_storage.settings import StorageSettings

from ..gpu import why_not

Call = Callable[[Cache, Any], object]

NAMES = ", ".join(CacheConfig.model_fields)
STORAGE_NAMES = ", ".join(StorageSettings.model_fields)


@pytest.fixture
def cache() -> Cache:
    return Cache.open(["full"], page_size=4, device_tokens=64)


def test_a_closed_cache_begins_no_request(cache: Cache) -> None:
    cache.close()
    with pytest.raises(LeaseError, match="the cache is closed; open another"):
        cache.begin(TokenKey([1, 2]))


CHANGING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("admit", "load_back", "restart", "checkpoint", "fork"), ()),
    **dict.fromkeys(("allocate", "computed"), (1,)),
}


@pytest.mark.parametrize("call", CHANGING)
def test_a_closed_cache_changes_nothing_for_a_request(cache: Cache, call: str) -> None:
    request = cache.begin(TokenKey(range(8)))
    if call != "admit":
        assert cache.admit(request).admitted
        assert cache.allocate(request, 8)
        cache.computed(request, 7)
    cache.close()
    before = cache.stats()
    with pytest.raises(LeaseError, match=r"^the cache is closed; open another$"):
        getattr(cache, call)(request, *CHANGING[call])
    assert cache.stats() == before
    cache.abort(request)
    assert not cache.requests


@pytest.mark.parametrize("write_policy", ["write-back", "write-through"])
def test_requests_end_in_a_closed_cache(write_policy: str) -> None:
    cache = Cache.open(
        ["full"], page_size=4, device_tokens=64, host_tokens=64, write_policy=write_policy
    )
    request = cache.begin(TokenKey(range(8)))
    assert cache.admit(request).admitted
    assert cache.allocate(request, 8)
    cache.computed(request, 8)
    cache.close()
    assert cache.finish(request) == 8
    with pytest.raises(LeaseError, match="closed"):
        cache.evict("full", 1)
    with pytest.raises(LeaseError, match="closed"):
        cache.move_memory("full", "full")


@pytest.mark.parametrize("call", ["table", "host_table"])
def test_a_state_has_no_table_and_a_page_no_state(call: str) -> None:
    with Cache.open({"full": {}, "mamba": {"states": 4}}, device_tokens=1024) as cache:
        request = cache.begin(TokenKey(range(8)))
        assert cache.admit(request).admitted
        with pytest.raises(ConfigError, match=r"'mamba' keeps states and.*; use state_slot"):
            getattr(cache, call)(request, "mamba")
        with pytest.raises(ConfigError, match="'full' has no states; use table"):
            cache.state_slot(request, "full")
        with pytest.raises(LeaseError, match="'mamba': no state yet; allocate first"):
            cache.state_slot(request, "mamba")


def test_a_request_says_whether_its_states_are_new() -> None:
    with Cache.open({"full": {}, "mamba": {"states": 8}}, page_size=4, device_tokens=256) as cache:
        request = cache.begin(TokenKey(range(9)))
        said = [request.fresh]
        assert cache.admit(request).admitted
        n_tokens = cache.next_chunk(request)
        assert cache.allocate(request, n_tokens)
        said.append(request.fresh)
        cache.computed(request, n_tokens)
        said.append(request.fresh)
        cache.finish(request)
        again = cache.begin(TokenKey(range(9)))
        assert again.anchor_tokens
        assert [*said, again.fresh] == [True, True, False, False]


@pytest.mark.parametrize("call", ["table", "host_table", "private_slots", "state_slot"])
def test_a_component_that_is_not_there_is_named_beside_those_that_are(
    cache: Cache, call: str
) -> None:
    request = cache.begin(TokenKey([1, 2]))
    assert cache.admit(request).admitted
    with pytest.raises(ConfigError, match="component 'wide' is not in this cache; it has: full"):
        getattr(cache, call)(request, "wide")
    with pytest.raises(ConfigError, match="'wide'"):
        cache.evict("wide", 1)
    cache.abort(request)


@pytest.mark.parametrize("guard", ["off", "on"])
@pytest.mark.parametrize(
    "call", [lambda c, r: c.begin([1, 2]), lambda c, r: c.begin("text"), lambda c, r: c.begin(r)]
)
def test_a_request_is_begun_with_a_key(call: Call, guard: str) -> None:
    cache = Cache.open(["full"], page_size=4, device_tokens=64, guard=guard)
    request = cache.begin(TokenKey([1, 2]))
    with pytest.raises(ConfigError, match=r"a \w+ is no TokenKey; give TokenKey\("):
        call(cache, request)
    cache.check_integrity()


@pytest.mark.parametrize("n_tokens", [-3, 0.5, None, "4"])
@pytest.mark.parametrize("call", ["allocate", "computed"])
def test_a_number_of_tokens_is_whole_and_not_negative(
    cache: Cache, call: str, n_tokens: object
) -> None:
    request = cache.begin(TokenKey(range(8)))
    assert cache.admit(request).admitted
    assert cache.allocate(request, 8)
    with pytest.raises(LeaseError, match=f"{call}: {n_tokens!r} is no number of tokens"):
        getattr(cache, call)(request, n_tokens)
    assert (request.computed, request.allocated) == (0, 2)
    cache.computed(request, 8)
    assert cache.finish(request) == 8


def test_numpys_numbers_of_tokens_are_numbers(cache: Cache) -> None:
    request = cache.begin(TokenKey(range(8)))
    assert cache.admit(request).admitted
    assert cache.allocate(request, np.int64(8))
    cache.computed(request, np.int32(8))
    assert type(request.computed) is int
    assert type(request.allocated) is int


@pytest.mark.parametrize("ending", ["finish", "abort", "retract"])
@pytest.mark.parametrize("table", ["table", "host_table"])
def test_a_request_that_ended_has_no_table(cache: Cache, ending: str, table: str) -> None:
    request = cache.begin(TokenKey(range(8)))
    assert cache.admit(request).admitted
    getattr(cache, ending)(request)
    with pytest.raises(LeaseError, match="request is closed and has no slots"):
        getattr(cache, table)(request, "full")


def test_sizes_of_the_storage_tier_may_be_written_as_people_write_them() -> None:
    storage = {"model": "m", "weights": "1", "store_nbytes": "2MiB", "prefetch_nbytes": 3 << 20}
    config = parse_config({"components": ["full"], "device_tokens": 64, "storage": storage})
    assert config.storage is not None
    assert (config.storage.store_nbytes, config.storage.prefetch_nbytes) == (2 << 20, 3 << 20)


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        (
            *("store_nbytes", "much"),
            "setting storage.store_nbytes='much' is no size; write for example 256MiB",
        ),
        ("store_nbytes", 0, "setting storage.store_nbytes=0: give 1 or more"),
        ("model", "", "setting storage.model='': give text of 1 or more characters"),
        (
            *("stor", 1),
            f"no setting 'storage.stor'; did you mean 'store'? settings: {STORAGE_NAMES}",
        ),
    ],
)
def test_a_setting_of_the_storage_tier_that_is_wrong_is_named(
    setting: str, value: object, said: str
) -> None:
    storage = {"model": "m", "weights": "1", setting: value}
    with pytest.raises(ConfigError) as refused:
        parse_config({"components": ["full"], "device_tokens": 64, "storage": storage})
    assert str(refused.value) == said


def test_a_size_that_is_none_is_not_given() -> None:
    sizes = {"device_tokens": None, "host_tokens": None, "device_memory": "1MB"}
    config = parse_config({"components": ["full"], **sizes})
    assert (config.device_memory, config.device_bytes, config.host_tokens) == (10**6, 10**6, 0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "setting device_tokens is missing; give for example '4M'"),
        ({"device_tokens": -1}, "setting device_tokens=-1: give more than 0"),
        ({"device_tokens": 1.5}, "setting device_tokens=1.5: give a whole number, such as '4M'"),
        ({"device_tokens": None}, "setting device_tokens is missing; give for example '4M'"),
        (
            {"device_tokens": "lots"},
            "setting device_tokens='lots' is no size; give tokens, such as 4M, or bytes of all "
            "pools, such as 40GB",
        ),
        (
            {"device_tokens": 64, "device_bytes": "4GB"},
            "settings device_tokens=64 and device_bytes='4GB': give one of the two",
        ),
        ({"page_size": 0}, "setting page_size=0: give more than 0"),
        ({"device": 3}, "setting device=3: give text, such as 'cpu'"),
        ({"payload": "perhaps"}, "setting payload='perhaps': give true or false"),
        ({"guard": "maybe"}, "setting guard='maybe': give 'off', 'sampled' or 'on'"),
        ({"guard_sample": 2}, "setting guard_sample=2: give 1 or less"),
        ({"guard_sample": "x"}, "setting guard_sample='x': give a number, such as 0.01"),
        ({"load": {"latency_s": -1}}, "setting load.latency_s=-1: give 0 or more"),
        (
            {"load": 3},
            "setting load=3: give options by name, such as {'prefill_tokens_s': 20000}",
        ),
        (
            {"storage": "file:here"},
            "setting storage='file:here': give options by name, such as "
            "{'url': 'file:/var/cache/kvgraft', 'model': 'my-model', 'weights': 'rev-1'}",
        ),
        (
            {"device_tokens": 64, "storage": {}},
            "setting storage.model is missing; give for example 'my-model'",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_the_values_it_takes(
    settings: dict[str, Any], said: str
) -> None:
    wanted = {} if "device_tokens" in said else {"device_tokens": 64}
    with pytest.raises(ConfigError) as refused:
        Cache.open(["full"], **{**wanted, **settings})
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"device_token": 64},  # which leaves device_tokens missing
            f"no setting 'device_token'; did you mean 'device_tokens'? settings: {NAMES}",
        ),
        ({"device_tokens": 64, "zebra": 1}, f"no setting 'zebra'; settings: {NAMES}"),
        (
            {"device_tokens": 64, "load": {"latency": 1}},
            "no setting 'load.latency'; did you mean 'latency_s'? settings: "
            "bandwidth_bytes_s, latency_s, prefill_tokens_s, pass_s, pass_tokens",
        ),
    ],
)
def test_a_setting_that_does_not_exist_is_told_from_those_that_do_the_nearest_first(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Cache.open(["full"], **settings)
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("components", "said"),
    [
        ({"swa": {"window": 0}}, "component 'swa': option window=0: give more than 0"),
        (
            {"full": {"n_layers": 0.5}},
            "component 'full': option n_layers=0.5: give a whole number, such as 2",
        ),
        (
            {"full": {"kind": "mla"}},
            "component 'full': option latent_dim=None: kind 'mla' needs it; take it from the "
            "model's configuration",
        ),
        (
            {"full": {"layers": 3}},
            "component 'full': option layers=3: give the layers' numbers, such as [0, 2]; n_layers "
            "is their count",
        ),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_the_values_it_takes(
    components: dict[str, Any], said: str
) -> None:
    with pytest.raises(PluginError) as refused:
        Cache.open(components, device_tokens=64)
    assert str(refused.value) == said


def test_an_option_that_does_not_exist_is_told_from_those_that_do() -> None:
    with pytest.raises(PluginError) as misspelt:
        Cache.open({"swa": {"windw": 4}}, device_tokens=64)
    assert str(misspelt.value).startswith(
        "component 'swa': no option 'windw'; did you mean 'window'? options: device_tokens, "
    )
    with pytest.raises(PluginError, match="component 'full': no option 'window'; options: device"):
        Cache.open({"full": {"window": 4}}, device_tokens=64)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("block_size", "'page_size'?"),
        ("num_gpu_blocks", "'device_tokens' (= number of blocks * block_size)?"),
        ("gpu_memory_utilization", "'device_memory' (= bytes, such as 40GB)?"),
        ("num_speculative_tokens", "'max_drafts'?"),
        ("hicache_ratio", "'host_tokens' (= ratio * device_tokens)?"),
        ("hicache_write_policy", "'write_policy'?"),
        ("max_num_seqs", "'max_requests'?"),
    ],
)
def test_a_setting_of_another_engine_is_answered_with_ours(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({"components": ["full"], "device_tokens": 64, name: 1})
    assert str(refused.value).startswith(f"no setting {name!r}; did you mean {meant} settings: ")


@pytest.mark.parametrize(
    ("component", "name", "meant"),
    [
        ("swa", "sliding_window", "window"),
        ("mamba", "max_mamba_cache_size", "states"),
        ("mamba", "mamba_ssm_dtype", "state_dtype"),
        ("full", "num_hidden_layers", "n_layers"),
        ("full", "kv_cache_dtype", "dtype"),
    ],
)
def test_a_component_s_option_of_another_engine_is_answered_with_ours(
    component: str, name: str, meant: str
) -> None:
    with pytest.raises(PluginError) as refused:
        Cache.open({component: {name: 8}}, device_tokens=64)
    said = f"component {component!r}: no option {name!r}; did you mean {meant!r}? options: "
    assert str(refused.value).startswith(said)


def test_every_name_that_is_meant_is_one_of_ours() -> None:
    """Settings, options of components, or options of commands."""
    ours = {*CacheConfig.model_fields, "window", "dtype", "n_layers"}
    ours |= {"block_tokens", "chunk_tokens", "max_running", "step_tokens"}
    assert {each for names in ELSEWHERE.values() for each in names} <= ours
    assert not ELSEWHERE.keys() & ours
    assert VALUES.keys() <= ELSEWHERE.keys()


def test_a_value_that_is_long_is_cut() -> None:
    with pytest.raises(ConfigError) as refused:
        Cache.open(["full"], device_tokens="4" + "M" * 10_000)
    assert len(str(refused.value)) < 160


@pytest.mark.parametrize("components", ["full", ["full", 3], [["full"]], [], {}, {3: {}}, 3, None])
def test_components_are_names_or_options_by_name(components: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        Cache.open(components, device_tokens=64)
    assert str(refused.value) == (
        f"setting components={components!r}: give names such as ['full'], or options by name "
        "such as {'full': {'n_layers': 32}}"
    )


@pytest.mark.parametrize(
    ("components", "said"),
    [
        (["full", "full"], "'full' is there twice; name two instances 'full@a' and 'full@b'"),
        (["swa@x", "full", "swa@x"], "'swa@x' is there twice; name two instances 'swa@a' and "),
    ],
)
def test_a_component_that_is_named_twice_is_refused(components: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Cache.open(components, device_tokens=64)
    assert str(refused.value).startswith(f"setting components={components!r}: {said}")


def test_names_may_come_from_anything_that_can_be_iterated() -> None:
    for names in ({"full": 1}.keys(), (name for name in ["full"]), {"full"}):
        cache = Cache.open(names, page_size=4, device_tokens=64)  # type: ignore[arg-type]
        assert list(cache.config.components) == ["full"]


def test_a_copied_key_grows_on_its_own() -> None:
    key = TokenKey([1, 2, 3], namespace="tenant")
    fork = copy.copy(key)
    fork.extend([4])
    key.extend([5, 6])
    assert (key.tokens().tolist(), fork.tokens().tolist()) == ([1, 2, 3, 5, 6], [1, 2, 3, 4])
    assert fork.namespace == "tenant"


def test_a_copied_key_is_found_where_the_first_was(cache: Cache) -> None:
    key = TokenKey(range(12))
    request = cache.begin(key)
    assert cache.admit(request).admitted
    cache.load_back(request)
    assert cache.allocate(request, 12)
    cache.computed(request, 12)
    cache.finish(request)
    fork = copy.copy(key)
    fork.truncate(8)
    fork.extend([99, 98, 97, 96, 95])
    assert cache.begin(fork).anchor_tokens == 8
    assert cache.begin(copy.copy(key)).anchor_tokens == 8


@pytest.mark.parametrize("value", ["5", 2.5, [3], -1, True])
@pytest.mark.parametrize(
    ("subject", "call"),
    [
        ("begin: reserve", lambda cache, value: cache.begin(TokenKey([1, 2]), reserve=value)),
        ("begin: chunk", lambda cache, value: cache.begin(TokenKey([1, 2]), chunk=value)),
        ("evict: slots", lambda cache, value: cache.evict("full", value)),
        ("truncate: n_tokens", lambda cache, value: TokenKey([1, 2]).truncate(value)),
    ],
)
def test_a_count_of_another_type_is_named_with_its_argument(
    cache: Cache, subject: str, call: Call, value: object
) -> None:
    with pytest.raises(ConfigError, match=rf"^{subject} .*; give a whole number, [01] or more$"):
        call(cache, value)
    assert not cache.requests
    cache.check_integrity()


@pytest.mark.parametrize("limit", ["5", 2.5, -1])
def test_a_limit_of_another_type_leaves_the_request_as_it_was(cache: Cache, limit: object) -> None:
    request = cache.begin(TokenKey([1, 2]))
    assert cache.admit(request).admitted
    with pytest.raises(ConfigError, match=r"^next_chunk: limit .*; give a whole number, 0 "):
        cache.next_chunk(request, limit)
    assert cache.next_chunk(request, np.int64(2)) == 2
    cache.abort(request)


@pytest.mark.parametrize("guard", ["off", "on"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("prefetch", lambda storage: storage.prefetch(TokenKey([1, 2]))),
        ("attach", lambda storage: storage.attach("file:/tmp/store")),
        ("save", lambda storage: storage.save("snapshot")),
        ("n_in_flight", lambda storage: storage.n_in_flight),
    ],
)
def test_without_storage_its_use_says_how_to_have_it(
    name: str, call: Callable[[Any], object], guard: str
) -> None:
    with Cache.open(["full"], page_size=4, device_tokens=64, guard=guard) as cache:
        with pytest.raises(ConfigError) as refused:
            call(cache.storage)
        assert str(refused.value) == (
            f"storage.{name}: this cache has no storage tier; open it with storage={{'model': "
            "'my-model', 'weights': 'rev-1', 'url': 'file:/var/cache/kvgraft'}, or ask "
            "`if cache.storage:` first"
        )
        assert not cache.storage
        assert not hasattr(cache.storage, name)
        assert getattr(cache.storage, name, None) is None
        assert repr(copy.copy(cache.storage)) == "<no storage tier>"
        request = cache.begin(TokenKey([1, 2]))
        assert cache.admit(request).admitted
        cache.poll()
        assert cache.drain()
        cache.abort(request)


def test_without_storage_a_prefetch_is_refused_as_it_was_given(cache: Cache) -> None:
    with pytest.raises(LeaseError) as refused:
        cache.begin(TokenKey([1, 2]), prefetch=3)  # type: ignore[arg-type]
    assert str(refused.value) == (
        "begin: 3 is no prefetch of this cache, which has no storage tier; begin without one"
    )
    assert not cache.requests


@pytest.mark.parametrize("end", ["checkpoint", "finish", "retract"])
def test_nothing_is_shared_under_a_key_that_was_cut_and_grew_again_to_its_length(end: str) -> None:
    with Cache.open(["full"], page_size=4, device_tokens=64) as cache:
        request = cache.begin(TokenKey(range(20)), reserve=4)
        assert cache.admit(request).admitted
        assert cache.allocate(request, 20)
        cache.computed(request, 20)
        request.key.truncate(18)
        request.key.extend([98, 99])
        assert cache.step([request], [5]).requests == [request]
        with pytest.raises(LeaseError, match="its key was cut before that, and holds 21 now"):
            getattr(cache, end)(request)
        cache.abort(request)
        assert cache.begin(TokenKey([*range(18), 98, 99, 5])).anchor_tokens == 0


@pytest.mark.parametrize("end", ["checkpoint", "finish", "retract"])
def test_after_a_cut_of_its_key_a_request_may_end_that_shared_all_it_computed(end: str) -> None:
    with Cache.open(["full"], page_size=4, device_tokens=64) as cache:
        key = TokenKey(range(20))
        request = cache.begin(key)
        assert cache.admit(request).admitted
        assert cache.allocate(request, 20)
        cache.computed(request, 20)
        assert cache.checkpoint(request)
        key.truncate(18)
        getattr(cache, end)(request)
        other = cache.begin(TokenKey(range(50, 70)))
        assert cache.admit(other).admitted
        assert cache.allocate(other, 20)
        cache.computed(other, 20)
        other.key.truncate(18)
        with pytest.raises(LeaseError, match="its key was cut before that, and holds 18 now"):
            getattr(cache, end)(other)
        cache.abort(other)
        cache.check_integrity()


@pytest.mark.parametrize("end", ["checkpoint", "finish", "retract"])
def test_a_request_may_compute_tokens_before_its_key_has_them_and_not_share_them(end: str) -> None:
    with Cache.open(["full"], page_size=4, device_tokens=64) as cache:
        request = cache.begin(TokenKey(range(20)), reserve=12)
        assert cache.admit(request).admitted
        assert cache.allocate(request, 30)
        cache.computed(request, 30)
        with pytest.raises(LeaseError) as refused:
            getattr(cache, end)(request)
        assert str(refused.value) == (
            "request computed 30 tokens and its key holds 20; extend the key with the tokens that "
            "were decoded, then call this again"
        )
        request.key.extend(range(100, 110))
        getattr(cache, end)(request)
        assert cache.explain(request.key).known == 28


@pytest.mark.parametrize("guard", ["off", "on"])
@pytest.mark.parametrize("end", ["checkpoint", "finish", "retract", "restart"])
def test_data_does_not_follow_a_key_into_another_namespace(end: str, guard: str) -> None:
    swa = {"window": 8, "n_layers": 1, "n_kv_heads": 1, "head_dim": 2}
    with Cache.open({"full": {}, "swa": swa}, page_size=4, device_tokens=96, guard=guard) as cache:
        other = cache.begin(TokenKey([1], namespace="other"))
        key = TokenKey(range(40), namespace="one")
        request = cache.begin(key)
        assert cache.admit(request).admitted
        assert cache.allocate(request, 40)
        cache.computed(request, 20)
        key.namespace = "other"
        cache.computed(request, 20)
        with pytest.raises(LeaseError, match="began in namespace 'one' and its key is in 'other'"):
            getattr(cache, end)(request)
        cache.abort(request)
        cache.abort(other)
        again = cache.begin(key)
        assert again.anchor_tokens == 0
        cache.abort(again)
        cache.check_integrity()
        assert not [name for name, root in cache.tree.roots.items() if not root.children]


def test_with_storage_it_is_true() -> None:
    storage = {"model": "m", "weights": "1"}
    with Cache.open(["full"], device_tokens=64, host_tokens=64, storage=storage) as cache:
        assert cache.storage


@pytest.mark.one_in(7)
@pytest.mark.parametrize("guard", ["off", "on"])
@pytest.mark.parametrize("given", [None, 5, "request", TokenKey([1])], ids=repr)
@pytest.mark.parametrize(
    "call",
    [
        lambda cache, given: cache.admit(given),
        lambda cache, given: cache.load_back(given),
        lambda cache, given: cache.restart(given),
        lambda cache, given: cache.next_chunk(given),
        lambda cache, given: cache.checkpoint(given),
        lambda cache, given: cache.finish(given),
        lambda cache, given: cache.retract(given),
        lambda cache, given: cache.abort(given),
        lambda cache, given: cache.allocate(given, 1),
        lambda cache, given: cache.computed(given, 1),
        lambda cache, given: cache.table(given, "full"),
        lambda cache, given: cache.host_table(given, "full"),
        lambda cache, given: cache.private_slots(given, "full"),
        lambda cache, given: cache.state_slot(given, "full"),
    ],
)
def test_an_object_that_is_no_request_is_named(call: Call, given: object, guard: str) -> None:
    with Cache.open(["full"], page_size=4, device_tokens=64, guard=guard) as cache:
        running = cache.begin(TokenKey(range(8)))
        with pytest.raises(LeaseError) as refused:
            call(cache, given)
        article = "an" if given == 5 else "a"
        kind = "None" if given is None else f"{article} {type(given).__name__}"
        assert str(refused.value) == (
            f"{kind} is no request; give the request that Cache.begin returned"
        )
        assert cache.admit(running).admitted
        cache.abort(running)
        cache.check_integrity()


@pytest.mark.parametrize("guard", ["off", "on"])
@pytest.mark.parametrize("call", ["abort", "restart", "finish", "admit"])
def test_a_request_of_another_cache_is_refused_and_stays_whole(call: str, guard: str) -> None:
    with (
        Cache.open(["full"], page_size=4, device_tokens=64) as cache,
        Cache.open(["full"], page_size=4, device_tokens=64, guard=guard) as other,
    ):
        request = cache.begin(TokenKey(range(8)))
        assert cache.admit(request).admitted
        assert cache.allocate(request, 8)
        with pytest.raises(LeaseError, match="request belongs to another cache; use the one that"):
            getattr(other, call)(request)
        other.check_integrity()
        cache.computed(request, 8)
        assert cache.finish(request) == 8
        cache.check_integrity()


@pytest.mark.parametrize("guard", ["off", "on"])
@pytest.mark.parametrize("n_tokens", [-3, 0.5, None, "4"])
@pytest.mark.parametrize("call", ["allocate", "computed", "next_chunk"])
def test_a_guard_leaves_refusals_to_the_cache(call: str, n_tokens: object, guard: str) -> None:
    with Cache.open(["full"], page_size=4, device_tokens=64, guard=guard) as cache:
        request = cache.begin(TokenKey(range(8)))
        assert cache.admit(request).admitted
        assert cache.allocate(request, 8)
        if n_tokens is not None or call != "next_chunk":
            with pytest.raises((LeaseError, ConfigError), match=r"; give a whole (one|number), 0"):
                getattr(cache, call)(request, n_tokens)
        cache.computed(request, 8)
        assert cache.finish(request) == 8


@pytest.mark.parametrize("guard", ["off", "on"])
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: c.evict("full", 1, "device"), "evict: tier 'device'; give Tier.DEVICE or"),
        (lambda c: c.evict("full", 1, Tier.STORAGE), "evict: tier <Tier.STORAGE: 'storage'>; give"),
        (lambda c: c.evict(5, 1), "component 5 is not in this cache; it has: full"),
        (lambda c: c.evict(["full"], 1), "component ['full'] is not in this cache; it has: full"),
        (lambda c: c.unpin(None), "unpin: None is no pin of this cache, or was unpinned before"),
        (
            lambda c: c.move_memory("full", "full", "device"),
            "move_memory: tier 'device'; give Tier",
        ),
        (
            lambda c: Cache.open(["full"], device_tokens=64, clock=3),  # type: ignore[arg-type]
            "clock 3; give a function of",
        ),
        (
            lambda c: c.begin(TokenKey([1, 2]), prefetch=5),
            "an int is no prefetch; give the one that",
        ),
        (lambda c: c.storage.cancel(None), "None is no prefetch; give the one that"),
        (lambda c: c.storage.prefetch([1, 2]), "a list is no TokenKey; give TokenKey("),
        (lambda c: c.explain(None), "None is no TokenKey; give TokenKey("),
    ],
)
def test_arguments_of_other_types_are_named(
    call: Callable[[Any], object], said: str, guard: str
) -> None:
    storage = {"model": "m", "weights": "1"}
    with Cache.open(
        ["full"], page_size=4, device_tokens=64, host_tokens=64, storage=storage, guard=guard
    ) as cache:
        with pytest.raises((ConfigError, LeaseError)) as refused:
            call(cache)
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)
        assert not cache.requests
        cache.check_integrity()


@pytest.mark.parametrize("guard", ["off", "on"])
def test_a_refused_finish_keeps_the_live_state(guard: str) -> None:
    components = {"full": {}, "mamba": {"states": 8}}
    cache = Cache.open(components, device_tokens=64, page_size=2, guard=guard)
    key = TokenKey(range(8))
    request = cache.begin(key, reserve=6, resume_at=None)
    assert cache.admit(request).admitted
    while request.computed < 8:
        n_tokens = cache.next_chunk(request)
        assert cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
    assert cache.allocate(request, 2)
    cache.computed(request, 2)
    slot = cache.state_slot(request, "mamba")
    with pytest.raises(LeaseError, match="extend the key with the tokens that were decoded"):
        cache.finish(request)
    key.extend([1, 2])
    assert cache.allocate(request, 2)
    assert cache.state_slot(request, "mamba") == slot
    cache.abort(request)
    cache.close()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"page_size": True}, "setting page_size=True: give a whole number, such as 64"),
        ({"cut_tokens": True}, "setting cut_tokens=True: give a whole number"),
        ({"device_tokens": True}, "setting device_tokens=True: give a whole number"),
        ({"guard_sample": True}, "setting guard_sample=True: give a number"),
        ({"payload": "no"}, "setting payload='no': give true or false"),
        ({"components": {"full": {"n_layers": True}}}, "option n_layers=True: give a whole number"),
        ({"components": {"swa": {"window": True}}}, "option window=True: give a whole number"),
    ],
)
def test_true_is_no_number_and_text_is_no_switch(settings: dict[str, Any], line: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=line):
        Cache.open(**{"components": ["full"], "device_tokens": 64, **settings})


def test_calls_take_no_bool_for_a_number(cache: Cache) -> None:
    with pytest.raises(ConfigError, match="begin: reserve True; give a whole number"):
        cache.begin(TokenKey([1, 2]), reserve=True)
    request = cache.begin(TokenKey([1, 2]))
    assert cache.admit(request).admitted
    with pytest.raises(LeaseError, match="allocate: True is no number of tokens"):
        cache.allocate(request, True)
    cache.abort(request)


def test_a_call_out_of_order_names_the_call_to_make(cache: Cache) -> None:
    request = cache.begin(TokenKey([1, 2]))
    with pytest.raises(LeaseError, match="needs it admitted; call admit first"):
        cache.allocate(request, 1)
    assert cache.admit(request).admitted
    with pytest.raises(LeaseError, match="n_tokens=1, slots for 0 allocated; allocate first"):
        cache.computed(request, 1)
    cache.abort(request)
    with pytest.raises(LeaseError, match="begin a new one"):
        cache.allocate(request, 1)


def test_a_namespace_that_cannot_be_hashed_is_refused_at_once() -> None:
    namespaces: list[object] = [[], ("tenant", [])]
    for namespace in namespaces:
        with pytest.raises(ConfigError, match="cannot be hashed; use an int, a str, bytes or"):
            TokenKey([1, 2], namespace=namespace)


def test_a_device_that_torch_does_not_know_is_refused_in_a_short_line() -> None:
    with pytest.raises(ConfigError) as caught:
        Cache.open(["full"], device_tokens=64, device="gpu")
    said = str(caught.value)
    assert said.startswith("device 'gpu': torch knows no such device; use cpu")
    assert said.endswith(" or simulated")
    assert ("cuda" in said) == (why_not("cuda") is None)


def test_more_tokens_than_pages_have_numbers_are_refused_in_tokens() -> None:
    said = "setting device_tokens=900000000000000: give 137438953408 or less"
    with pytest.raises(ConfigError, match=said):
        Cache.open(["full"], device_tokens=900 * 10**12, payload=False)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_request_is_neither_copied_nor_pickled(
    cache: Cache, copied: Callable[[object], object]
) -> None:
    request = cache.begin(TokenKey([1, 2]))
    with pytest.raises(LeaseError, match="begin another with a copy of its key"):
        copied(request)


@pytest.mark.parametrize("call", ["checkpoint", "finish", "fork"])
def test_a_key_in_another_namespace_than_its_request_is_refused(call: str) -> None:
    """Also where all whole pages were shared before."""
    with Cache.open(["full"], page_size=4, device_tokens=64) as cache:
        key = TokenKey(range(18), namespace="a")
        request = cache.begin(key, reserve=8)
        assert cache.admit(request).admitted
        assert cache.allocate(request, 18)
        cache.computed(request, 18)
        cache.checkpoint(request)
        key.namespace = "b"
        with pytest.raises(LeaseError, match="began in namespace 'a'"):
            getattr(cache, call)(request)
        cache.check_integrity()
        cache.abort(request)


def test_a_size_of_more_bytes_than_pools_have_pages_for_is_refused() -> None:
    said = "are more than 2147483648 pages take, the most that a pool can have"
    with pytest.raises(ConfigError, match=said):
        Cache.open(["full"], device_bytes="999999999GB", payload=False)
