"""Wrong arguments are refused in one line, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvgraft import Cache, ConfigError
from kvgraft_observe.kv_events import KvEventPublisher
from kvgraft_observe.otel import CacheMetrics, RequestSpans
from kvgraft_observe.prometheus import CacheCollector

HERE = "tcp://127.0.0.1:*"

REFUSED: tuple[tuple[Callable[..., Any], dict[str, Any], str], ...] = (
    (CacheMetrics, {"cache": 3}, "CacheMetrics: cache=3; give a kvgraft.Cache"),
    (CacheMetrics, {"provider": 3}, "CacheMetrics: provider=3; give a MeterProvider of opent"),
    (CacheMetrics, {"attributes": 3}, "CacheMetrics: attributes=3; give texts and numbers by"),
    (CacheMetrics, {"attributes": {"a": []}}, "CacheMetrics: attributes={'a': []}; give texts"),
    (CacheMetrics, {"explain_every": "x"}, "CacheMetrics: explain_every='x'; give 0 for never,"),
    (RequestSpans, {"cache": 3}, "RequestSpans: cache=3; give a kvgraft.Cache"),
    (RequestSpans, {"provider": 3}, "RequestSpans: provider=3; give a TracerProvider of opent"),
    (RequestSpans, {"attributes": 3}, "RequestSpans: attributes=3; give texts and numbers by"),
    (RequestSpans, {"parent_of": 3}, "RequestSpans: parent_of=3; give a function from a Token"),
    (CacheCollector, {"caches": "full"}, "CacheCollector: cache='full'; give a kvgraft.Cache"),
    (CacheCollector, {"caches": {}}, "CacheCollector: no cache in {}; give a Cache, or caches"),
    (CacheCollector, {"caches": {3: 3}}, "CacheCollector: name=3; give texts as names of caches"),
    (CacheCollector, {"explain_every": True}, "CacheCollector: explain_every=True; give 0 for"),
    (KvEventPublisher, {"cache": 3}, "KV events: cache=3; give a kvgraft.Cache"),
    (KvEventPublisher, {"topic": 3}, "KV events: topic=3; give text, such as 'kv@POD@MODEL'"),
    (KvEventPublisher, {"names": 3}, "KV events: names=3; give a function from a namespace to"),
    (KvEventPublisher, {"data_parallel_rank": "x"}, "KV events: data_parallel_rank='x'; give a w"),
    (KvEventPublisher, {"lag_events": 0}, "KV events: lag_events=0; give a whole number, 1 to 10"),
    (KvEventPublisher, {"high_water_mark": 1 << 31}, "KV events: high_water_mark=2147483648; gi"),
    (KvEventPublisher, {"replay_nbytes": -1}, "KV events: replay_nbytes=-1; give a whole numb"),
    (KvEventPublisher, {"components": "full"}, "KV events: components='full'; give a list of n"),
    (KvEventPublisher, {"components": 3}, "KV events: components=3; give a list of names, such"),
    (
        KvEventPublisher,
        {"bind": "tcp://127.0.0.1:5557", "replay": "tcp://127.0.0.1:5557"},
        "KV events: replay='tcp://127.0.0.1:5557' is the address of the events; give another",
    ),
)


@pytest.fixture(name="cache", scope="module")
def made_cache() -> Iterator[Cache]:
    with Cache.open({"full": {}}, page_size=8, device_tokens=128) as cache:
        yield cache


@pytest.mark.parametrize(("call", "wrong", "said"), REFUSED)
def test_a_wrong_argument_is_refused_by_its_name(
    cache: Cache, call: Callable[..., Any], wrong: dict[str, Any], said: str
) -> None:
    arguments: dict[str, Any] = {"caches" if call is CacheCollector else "cache": cache}
    if call is KvEventPublisher:
        arguments["bind"] = HERE
    with pytest.raises(ConfigError) as refused:
        call(**(arguments | wrong))
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)
