"""vLLM's own classes read the messages; needs vLLM's Python files only."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM's files are not at hand: make test-engine-files")

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.v1.kv_cache_interface import KVCacheSpecKind

from kvgraft import Cache
from kvgraft_observe.events import Residency
from kvgraft_observe.kv_events import KvEventPublisher, Names

from .listening import Listener, has, serve

SIZES: dict[str, Any] = {"page_size": 8, "device_tokens": 256, "host_tokens": 512}


@pytest.fixture(name="place")
def made_place() -> Iterator[str]:
    """A place for sockets; their paths must be short."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        yield f"ipc://{directory}"


def test_vllms_classes_read_every_event_and_write_the_same(place: str) -> None:
    components = {"full": {}, "swa": {"window": 20}, "mamba": {}}
    residency = Residency()
    with (
        Cache.open(components, write_policy="write-through", **SIZES) as cache,
        KvEventPublisher(
            cache,
            bind=f"{place}/live",
            replay=f"{place}/replay",
            names=lambda namespace: Names("adapter", str(namespace)),
        ) as publisher,
        closing(Listener(publisher.endpoint, f"{place}/replay")) as listener,
    ):
        cache.observe(residency.apply)
        for first in (0, 100, 0, 200):
            serve(cache, first, 100, namespace="tenant")
        assert cache.evict("full", 4) > 0
        cache.poll()
        listener.until(has("BlockRemoved"))
        *messages, end = listener.frames(0, b"")
    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    blocks: dict[tuple[int | None, str | None], set[object]] = {}
    kinds, reasons = set(), set()
    for _, _, _, payload in messages:
        batch = decoder.decode(payload)
        written = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
        sent = msgspec.msgpack.decode(payload)
        reasons |= {each.pop("reason") for each in sent[1] if each["type"] == "BlockRemoved"}
        assert written == sent
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                blocks.clear()
                continue
            there = blocks.setdefault((event.group_idx, event.medium), set())
            if isinstance(event, BlockRemoved):
                there.difference_update(event.block_hashes)
                continue
            assert isinstance(event, BlockStored)
            there.update(event.block_hashes)
            kinds.add(KVCacheSpecKind(event.kv_cache_spec_kind))
            assert event.lora_name == "adapter"
            keys = event.extra_keys
            assert keys is not None
            salt = ("tenant",) if event.parent_block_hash is None else ()
            assert keys[0] == ("adapter", *salt)
    assert reasons == {"demoted", "leaf"}
    assert end[-2] == ZmqEventPublisher.END_SEQ
    assert kinds == {
        KVCacheSpecKind.FULL_ATTENTION,
        KVCacheSpecKind.SLIDING_WINDOW,
        KVCacheSpecKind.MAMBA,
    }
    media = {"device": "GPU", "host": "CPU"}
    numbers = {component.name: component.index for component in cache.tree.components}
    assert {pool: found for pool, found in blocks.items() if found} == {
        (numbers[name], media[tier.value]): {int.from_bytes(each[-8:], "big") for each in pages}
        for (name, tier), pages in residency.pages.items()
    }


def test_a_replay_has_the_frames_of_vllms_own_publisher(place: str) -> None:
    theirs = ZmqEventPublisher(
        0, endpoint=f"{place}/their-live", replay_endpoint=f"{place}/their-replay", topic="kv"
    )
    theirs.publish(KVEventBatch(ts=1.0, events=[AllBlocksCleared()]))
    with closing(Listener(f"{place}/their-live", f"{place}/their-replay")) as listener:
        listener.until(has("AllBlocksCleared"))
        expected = listener.frames(0, b"")
    theirs.shutdown()
    with (
        Cache.open(["full"], page_size=8, device_tokens=256) as cache,
        KvEventPublisher(
            cache, bind=f"{place}/live", replay=f"{place}/replay", topic="kv"
        ) as publisher,
        closing(Listener(publisher.endpoint, f"{place}/replay")) as listener,
    ):
        cache.poll()
        listener.until(has("AllBlocksCleared"))
        found = listener.frames(0, b"")
    (batch, end), (theirs_batch, theirs_end) = found, expected
    assert batch[:-1] == theirs_batch[:-1]
    assert end == theirs_end
    read = [msgspec.msgpack.decode(payload) for payload in (batch[-1], theirs_batch[-1])]
    assert read[0][1:] == read[1][1:]
