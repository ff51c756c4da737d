"""Subscribers that know vLLM's events and nothing of kvgraft learn where every page is."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from typing import Any

import msgspec
import pytest
import zmq

from kvgraft import Cache, ConfigError, Tier, TokenKey
from kvgraft_observe.events import Residency
from kvgraft_observe.kv_events import KvEventPublisher, Names
from tests.serving import life

from .listening import WAIT_MS, Batches, Listener, events_of, has, serve

COMPONENTS: dict[str, dict[str, Any]] = {"full": {}, "swa": {"window": 20}, "mamba": {}}


@pytest.fixture(name="place")
def made_place() -> Iterator[str]:
    """A place for sockets; their paths must be short."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        yield f"ipc://{directory}"


@pytest.fixture(name="cache")
def made_cache() -> Iterator[Cache]:
    sizes: dict[str, Any] = {"page_size": 8, "device_tokens": 256, "host_tokens": 512}
    with Cache.open(COMPONENTS, write_policy="write-through", **sizes) as cache:
        yield cache


@pytest.fixture(name="listen")
def made_listen() -> Iterator[Callable[[KvEventPublisher], Listener]]:
    made: list[Listener] = []

    def listen(publisher: KvEventPublisher) -> Listener:
        assert publisher.replay_endpoint is not None
        made.append(Listener(publisher.endpoint, publisher.replay_endpoint))
        return made[-1]

    yield listen
    for each in made:
        each.close()


@contextmanager
def followed_by(script: Path, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A script in a process of its own, which is killed in the end if it is still there."""
    pipe = subprocess.PIPE
    command = [sys.executable, str(script), *arguments]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_subscriber_in_another_process_ends_with_the_residency(
    cache: Cache, place: str, tmp_path: Path
) -> None:
    residency = Residency()
    addresses: dict[str, Any] = {"bind": f"{place}/live", "replay": f"{place}/replay"}
    topic = "kv@pod-1@model"
    with KvEventPublisher(cache, **addresses, topic=topic, data_parallel_rank=3) as publisher:
        cache.observe(residency.apply)
        serve(cache, 0, 100)
        script, ready = Path(__file__).with_name("subscriber.py"), tmp_path / "ready"
        arguments = [publisher.endpoint, str(publisher.replay_endpoint), topic, str(ready)]
        with followed_by(script, arguments) as process:
            first = 1000
            while not ready.exists() and process.poll() is None:
                serve(cache, first, 30)
                first += 30
            for number in range(12):
                serve(cache, 40 * number, 100, namespace="tenant")
            cache.evict("swa", 4)
            serve(cache, 0, 100)
            serve(cache, 0, 40, namespace="the end")
            output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    found = json.loads(output)
    assert found["live"] >= 1
    assert found["replayed"] > 1
    media = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}
    groups = {component.name: component.index for component in cache.tree.components}
    assert found["blocks"] == sorted(
        [media[tier], groups[name], sorted(int.from_bytes(page[-8:], "big") for page in pages)]
        for (name, tier), pages in residency.pages.items()
    )
    assert {(medium, group) for medium, group, _ in found["blocks"]} == {
        (medium, group) for medium in ("CPU", "GPU") for group in range(3)
    }


def test_events_are_vllms_field_by_field(
    cache: Cache, place: str, listen: Callable[[KvEventPublisher], Listener]
) -> None:
    def names(namespace: object) -> Names:
        return Names() if namespace is None else Names("adapter", f"salt of {namespace}")

    addresses: dict[str, Any] = {"bind": f"{place}/live", "replay": f"{place}/replay"}
    with KvEventPublisher(cache, **addresses, names=names) as publisher:
        listener = listen(publisher)
        serve(cache, 0, 17)
        serve(cache, 0, 33)
        serve(cache, 0, 17, namespace="tenant")
        assert cache.evict("mamba", 1) > 0
        cache.poll()
        batches = listener.until(has("BlockRemoved"))
    told = events_of(batches)
    assert [sequence for sequence, _ in batches] == list(range(len(batches)))
    assert told[0] == {"type": "AllBlocksCleared"}
    stored = [each for each in told if each["type"] == "BlockStored" and each["medium"] == "GPU"]
    full = [each for each in stored if each["group_idx"] == 0]
    first, second, other = full
    hashes = first["block_hashes"]
    assert all(0 < each < 1 << 64 for each in hashes)
    assert first == {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": list(range(16)),
        "block_size": 8,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert (second["token_ids"], second["parent_block_hash"]) == (list(range(16, 32)), hashes[-1])
    assert other["lora_name"] == "adapter"
    assert other["extra_keys"] == [["adapter", "salt of 'tenant'".replace("'", "")], ["adapter"]]
    assert other["block_hashes"] != hashes
    kinds = {each["group_idx"]: each["kv_cache_spec_kind"] for each in stored}
    assert kinds == {0: "full_attention", 1: "sliding_window", 2: "mamba"}
    window = {each.get("kv_cache_spec_sliding_window") for each in stored if each["group_idx"] == 1}
    assert window == {20}
    states = [each for each in stored if each["group_idx"] == 2]
    assert {len(each["block_hashes"]) for each in states} == {1}
    removed = next(each for each in told if each["type"] == "BlockRemoved")
    assert removed.keys() == {"type", "block_hashes", "medium", "group_idx", "reason"}
    assert (removed["medium"], removed["group_idx"], removed["reason"]) == ("GPU", 2, "demoted")
    assert removed["block_hashes"] in [each["block_hashes"] for each in states]


def test_pages_with_a_picture_have_its_identity_as_an_extra_key(
    cache: Cache, place: str, listen: Callable[[KvEventPublisher], Listener]
) -> None:
    tokens = [*range(8), *[500] * 20, *range(8)]
    pictures = [(8, 17, "sha256:1"), (17, 28, "sha256:2")]
    key = TokenKey(tokens, "tenant", identities=pictures)
    addresses: dict[str, Any] = {"bind": f"{place}/live", "replay": f"{place}/replay"}
    with KvEventPublisher(
        cache, **addresses, names=lambda _: Names(None, "salt"), components=["full"]
    ) as publisher:
        listener = listen(publisher)
        life.serve(cache, key)
        cache.poll()
        told = events_of(listener.until(has("BlockStored", 2)))
    stored = [each for each in told if each["type"] == "BlockStored" and each["medium"] == "GPU"]
    assert [token for each in stored for token in each["token_ids"]] == tokens[:32]
    keys = [key for each in stored for key in each["extra_keys"]]
    one, other = "sha256:1", "sha256:2"
    assert keys == [["salt"], [[one, 0]], [[one, -8], [other, 1]], [[other, -7]]]


def test_only_named_components_are_reported(
    cache: Cache, place: str, listen: Callable[[KvEventPublisher], Listener]
) -> None:
    addresses: dict[str, Any] = {"bind": f"{place}/live", "replay": f"{place}/replay"}
    with KvEventPublisher(cache, **addresses, components=["swa"]) as publisher:
        listener = listen(publisher)
        serve(cache, 0, 40)
        told = events_of(listener.until(has("BlockStored", 2)))
    assert {each["group_idx"] for each in told[1:]} == {1}


def test_batches_that_are_not_kept_any_more_are_reported_anew(
    cache: Cache, place: str, listen: Callable[[KvEventPublisher], Listener]
) -> None:
    addresses: dict[str, Any] = {"bind": f"{place}/live", "replay": f"{place}/replay"}
    with KvEventPublisher(cache, **addresses, replay_batches=3) as publisher:
        listener = listen(publisher)
        for number in range(4):
            serve(cache, 100 * number, 30)
        kept = listener.until(lambda found: bool(found) and found[-1][0] >= 3)
        assert len(kept) == 3
        assert "AllBlocksCleared" not in [each["type"] for each in events_of(kept)]
        cache.poll()
        again = listener.until(has("AllBlocksCleared"))
        cleared = [events[0]["type"] for _, events in again].index("AllBlocksCleared")
        told = events_of(again[cleared:])
        stored = {each for event in told[1:] for each in event["block_hashes"]}
        residency, stream = Residency(), cache.events()
        residency.apply(stream.take())
        pages = set().union(*residency.pages.values())
        assert stored == {int.from_bytes(each[-8:], "big") for each in pages}
        lost = publisher.lost
        listener.replay(0, b"")
        serve(cache, 900, 30)
        listener.until(lambda found: found[-1][0] > again[-1][0])
        assert publisher.lost == lost


def test_a_lagging_publisher_drops_events_and_begins_again(
    cache: Cache,
    place: str,
    listen: Callable[[KvEventPublisher], Listener],
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked, go_on = Flag(), Flag()

    def names(namespace: object) -> Names:
        asked.set()
        go_on.wait(20)
        return Names()

    addresses: dict[str, Any] = {"bind": f"{place}/live", "replay": f"{place}/replay"}
    with (
        caplog.at_level(logging.WARNING, "kvgraft"),
        KvEventPublisher(cache, **addresses, names=names, lag_events=8) as publisher,
    ):
        listener = listen(publisher)
        serve(cache, 0, 30)
        assert asked.wait(20)
        for number in range(1, 6):
            serve(cache, 50 * number, 30)
        assert "events wait to be published, more than 8" in caplog.text
        assert publisher.lost > 0
        go_on.set()
        for number in range(6):
            serve(cache, 50 * number, 30)

        def began_again(batches: Batches) -> bool:
            cache.poll()  # it begins again once the events that wait are sent
            return has("AllBlocksCleared", 2)(batches)

        listener.until(began_again)


def test_a_namespace_that_cannot_be_named_costs_the_cache_nothing(
    cache: Cache,
    place: str,
    listen: Callable[[KvEventPublisher], Listener],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def names(namespace: object) -> Names:
        if namespace == "stranger":
            raise LookupError(f"no adapter of {namespace}")
        return Names(lora_name=None if namespace is None else str(namespace))

    addresses: dict[str, Any] = {"bind": f"{place}/live", "replay": f"{place}/replay"}
    with (
        caplog.at_level(logging.WARNING, "kvgraft"),
        KvEventPublisher(cache, **addresses, names=names) as publisher,
    ):
        listener = listen(publisher)
        for namespace in ("stranger", "tenant", "stranger", None):
            serve(cache, 0, 20, namespace=namespace)
        told = events_of(listener.until(has("BlockStored", 12)))
        assert publisher.lost == 0
    assert caplog.text.count("no name for namespace 'stranger', which is left out: Look") == 1
    stored = [each for each in told if each["type"] == "BlockStored" and each["group_idx"] == 0]
    assert [each["lora_name"] for each in stored if each["medium"] == "GPU"] == ["tenant", None]


def test_a_thread_that_failed_is_reported_and_costs_the_cache_nothing(
    cache: Cache, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    def names(namespace: object) -> Names:
        return Names(lora_name=object())  # type: ignore[arg-type]

    with (
        caplog.at_level(logging.WARNING, "kvgraft"),
        KvEventPublisher(cache, bind=f"{place}/live", names=names),
    ):
        while "KV events: publishing ended with TypeError" not in caplog.text:
            serve(cache, 0, 20)
        cache.check_integrity()


def test_impossible_options_are_refused(cache: Cache, place: str) -> None:
    with pytest.raises(ConfigError, match="give bind or connect, one of them"):
        KvEventPublisher(cache)
    with pytest.raises(ConfigError, match="component 'mla' is not in this cache; it has full, swa"):
        KvEventPublisher(cache, bind=f"{place}/live", components=["mla"])
    with pytest.raises(ConfigError, match="no component is named in this cache"):
        KvEventPublisher(cache, bind=f"{place}/live", components=[])
    for address in ("nowhere", "tcp://no such host:x"):
        with pytest.raises(ConfigError, match=f"cannot listen on '{address}': "):
            KvEventPublisher(cache, bind=address)
    with KvEventPublisher(cache, bind=f"{place}/live") as publisher:
        assert publisher.replay_endpoint is None
        with pytest.raises(ConfigError, match="cannot connect to 'live'"):
            KvEventPublisher(cache, connect="live")
    publisher.close()


def test_a_publisher_connects_to_a_subscriber_that_listens(cache: Cache, place: str) -> None:
    context = zmq.Context()
    router = context.socket(zmq.SUB)
    router.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    router.setsockopt(zmq.SUBSCRIBE, b"")
    router.bind(f"{place}/router")
    with KvEventPublisher(cache, connect=f"{place}/router", topic="kv") as publisher:
        first = 0
        while not router.poll(10):
            serve(cache, first, 20)
            first += 20
        topic, _, payload = router.recv_multipart()
        assert publisher.endpoint == f"{place}/router"
    context.destroy(linger=0)
    _, events, rank = msgspec.msgpack.decode(payload)
    assert (topic, rank) == (b"kv", 0)
    assert events


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_addresses_of_ipv6_can_be_used(cache: Cache) -> None:
    with KvEventPublisher(cache, bind="tcp://[::1]:*", replay="tcp://[::1]:*") as publisher:
        assert publisher.endpoint.startswith("tcp://[::1]:")
        listener = Listener(publisher.endpoint, str(publisher.replay_endpoint), ipv6=True)
        cache.poll()
        listener.until(has("AllBlocksCleared"))
        listener.close()


def test_a_process_ends_although_its_publisher_was_not_closed(place: str) -> None:
    code = (
        "from kvgraft import Cache\n"
        "from kvgraft_observe.kv_events import KvEventPublisher\n"
        "cache = Cache.open(['full'], device_tokens=1024)\n"
        f"publisher = KvEventPublisher(cache, bind='{place}/live', replay='{place}/replay')\n"
        "cache.poll()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
