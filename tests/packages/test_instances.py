"""One package, several components in one cache: `package@label`."""

from __future__ import annotations

import pytest

from kvgraft import Cache, ConfigError, PluginError, TokenKey

from ..serving import life

PAGE = 16


def serve(cache: Cache, tokens: range) -> int:
    """One request through the cache; the tokens it did not have to compute."""
    request = life.admitted(cache, tokens, chunk=64)
    life.prefill(cache, request, each=cache.checkpoint)
    cache.finish(request)
    cache.drain()
    cache.check_integrity()
    return request.anchor_tokens


def test_each_instance_has_its_own_reach_pools_and_ledger() -> None:
    cache = Cache.open(
        {
            "full": {"n_kv_heads": 2},
            "full@wide": {"n_kv_heads": 8, "device_tokens": 2048},
            "swa@near": {"window": 32},
            "swa@far": {"window": 200},
            "mamba@a": {"states": 8},
            "mamba@b": {"states": 12, "n_heads": 2},
        },
        page_size=PAGE,
        device_tokens=1024,
        host_tokens=4096,
        guard="on",
        load=None,
    )
    capacities = {component.name: component.device.capacity for component in cache.tree.components}
    assert capacities == {
        "full": 64,
        "full@wide": 128,
        "swa@near": 64,
        "swa@far": 64,
        "mamba@a": 8,
        "mamba@b": 12,
    }
    assert serve(cache, range(400)) == 0
    held = {t.name: t.device.evictable for t in cache.tree.components if not t.is_state}
    assert held["full"] == held["full@wide"] == 25
    # the far window of every chunk end is worth keeping, or left behind
    assert held["swa@near"] < held["swa@far"] <= held["full"]
    assert serve(cache, range(401)) == 400
    for each in cache.mounted:
        cache.evict(each.name, 1000)
    assert serve(cache, range(402)) == 400, "all instances come back from the host"
    cache.close()


def test_a_shortage_names_the_instance() -> None:
    cache = Cache.open({"full@a": {}, "full@b": {"device_tokens": 64}}, device_tokens=512)
    request = cache.begin(TokenKey(range(200)))
    assert "component 'full@b' device pool" in str(cache.admit(request))
    cache.abort(request)
    cache.close()


def test_an_option_that_is_refused_names_the_instance() -> None:
    with pytest.raises(PluginError, match=r"component 'swa@near': option window=0"):
        Cache.open({"swa@near": {"window": 0}}, device_tokens=512)


@pytest.mark.parametrize("name", ["swa@", "@near", "@"])
def test_half_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="write package@label, both parts named"):
        Cache.open({name: {}}, device_tokens=512)


def test_a_package_that_is_not_installed_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match="component 'nothing' is not installed"):
        Cache.open({"nothing@a": {}}, device_tokens=512)
