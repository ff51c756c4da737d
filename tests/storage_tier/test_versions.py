"""Cleared namespaces are misses in STORAGE, for this process and later ones (S8, T11)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvgraft import Cache, ConfigError, Namespaces, TokenKey
from kvgraft_storage import Capabilities, open_storage

from ..serving.server import Server
from ..serving.setups import SETUPS
from .shelf import Shelf, open_cache, settings, stocked, tier_of, until

PROMPT = range(100, 132)
SETUP = SETUPS["full"]


def opened(directory: Path) -> Cache:
    """A cache over a directory, as a process of its own would open it."""
    url = f"file:{directory}?capacity=16MiB&segment=1MiB&refresh_s=0"
    return SETUP.open(storage=settings(url=url, deadline_s=30), device_tokens=256, host_tokens=512)


def compute(cache: Cache, namespace: object = None) -> None:
    """Serve the prompt and wait until the store has its data."""
    server, key = Server(cache), TokenKey(PROMPT, namespace=namespace)
    request = cache.begin(key)
    assert cache.admit(request).admitted
    server.load_back(request)
    server.prefill(request)
    cache.finish(request)
    assert cache.drain()


def stored(cache: Cache, namespace: object = None) -> int:
    """Tokens of the prompt that STORAGE brings to a cache without them."""
    prefetch = tier_of(cache).prefetch(TokenKey(PROMPT, namespace=namespace))
    cache.drain()
    assert prefetch.ended
    tokens = prefetch.gained_tokens
    tier_of(cache).cancel(prefetch)
    return tokens


def test_cleared_namespace_is_a_miss_on_all_tiers_and_others_stay() -> None:
    shelf = Shelf()
    with open_cache(SETUP, shelf, device_tokens=256, host_tokens=512) as cache:
        compute(cache, "goes")
        compute(cache, "stays")
        n_stored = len(shelf.stored)
        cache.clear("goes")
        assert stored(cache, "goes") == 0
        assert cache.begin(TokenKey(PROMPT, namespace="stays")).anchor_tokens == 30
        compute(cache, "goes")
        assert len(shelf.stored) > n_stored, "its new data has other names"
        cache.check_integrity()
    with open_cache(SETUP, shelf, device_tokens=256, host_tokens=512) as cache:
        assert stored(cache, "stays") == 30


@pytest.mark.parametrize("namespace", ["goes", Namespaces.ALL])
def test_restart_does_not_bring_cleared_data_back(tmp_path: Path, namespace: object) -> None:
    with opened(tmp_path) as cache:
        compute(cache, "goes")
        compute(cache, "stays")
    with opened(tmp_path) as cache:  # it has no data of the namespace, and clears it all the same
        assert cache.clear(namespace).durable
        assert cache.drain()
    with opened(tmp_path) as cache:
        assert stored(cache, "goes") == 0
        assert stored(cache, "stays") == (0 if namespace is Namespaces.ALL else 30)
        compute(cache, "goes")
    with opened(tmp_path) as cache:
        assert stored(cache, "goes") == 30, "data of the last version"


def test_damaged_version_is_another_one(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        compute(cache, "goes")
        cache.clear("goes")
        compute(cache, "goes")
    (file,) = tmp_path.glob("*.version")
    for content in (b"", file.read_bytes()[:31], bytes(33)):
        file.write_bytes(content)
        with opened(tmp_path) as cache:
            assert stored(cache, "goes") == 0


def test_store_that_is_cleared_keeps_its_versions(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        cache.clear("goes")
        assert cache.drain()
        ticket = tier_of(cache).clear()
        assert cache.drain()
        assert ticket.wait(30)
        assert len(list(tmp_path.glob("*.version"))) == 1


def test_two_processes_on_one_directory(tmp_path: Path) -> None:
    with opened(tmp_path) as first, opened(tmp_path) as second:
        compute(first, "adapter")
        first.clear("adapter", version="rev-2")
        assert first.drain()
        assert stored(second, "adapter") == 30, "the other has the old adapter, and its data"
        second.clear("adapter", version="rev-2")
        assert stored(second, "adapter") == 0
        compute(first, "adapter")
        assert stored(second, "adapter") == 30, "both have the new one"
        second.clear("adapter")
        assert stored(second, "adapter") == 0, "a version of its own"
        assert second.drain()


def test_version_that_comes_again_finds_its_data_again(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        for step in range(3):
            cache.clear(version=step)
            assert stored(cache) == 0
            compute(cache)
        cache.clear(version=1)
        assert stored(cache) == 30
        assert cache.drain()
    with opened(tmp_path) as cache:
        assert stored(cache) == 30, "the last version holds"
        cache.clear(version="1")
        assert stored(cache) == 0


def test_crash_before_the_version_is_durable_leaves_one_version_or_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as cache:
        compute(cache, "goes")
    cache = opened(tmp_path)
    tier = tier_of(cache)
    store = tier.client._attachment.calls.backend  # type: ignore[union-attr]
    monkeypatch.setattr(store, "set_version", _fails)
    cache.clear("goes")
    assert stored(cache, "goes") == 0
    assert not cache.drain(), "it says that the version is not durable"
    assert tier.versions.n_unwritten == 1
    with opened(tmp_path) as after:
        assert stored(after, "goes") == 30, "as if the call had not been made"
    monkeypatch.undo()
    while tier.versions.n_unwritten:
        cache.poll()
    with opened(tmp_path) as after:  # while the first is open, as after a kill
        assert stored(after, "goes") == 0
    cache.close()


def _fails(name: bytes, version: bytes) -> None:
    raise OSError("no space left")


def test_key_named_before_a_clear_gives_its_nodes_new_names() -> None:
    shelf = stocked(SETUP, PROMPT)
    with open_cache(SETUP, shelf, device_tokens=256, host_tokens=512) as cache:
        key, n_stored = TokenKey(PROMPT), len(shelf.stored)
        prefetch = tier_of(cache).prefetch(key)
        assert cache.drain()
        request = cache.begin(key, prefetch=prefetch)
        assert request.storage_tokens == 30
        cache.clear()
        assert cache.admit(request).admitted
        Server(cache).prefill(request)
        cache.finish(request)
        assert cache.drain()
        cache.check_integrity()
        assert len(shelf.stored) == n_stored + 16


def test_store_attached_later_gets_this_process_s_versions() -> None:
    shelf = Shelf()
    with open_cache(SETUP, shelf, device_tokens=256, host_tokens=512) as cache:
        compute(cache, "mine")
    with SETUP.open(storage=settings(), device_tokens=256, host_tokens=512) as cache:
        assert not cache.clear("mine").durable
        tier_of(cache).attach(shelf)
        assert stored(cache, "mine") == 0
        assert not tier_of(cache).versions.n_unwritten
    with open_cache(SETUP, shelf, device_tokens=256, host_tokens=512) as cache:
        assert stored(cache, "mine") == 0


def test_store_attached_later_gives_its_versions_to_data_that_had_names() -> None:
    shelf, other = Shelf(), Shelf()
    with open_cache(SETUP, other, device_tokens=256, host_tokens=512) as cache:
        compute(cache)
        cache.clear()
    with open_cache(SETUP, shelf, device_tokens=256, host_tokens=512) as cache:
        compute(cache)
        tier = tier_of(cache)
        tier.detach()
        until(lambda: tier.client.closed, cache)
        tier.attach(other)
        cache.check_integrity()
        longer = tier.prefetch(TokenKey([*PROMPT, *range(8)]))
        assert cache.drain()
        assert longer.gained_tokens == 0
        cache.check_integrity()


def test_store_attached_later_gives_its_versions_to_nodes_that_a_key_named() -> None:
    """Their root has no name of its own: the key had those of all pages."""
    longer = [*PROMPT, *range(8)]
    shelf, other = Shelf(), stocked(SETUP, longer)
    with open_cache(SETUP, other, device_tokens=256, host_tokens=512) as cache:
        cache.clear(None)
        assert cache.drain()
    with open_cache(SETUP, shelf, device_tokens=256, host_tokens=512) as cache:
        tier, key = tier_of(cache), TokenKey([*PROMPT, 0])
        prefetch = tier.prefetch(key)
        assert cache.drain()
        request = cache.begin(key, prefetch=prefetch)
        assert cache.admit(request).admitted
        Server(cache).prefill(request)
        cache.finish(request)
        assert cache.drain()
        tier.detach()
        until(lambda: tier.client.closed, cache)
        tier.attach(other)
        cache.check_integrity()
        again = tier.prefetch(TokenKey(longer))
        assert cache.drain()
        assert again.gained_tokens == 0


def test_store_attached_again_keeps_what_another_process_cleared(tmp_path: Path) -> None:
    """A version that was only found, or was acknowledged before, is not written again."""
    with opened(tmp_path) as other, opened(tmp_path) as cache:
        compute(cache, "found")
        cache.clear("mine")
        assert cache.drain()
        compute(cache, "mine")
        other.clear("found")
        assert other.drain()
    with opened(tmp_path) as other, opened(tmp_path) as cache:
        cache.clear("mine")
        compute(cache, "mine")
        compute(cache, "found")
        other.clear("found")
        other.clear("mine")
        assert other.drain()
        tier = tier_of(cache)
        tier.detach()
        until(lambda: tier.client.closed, cache)
        tier.attach(open_storage(f"file:{tmp_path}?capacity=16MiB"))
        assert cache.drain()
    with opened(tmp_path) as other:
        assert [stored(other, name) for name in ("found", "mine")] == [0, 0]


class Forgetful(Shelf):
    """A store without versions."""

    @property
    def capabilities(self) -> Capabilities:
        return super().capabilities._replace(keeps_versions=False)


def test_store_without_versions_holds_for_this_process_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shelf = Forgetful()
    with open_cache(SETUP, shelf, device_tokens=256, host_tokens=512) as cache:
        compute(cache)
        with caplog.at_level(logging.WARNING, "kvgraft"):
            assert not cache.clear(None).durable
        assert "the store does not keep versions" in caplog.text
        caplog.clear()
        assert stored(cache) == 0
        assert not cache.clear(version="rev-1").durable
        assert not caplog.records, "whoever names a version names it in the next process, too"
        assert cache.drain()


def test_version_without_bytes_is_refused_and_nothing_changes() -> None:
    with open_cache(SETUP, Shelf(), device_tokens=256, host_tokens=512) as cache:
        compute(cache)
        with pytest.raises(ConfigError, match=r"clear: version: 1.5 is a float"):
            cache.clear(version=1.5)
        assert cache.begin(TokenKey(PROMPT)).anchor_tokens == 30


def test_store_opened_alone_has_the_versions_that_were_set(tmp_path: Path) -> None:
    url = f"file:{tmp_path}?capacity=4MiB"
    store = open_storage(url)
    store.set_version(bytes(32), bytes(range(32)))
    assert store.versions() == {bytes(32): bytes(range(32))}
    again = open_storage(url)
    assert again.versions() == store.versions()
    for each in (store, again):
        each.close()
