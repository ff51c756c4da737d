"""Requests through a real cache and their hot buffers, as an engine runs them.

Keys, values and indexer keys are functions of the tokens before them, so that all data read can be
compared with the data computed, after any copies in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch

from kvgraft import (
    Cache,
    CacheConfig,
    ConfigError,
    ContractViolation,
    Direction,
    LeaseError,
    Request,
    Tier,
    TokenKey,
)
from kvgraft.pools import SLOT_BYTES
from kvgraft.transfers import PlaneCopy
from kvgraft_hisparse.hot_buffer import HotBuffer, SwapStatistics
from kvgraft_hisparse.pools import SparseComponent
from kvgraft_testing.stepped import SteppedTransferEngine

PAGE, LAYERS, TOP_K = 4, (0, 1), 6
SHAPES = {"k": (2, 8), "v": (2, 4), "index": (4,)}
INDEX_NBYTES = 4 * 4
HOT_SLOTS = 3  # 8 hot tokens and a page for the newest
HISPARSE = {
    "n_layers": len(LAYERS), "n_kv_heads": 2, "head_dim": 8, "v_head_dim": 4, "dtype": "float32",
    "index_dim": 4, "index_dtype": "float32", "hot_tokens": 8, "max_running": 3,
}  # fmt: skip
ALONE = {"hisparse": HISPARSE}
BESIDE_OTHERS = {
    "full": {"n_layers": 1},
    "swa": {"n_layers": 1, "window": 6},
    "mamba": {"n_layers": 1, "checkpoint_interval_tokens": 2 * PAGE},
    "hisparse": HISPARSE,
}
BOTH = pytest.mark.parametrize("components", [ALONE, BESIDE_OTHERS], ids=["alone", "beside others"])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are tiny: on a busy machine, waiting for a second thread costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def computed(plane: str, layer: int, tokens: list[int], start: int, end: int) -> torch.Tensor:
    """The model's data at positions `[start, end)`; float32 `[n, *shape]`."""
    rows = []
    for position in range(start, end):
        seed = hash((list(SHAPES).index(plane), layer, *tokens[: position + 1])) & (2**62 - 1)
        rows.append(torch.randn(SHAPES[plane], generator=torch.Generator().manual_seed(seed)))
    return torch.stack(rows)


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Plain attention of `[heads, dim]` over `[k, heads, dim]`; the same code for both sources."""
    scores = torch.einsum("hd,khd->hk", query, keys) / keys.shape[-1] ** 0.5
    return torch.einsum("hk,khd->hd", scores.softmax(-1), values)


def nbytes_of(copies: list[PlaneCopy]) -> int:
    return sum(
        len(copy.source_rows) * copy.source.shape[1] * copy.source.element_size() for copy in copies
    )


class Engine:
    """An engine of one cache; every step ends with a check of all books."""

    def __init__(self, components: dict[str, dict[str, Any]], **sizes: Any) -> None:
        self.transfers = SteppedTransferEngine()
        settings: dict[str, Any] = {"page_size": PAGE, "device_tokens": 400, "host_tokens": 600}
        settings |= {"load": None, "write_policy": "write-through"}
        config = CacheConfig(components=components, **{**settings, **sizes})
        self.cache = Cache(config, transfers=self.transfers)
        self.sparse = SparseComponent.of(self.cache)
        assert self.sparse.host is not None
        self.host = self.sparse.host
        (self.hot,) = self.sparse.private

    def wait(self) -> None:
        self.transfers.run_all()
        self.cache.poll()
        self.cache.check_integrity()

    def admitted(self, tokens: list[int], *, reserve: int = 0, chunk: int = 10) -> Running:
        request = self.cache.begin(TokenKey(tokens), reserve=reserve, chunk=chunk)
        self.cache.check_integrity()
        decision = self.cache.admit(request)
        self.cache.check_integrity()
        assert decision.admitted, str(decision)
        return Running(self, request, tokens)

    def cached(self, tokens: list[int]) -> None:
        """Run `tokens` through to the end."""
        running = self.admitted(tokens)
        running.prefill()
        running.finish()
        self.wait()

    def poison_free_slots(self) -> None:
        """Overwrite every host and indexer row that nobody owns."""
        self.host.slab[self.host.allocator.free_slots()] = 0xFF
        free = self.sparse.device.allocator.free_slots()
        for plane in self.sparse.device.planes:
            plane[free] = float("nan")

    def copies_from_host(self, copies: list[PlaneCopy]) -> list[PlaneCopy]:
        """Those of this component, by the memory they read."""
        slab = self.host.slab.untyped_storage().data_ptr()
        return [copy for copy in copies if copy.source.untyped_storage().data_ptr() == slab]

    def host_plane_of(self, copy: PlaneCopy) -> tuple[int, str]:
        (spec,) = (
            spec
            for spec, lanes in zip(self.host.specs, self.host.lanes, strict=True)
            if lanes is copy.source
        )
        return spec.layer, spec.name

    def hot_planes(self) -> list[torch.Tensor]:
        return [pair.hot for pairs in self.sparse.hot.layers.values() for pair in pairs]


class Running:
    """One request of the engine and its hot buffer."""

    def __init__(self, engine: Engine, request: Request, tokens: list[int]) -> None:
        self.engine, self.cache, self.request = engine, engine.cache, request
        self.tokens = list(tokens)
        self.buffer = engine.sparse.open_buffer(self.cache, request)
        self.cache.check_integrity()

    @property
    def hot_slots(self) -> list[int]:
        (slots,) = self.cache.private_slots(self.request, "hisparse")
        return torch.frombuffer(bytearray(slots), dtype=torch.int32).tolist()

    def load_back(self) -> list[PlaneCopy]:
        """Start the load-back; the copies it makes."""
        before = len(self.engine.transfers.pending)
        self.cache.load_back(self.request)
        self.cache.check_integrity()
        tickets = self.engine.transfers.pending[before:]
        return [copy for ticket in tickets for copy in ticket.copies]

    def compute(self, n_tokens: int) -> None:
        """One step: slots, then keys and values through the buffer and indexer keys beside it."""
        request, buffer, start = self.request, self.buffer, self.request.computed
        end = start + n_tokens
        assert self.cache.allocate(request, n_tokens)
        self.cache.check_integrity()
        host_slots = self.cache.host_table(request, "hisparse")
        buffer.add_host_pages(host_slots[buffer.n_host_pages :].tobytes())
        positions = torch.arange(start, end)
        pages, offsets = positions // PAGE, positions % PAGE
        on_device = torch.tensor(self.cache.table(request, "hisparse"))[pages].long()
        on_host = torch.tensor(host_slots)[pages].long()
        for layer in LAYERS:
            made = {name: computed(name, layer, self.tokens, start, end) for name in SHAPES}
            buffer.append(layer, start, [made["k"], made["v"]])
            self.engine.sparse.device.plane(layer, "index")[on_device, offsets] = made["index"]
            self.engine.host.plane(layer, "index")[on_host, offsets] = made["index"]
        self.cache.computed(request, n_tokens)
        self.cache.check_integrity()
        buffer.check_integrity()

    def prefill(self) -> int:
        """Compute the prompt chunk by chunk; how many chunks it took."""
        for n_chunks in count():
            if self.request.computed == self.request.prompt:
                return n_chunks
            n_tokens = self.cache.next_chunk(self.request)
            assert n_tokens > 0
            self.compute(n_tokens)
            self.attend()
        raise AssertionError

    def decode(self, n_tokens: int) -> None:
        for token in range(7000, 7000 + n_tokens):
            self.tokens.append(token)
            self.request.key.extend([token])
            self.compute(1)
            self.attend()

    def attend(self) -> None:
        """The newest token attends to the tokens that its indexer keys select (H3, H5)."""
        n_tokens, last = self.request.computed, self.request.computed - 1
        positions = torch.arange(n_tokens)
        table = torch.tensor(self.cache.table(self.request, "hisparse")).long()
        host_table = torch.tensor(self.cache.host_table(self.request, "hisparse")).long()
        assert self.buffer.host_slots == host_table.int().numpy().tobytes()
        for layer in LAYERS:
            index_plane = self.engine.sparse.device.plane(layer, "index")
            index = index_plane[table[positions // PAGE], positions % PAGE]
            assert torch.equal(index, computed("index", layer, self.tokens, 0, n_tokens))
            scores = index @ index[last]
            topk = scores.topk(min(TOP_K, n_tokens)).indices
            hot_rows = self.buffer.swap_in(layer, topk[None])[0].long()
            assert {row // PAGE for row in hot_rows.tolist()} <= set(self.hot_slots)
            through = [pair.hot[hot_rows] for pair in self.engine.sparse.hot.layers[layer]]
            straight = [
                self.engine.host.plane(layer, name)[host_table[topk // PAGE], topk % PAGE]
                for name in ("k", "v")
            ]
            for plane, rows in zip("kv", straight, strict=True):
                assert torch.equal(rows, computed(plane, layer, self.tokens, 0, n_tokens)[topk])
            query = computed("k", layer, [-1, *self.tokens[: last + 1]], last + 1, last + 2)[0]
            assert torch.equal(attend(query, *through), attend(query, *straight))

    def checkpoint(self) -> bool:
        shared = self.cache.checkpoint(self.request)
        self.cache.check_integrity()
        table = self.cache.host_table(self.request, "hisparse")
        self.buffer.replace_host_pages(0, table.tobytes())
        return shared

    def end(self, how: Callable[[Request], object]) -> object:
        self.buffer.close()
        ended = how(self.request)
        self.cache.check_integrity()
        return ended

    def finish(self) -> object:
        return self.end(self.cache.finish)


PROMPT = list(range(100, 137))
OTHER = list(range(500, 537))


# --- the life of a prefix -------------------------------------------------------------------------


@BOTH
def test_a_prefix_is_computed_shared_and_resumed_without_moving_a_key_or_value(
    components: dict[str, dict[str, Any]],
) -> None:
    engine = Engine(components)
    first = engine.admitted(PROMPT, reserve=5)
    assert first.prefill() > 3
    assert first.checkpoint()
    first.decode(5)
    n_cached = 40
    assert first.finish() == n_cached
    engine.wait()
    engine.cache.evict("hisparse", 10_000)
    engine.cache.check_integrity()
    engine.poison_free_slots()
    assert engine.sparse.device.allocator.n_free == 100

    before = [plane.clone() for plane in engine.hot_planes()]
    second = engine.admitted([*first.tokens, *OTHER], reserve=12)
    request = second.request
    assert (request.anchor_tokens, request.device_tokens) == (n_cached, 0)
    copies = second.load_back()
    mine = engine.copies_from_host(copies)
    assert {engine.host_plane_of(copy) for copy in mine} == {(layer, "index") for layer in LAYERS}
    assert nbytes_of(mine) == n_cached * INDEX_NBYTES * len(LAYERS)
    assert (len(mine) == len(copies)) is (components is ALONE)
    (transfer,) = request.waits
    moved = {mounted.name: query for mounted, query in transfer.queries}
    assert moved.keys() == components.keys()
    assert len(moved["hisparse"].device_slots) == n_cached // PAGE * SLOT_BYTES
    assert moved["hisparse"].host_slots == engine.cache.host_table(request, "hisparse").tobytes()
    assert engine.cache.evict("hisparse", 10_000, tier=Tier.HOST) == 0
    engine.wait()
    counted = engine.cache.journal.counters[Direction.LOAD_BACK].slots
    assert counted["hisparse"] == n_cached // PAGE

    assert [second.buffer.n_tokens(layer) for layer in LAYERS] == [n_cached] * len(LAYERS)
    assert second.buffer.statistics == SwapStatistics(0, 0)
    assert all(torch.equal(old, new) for old, new in zip(before, engine.hot_planes()))
    second.prefill()
    second.decode(12)
    assert second.buffer.statistics.rows_moved > 0
    second.finish()
    engine.wait()


@BOTH
def test_a_hit_on_device_moves_nothing_at_all(components: dict[str, dict[str, Any]]) -> None:
    engine = Engine(components)
    engine.cached(PROMPT[:36])
    again = engine.admitted([*PROMPT[:36], 1, 2, 3], reserve=3)
    assert again.request.device_tokens == 36
    assert again.load_back() == []
    assert again.buffer.n_tokens(0) == 36
    assert again.buffer.statistics == SwapStatistics(0, 0)
    again.prefill()
    again.decode(3)
    again.finish()
    assert engine.cache.journal.counters[Direction.LOAD_BACK].started == 0


def test_a_buffer_opened_before_the_first_decode_starts_from_everything_computed() -> None:
    engine = Engine(ALONE)
    running = engine.admitted(PROMPT, reserve=4)
    running.prefill()
    running.buffer.close()
    running.buffer = engine.sparse.open_buffer(engine.cache, running.request)
    assert running.buffer.n_tokens(1) == len(PROMPT)
    assert running.buffer.resident_tokens(1).tolist() == []
    running.attend()
    running.decode(4)
    running.finish()


@BOTH
def test_requests_that_computed_the_same_prompt_read_the_shared_host_slots_after_a_checkpoint(
    components: dict[str, dict[str, Any]],
) -> None:
    engine = Engine(components)
    runs = [engine.admitted(PROMPT, reserve=6) for _ in range(2)]
    for running in runs:
        running.prefill()
    own = [set(engine.cache.host_table(each.request, "hisparse")[:9].tolist()) for each in runs]
    assert not own[0] & own[1]
    assert [running.checkpoint() for running in runs] == [True, True]
    shared = [engine.cache.host_table(each.request, "hisparse")[:9].tolist() for each in runs]
    assert shared[0] == shared[1]
    assert set(shared[0]) == own[0]
    engine.poison_free_slots()
    for running in runs:
        running.decode(6)
        running.finish()
    engine.wait()


# --- H4 -------------------------------------------------------------------------------------------


@BOTH
def test_host_slots_of_a_running_request_survive_eviction_from_the_host(
    components: dict[str, dict[str, Any]],
) -> None:
    engine = Engine(components)
    engine.cached(PROMPT[:36])
    engine.cached(OTHER)
    running = engine.admitted([*PROMPT[:36], *range(10)], reserve=14)
    running.prefill()
    running.checkpoint()
    running.decode(6)
    held = engine.cache.host_table(running.request, "hisparse").tolist()

    engine.wait()
    freed = engine.cache.evict("hisparse", 10_000, tier=Tier.HOST)
    engine.cache.check_integrity()
    assert freed == len(OTHER) // PAGE
    assert not set(held) & set(engine.host.allocator.free_slots())
    assert engine.host.allocator.n_free == engine.host.capacity - len(held)
    engine.poison_free_slots()
    running.buffer.check_integrity()
    running.decode(8)
    assert engine.cache.host_table(running.request, "hisparse")[: len(held)].tolist() == held
    running.finish()


# --- H7 -------------------------------------------------------------------------------------------

EXTEND = {"prompt": 37, "reserve": 0}
DECODE = {"prompt": 9, "reserve": 28}
SMALL = {
    "device": {"device_tokens": 60},
    "host": {"host_tokens": 60},
    "hot": {"max_running": 1},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("work", [EXTEND, DECODE], ids=["extend", "decode"])
@pytest.mark.parametrize(
    ("pool", "shortage"),
    [
        ("device", "needs 11 slots, 4 available of 15"),
        ("host", "needs 11 slots, 4 available of 15"),
        ("hot", f"needs {HOT_SLOTS} slots, 0 available of {HOT_SLOTS}"),
    ],
)
def test_a_request_waits_for_the_pool_that_is_short_and_the_one_that_holds_it_runs_to_its_end(
    pool: str, shortage: str, work: dict[str, int]
) -> None:
    engine = Engine({"hisparse": {**HISPARSE, **SMALL[pool]}})
    prompt, reserve = work["prompt"], work["reserve"]
    first = engine.admitted(PROMPT[:prompt], reserve=reserve, chunk=8)
    first.compute(engine.cache.next_chunk(first.request))
    waiting = engine.cache.begin(TokenKey(OTHER[:prompt]), reserve=reserve, chunk=8)
    free = pool_sizes(engine)
    decision = engine.cache.admit(waiting)
    engine.cache.check_integrity()
    said = f"deferred; component 'hisparse' {pool} pool: {shortage}; waits for running: 1"
    assert str(decision) == said
    assert pool_sizes(engine) == free
    with pytest.raises(LeaseError, match="this call needs it admitted"):
        engine.sparse.open_buffer(engine.cache, waiting)

    first.prefill()
    first.decode(reserve)
    first.finish()
    assert engine.cache.admit(waiting).admitted
    second = Running(engine, waiting, OTHER[:prompt])
    second.prefill()
    second.decode(reserve)
    second.finish()
    assert engine.hot.allocator.n_free == engine.hot.allocator.capacity


@pytest.mark.parametrize(
    "work", [{"prompt": 61, "reserve": 0}, {"prompt": 9, "reserve": 52}], ids=["extend", "decode"]
)
@pytest.mark.parametrize("pool", ["device", "host"])
def test_a_request_larger_than_a_pool_is_refused_at_once_with_the_pool_and_the_numbers(
    pool: str, work: dict[str, int]
) -> None:
    engine = Engine({"hisparse": {**HISPARSE, **SMALL[pool]}})
    request = engine.cache.begin(TokenKey(range(work["prompt"])), reserve=work["reserve"], chunk=8)
    decision = engine.cache.admit(request)
    engine.cache.check_integrity()
    shortage = "needs 17 slots, the pool has 15"
    assert str(decision) == f"never fits; component 'hisparse' {pool} pool: {shortage}"
    engine.cache.abort(request)
    engine.cache.check_integrity()


def test_indexer_rows_of_a_load_back_are_budgeted_beside_those_to_compute() -> None:
    engine = Engine({"hisparse": {**HISPARSE, "device_tokens": 60}})
    engine.cached(PROMPT[:36])
    engine.cache.evict("hisparse", 10_000)
    running = engine.admitted(OTHER[:8])
    waiting = engine.cache.begin(TokenKey([*PROMPT[:36], *range(4)]), reserve=4)
    # 9 pages to load, 2 to compute and one of slack, of the 15 - 3 promised to the other
    waiting_needs = 9 + 2 + 1
    assert engine.cache.admit(waiting).admitted
    assert engine.sparse.device.allocator.n_free == 15
    third = engine.cache.begin(TokenKey([9]))
    decision = engine.cache.admit(third)
    assert str(decision) == (
        "deferred; component 'hisparse' device pool: needs 2 slots, "
        f"{15 - 3 - waiting_needs} available of 15; waits for running: 2"
    )
    engine.cache.abort(third)
    second = Running(engine, waiting, [*PROMPT[:36], *range(4)])
    assert second.load_back()
    engine.wait()
    for each in (second, running):
        each.prefill()
    second.decode(4)
    for each in (second, running):
        each.finish()


def pool_sizes(engine: Engine) -> list[int]:
    pools = (engine.sparse.device, engine.host, engine.hot)
    return [pool.allocator.n_free for pool in pools]


# --- H8 -------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@BOTH
@pytest.mark.parametrize("how", ["finish", "abort", "retract"])
def test_every_hot_slot_comes_back_when_a_request_ends(
    how: str, components: dict[str, dict[str, Any]]
) -> None:
    engine = Engine(components)
    neighbour = engine.admitted(OTHER, reserve=8)
    neighbour.prefill()
    free = sorted(engine.hot.allocator.free_slots())
    running = engine.admitted(PROMPT, reserve=8)
    running.prefill()
    running.decode(3)
    held, old = running.hot_slots, running.buffer
    assert sorted([*held, *engine.hot.allocator.free_slots()]) == free
    assert (len(held), len(free)) == (HOT_SLOTS, 2 * HOT_SLOTS)

    running.end(getattr(engine.cache, how))
    assert sorted(engine.hot.allocator.free_slots()) == free
    with pytest.raises(LeaseError, match="request is closed"):
        engine.cache.private_slots(running.request, "hisparse")

    after = [engine.admitted([token], reserve=8) for token in (1, 2)]
    assert sorted(slot for each in after for slot in each.hot_slots) == free
    for use in (lambda: old.swap_in(0, torch.tensor([[0]])), old.close):
        with pytest.raises(ContractViolation, match="H8"):
            use()
    for each in (*after, neighbour):
        each.prefill()
        each.decode(8)
    for each in (*after, neighbour):
        each.finish()
    engine.wait()
    assert sorted(engine.hot.allocator.free_slots()) == list(range(3 * HOT_SLOTS))


@BOTH
@pytest.mark.parametrize("then", ["restart", "abort"])
def test_every_hot_slot_comes_back_when_a_load_back_fails(
    then: str, components: dict[str, dict[str, Any]]
) -> None:
    engine = Engine(components)
    engine.cached(PROMPT[:36])
    engine.cache.evict("hisparse", 10_000)
    engine.poison_free_slots()
    running = engine.admitted([*PROMPT[:36], 1, 2, 3], reserve=4)
    assert running.load_back()
    engine.transfers.fail()
    engine.cache.poll()
    engine.cache.check_integrity()
    assert running.request.load_failed
    running.end(getattr(engine.cache, then))
    assert engine.hot.allocator.n_free == engine.hot.allocator.capacity
    assert engine.sparse.device.allocator.n_free == engine.sparse.device.capacity
    if then == "abort":
        return
    assert running.request.anchor_tokens == 0  # data that did not arrive is a miss (R5)
    assert engine.cache.admit(running.request).admitted
    again = Running(engine, running.request, running.tokens)
    again.load_back()
    engine.wait()
    again.prefill()
    again.decode(4)
    again.finish()


@BOTH
def test_an_abort_during_a_load_back_gives_the_hot_slots_back_before_the_copy_ends(
    components: dict[str, dict[str, Any]],
) -> None:
    engine = Engine(components)
    engine.cached(PROMPT[:36])
    engine.cache.evict("hisparse", 10_000)
    running = engine.admitted([*PROMPT[:36], 1])
    assert running.load_back()
    running.end(engine.cache.abort)
    assert engine.hot.allocator.n_free == engine.hot.allocator.capacity
    engine.wait()


# --- finding the component and its slots ----------------------------------------------------------


def test_a_cache_without_the_component_finds_no_component() -> None:
    cache = Cache(CacheConfig(components={"full": {}}, page_size=PAGE, device_tokens=40))
    with pytest.raises(ConfigError, match="'hisparse' is not among the cache's: full; name it"):
        SparseComponent.of(cache)
    cache.close()


def test_the_slots_the_cache_took_are_the_only_ones_a_request_writes() -> None:
    engine = Engine(ALONE)
    running = [engine.admitted(tokens, reserve=8) for tokens in (PROMPT, OTHER)]
    booked = [ledger for (ledger,) in engine.cache.private]
    assert [ledger.private for ledger in booked] == [2 * HOT_SLOTS]
    assert booked[0].allocator is engine.hot.allocator
    for each in running:
        assert isinstance(each.buffer, HotBuffer)
        each.prefill()
        each.decode(8)
    used = {slot for each in running for slot in each.hot_slots}
    for plane in engine.hot_planes():
        written = plane.reshape(len(plane) // PAGE, -1).count_nonzero(1).nonzero().flatten()
        assert set(written.tolist()) == used
