"""A restarted process hits its predecessor's data at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvgraft import ConfigError, SnapshotError, TokenKey
from kvgraft.tree.keys import NAMESPACE_DEPTH
from kvgraft_storage.canonical import decode, encode

from ..serving.server import Server
from ..serving.setups import SETUPS, Setup, installed
from .shelf import Shelf, open_cache, settings, tier_of, until

HYBRID = installed("full", "swa", "mamba")
PROMPTS = [[*range(100, 117), *range(start, start + 16)] for start in (200, 300, 400)]
"""Three of 33 tokens with 17 in common."""


def apart(n_prompts: int) -> list[list[int]]:
    """Prompts of 33 tokens with nothing in common."""
    return [list(range(start, start + 33)) for start in range(2000, 2000 + 100 * n_prompts, 100)]


def served(setup: Setup, path: Path, prompts: Sequence[list[int]] = PROMPTS) -> Shelf:
    """A process that served the prompts, saved its index and ended."""
    shelf = Shelf()
    cache = open_cache(setup, shelf, device_tokens=256, host_tokens=512)
    server = Server(cache)
    for prompt in prompts:
        server.serve(prompt[:17])
        server.serve(prompt)
    assert cache.drain()
    assert tier_of(cache).save(path) == cache.tree.n_nodes
    cache.close()
    return shelf


@pytest.mark.one_in(3)
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_after_a_warm_restart_the_first_request_hits(setup: Setup, tmp_path: Path) -> None:
    shelf = served(setup, tmp_path / "index")
    cache = open_cache(setup, shelf, device_tokens=256, host_tokens=512)
    restoring = tier_of(cache).load(tmp_path / "index")
    assert not bool(restoring.ended)  # mypy would hold the property for constant
    assert cache.drain()
    assert restoring.ended
    assert restoring.tokens == 16 + 3 * 16, "shared pages come once"
    cache.check_integrity()
    server = Server(cache)
    asked = len(shelf.asked)
    for prompt in PROMPTS:
        request = cache.begin(TokenKey(prompt))
        assert request.anchor_tokens == 32
        assert request.storage_tokens == 0
        assert cache.admit(request).admitted
        server.load_back(request)
        server.prefill(request)
        cache.finish(request)
    fork = cache.begin(TokenKey([*PROMPTS[0][:16], 1, 2, 3]))
    assert fork.anchor_tokens == 16
    cache.abort(fork)
    assert len(shelf.asked) == asked
    assert cache.drain()
    cache.check_integrity()
    cache.close()


def test_the_last_used_data_is_restored_first_and_evicts_nothing(tmp_path: Path) -> None:
    setup = installed("full")
    shelf = served(setup, tmp_path / "index")
    cache = open_cache(setup, shelf, device_tokens=256, host_tokens=48)
    server = Server(cache)
    own = list(range(900, 909))
    server.serve(own)
    tier_of(cache).load(tmp_path / "index")
    assert cache.drain()
    anchors = [cache.explain(TokenKey(prompt)).anchor for prompt in (*PROMPTS, [*own, 1])]
    assert anchors[3] == 8
    assert anchors[2] == 32
    assert anchors[0] <= anchors[1] < 32
    cache.check_integrity()
    cache.close()


def full_host(path: Path, n_prompts: int) -> Server:
    """A process that was restarted, and filled HOST with something else before it loads."""
    setup = installed("full")
    shelf = served(setup, path, apart(n_prompts))
    cache = open_cache(setup, shelf, device_tokens=256, host_tokens=32)
    server = Server(cache)
    server.serve(range(900, 933))
    host = cache.tree.components[0].host
    assert host is not None
    assert not host.free
    return server


def test_where_host_is_full_the_rest_of_a_snapshot_is_left_alone(tmp_path: Path) -> None:
    cache = full_host(tmp_path / "index", 8).cache
    restoring = tier_of(cache).load(tmp_path / "index")
    assert cache.drain()
    assert (restoring.ended, restoring.tokens) == (True, 0)
    assert tier_of(cache).counts()["prefetch started"] == 4 < restoring.n_boundaries
    assert cache.explain(TokenKey(range(900, 933))).anchor == 32
    cache.close()


def test_a_prefetch_that_shared_a_restoring_without_room_gets_room(tmp_path: Path) -> None:
    cache = full_host(tmp_path / "index", 1).cache
    tier = tier_of(cache)
    tier.load(tmp_path / "index")
    tier.poll()
    prefetch = tier.prefetch(TokenKey(range(2000, 2033)))
    assert prefetch.shared
    until(lambda: prefetch.ended, cache)
    assert prefetch.gained_tokens == 32
    cache.close()


def test_data_of_another_store_or_of_before_a_clear_is_not_saved(tmp_path: Path) -> None:
    path, setup = tmp_path / "index", installed("full")
    cache = open_cache(setup, Shelf(), device_tokens=256, host_tokens=512)
    tier, server = tier_of(cache), Server(cache)
    server.serve(PROMPTS[0])
    assert tier.save(path) == 1
    gone = tier.detach()
    until(lambda: gone.done, cache)
    assert tier.save(path) == 1, "the store is closed, and has it"
    tier.attach(Shelf())
    assert tier.save(path) == 0
    server.serve(PROMPTS[1])
    assert tier.save(path)
    tier.clear()
    assert tier.save(path) == 0, "at once"
    cache.close()


def test_data_that_the_store_lost_meanwhile_is_a_miss(tmp_path: Path) -> None:
    shelf = served(HYBRID, tmp_path / "index")
    shelf.stored.clear()
    cache = open_cache(HYBRID, shelf, device_tokens=256, host_tokens=512)
    restoring = tier_of(cache).load(tmp_path / "index")
    assert cache.drain()
    assert restoring.ended
    assert not restoring.tokens
    assert not cache.tree.n_nodes
    cache.check_integrity()
    cache.close()


def test_a_namespace_as_deep_as_any_is_saved_and_loaded(tmp_path: Path) -> None:
    deep: object = ()
    for _ in range(NAMESPACE_DEPTH - 1):
        deep = (deep,)
    with pytest.raises(ConfigError, match="tuples nest deeper"):
        TokenKey(range(33), namespace=(deep,))
    setup, shelf, key = installed("full"), Shelf(), TokenKey(range(33), namespace=deep)
    cache = open_cache(setup, shelf, device_tokens=256, host_tokens=512)
    request = cache.begin(key)
    assert cache.admit(request).admitted
    Server(cache).prefill(request)
    cache.finish(request)
    assert cache.drain()
    assert tier_of(cache).save(tmp_path / "index") == 1
    cache.close()
    cache = open_cache(setup, shelf, device_tokens=256, host_tokens=512)
    tier_of(cache).load(tmp_path / "index")
    assert cache.drain()
    assert cache.explain(key).anchor == 32
    cache.close()


@pytest.mark.parametrize("place", [0, 8, 12, 20, 40, -1])
def test_a_damaged_snapshot_is_refused(tmp_path: Path, place: int) -> None:
    path = tmp_path / "index"
    shelf = served(HYBRID, path)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    cache = open_cache(HYBRID, shelf)
    with pytest.raises(SnapshotError, match="start without it"):
        tier_of(cache).load(path)
    cache.close()


@pytest.mark.parametrize("length", [0, 7, 35, 36, 200])
def test_a_cut_snapshot_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "index"
    shelf = served(HYBRID, path)
    path.write_bytes(path.read_bytes()[:length])
    cache = open_cache(HYBRID, shelf)
    with pytest.raises(SnapshotError, match="start without it"):
        tier_of(cache).load(path)
    cache.close()


@pytest.mark.parametrize("change", [{"weights": "w2"}, {"model": "n"}, {"salt": "s"}])
def test_a_snapshot_of_another_model_is_refused(tmp_path: Path, change: dict[str, str]) -> None:
    shelf = served(HYBRID, tmp_path / "index")
    cache = open_cache(HYBRID, shelf, settings(**change))
    with pytest.raises(SnapshotError, match="another model, weights or layout"):
        tier_of(cache).load(tmp_path / "index")
    cache.close()


def test_a_snapshot_that_cannot_be_read_or_written_is_an_error_in_a_line(tmp_path: Path) -> None:
    cache = open_cache(HYBRID, Shelf())
    with pytest.raises(SnapshotError, match="No such file"):
        tier_of(cache).load(tmp_path / "none")
    with pytest.raises(SnapshotError, match="No such file"):
        tier_of(cache).save(tmp_path / "none" / "index")
    cache.close()


def test_a_closed_cache_saves_nothing_over_a_good_snapshot(tmp_path: Path) -> None:
    served(HYBRID, tmp_path / "index")
    good = (tmp_path / "index").read_bytes()
    cache = open_cache(HYBRID, Shelf())
    cache.close()
    with pytest.raises(SnapshotError, match="cache was closed; drain, save, then close"):
        tier_of(cache).save(tmp_path / "index")
    assert (tmp_path / "index").read_bytes() == good


def test_saving_replaces_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "index"
    path.write_text("old content")
    served(HYBRID, path)
    assert [each.name for each in tmp_path.iterdir()] == ["index"]


PLAIN = st.recursive(
    st.none() | st.integers() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
)


@given(PLAIN)
def test_canonical_bytes_are_read_back(value: object) -> None:
    assert decode(encode(value)) == value


@given(PLAIN, st.data())
def test_cut_canonical_bytes_are_no_value(value: object, data: st.DataObject) -> None:
    encoded = encode(value)
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    with pytest.raises(ValueError, match=r"premature end|encoding"):
        decode(cut)


def test_a_small_share_of_host_restores_one_boundary_after_the_other(tmp_path: Path) -> None:
    setup = installed("full")
    shelf = served(setup, tmp_path / "index", apart(3))
    size = setup.open().mounted[0].component.host.slab_nbytes  # type: ignore[union-attr]
    given = settings(prefetch_nbytes=17 * size)
    cache = open_cache(setup, shelf, given, device_tokens=256, host_tokens=512)
    tier = tier_of(cache)
    restoring, held = tier.load(tmp_path / "index"), [0]

    def over() -> bool:
        held.append(tier.prefetching.nbytes_in_flight)
        return restoring.ended

    until(over, cache)
    assert 0 < max(held) <= given.prefetch_nbytes
    assert all(cache.explain(TokenKey(prompt)).anchor == 32 for prompt in apart(3))
    cache.close()


def test_a_snapshot_loaded_before_a_store_is_attached_waits_for_it(tmp_path: Path) -> None:
    setup = installed("full")
    shelf = served(setup, tmp_path / "index")
    cache = setup.open(storage=settings(), device_tokens=256, host_tokens=512)
    assert tier_of(cache).detach().done
    assert tier_of(cache).clear().done
    restoring = tier_of(cache).load(tmp_path / "index")
    assert cache.drain(), "nothing is under way without a store"
    assert not restoring.ended
    tier_of(cache).attach(shelf)
    assert cache.drain()
    assert restoring.tokens
    cache.close()
