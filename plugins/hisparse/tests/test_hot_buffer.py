from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Iterable
from random import Random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvgraft.errors import BudgetError, ConfigError, ContractViolation, IntegrityError
from kvgraft.pools import DevicePool, HostMirror, PlaneSpec
from kvgraft_hisparse.hot_buffer import HotBuffer, SwapStatistics
from kvgraft_hisparse.hot_pool import HotPool, hot_rows
from tests.gpu import accelerator

GQA = {"k": (2, 8), "v": (2, 8)}
MLA = {"latent": (1, 24), "rope": (4,)}
DEVICES = ["cpu", pytest.param(accelerator(), marks=pytest.mark.gpu)]


def make_pool(
    *,
    rows: dict[str, tuple[int, ...]] = MLA,
    dtype: torch.dtype = torch.float32,
    layers: Iterable[int] = (0,),
    page_size: int = 4,
    hot_slots: int = 16,
    host_slots: int = 32,
    device: str = "cpu",
) -> tuple[HotPool, DevicePool, HostMirror]:
    specs = [
        PlaneSpec(layer, name, (page_size, *shape), dtype)
        for layer in layers
        for name, shape in rows.items()
    ]
    hot, host = DevicePool(specs, hot_slots, device), HostMirror(specs, host_slots)
    return HotPool(hot, host), hot, host


def slots(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


def taken(hot: DevicePool, hot_tokens: int) -> bytes:
    """The slots of one more request."""
    page_size = hot.specs[0].shape[0]
    given = hot.allocator.allocate(hot_rows(hot_tokens, page_size) // page_size)
    assert given is not None
    return given


def random_rows(pool: HotPool, layer: int, n: int, seed: int) -> list[torch.Tensor]:
    """Rows of arbitrary bits, not-a-numbers included: a copy must keep them all."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for pair in pool.layers[layer]:
        shape = pair.host.shape[2:]
        nbytes = n * shape.numel() * pair.host.element_size()
        bits = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        made.append(bits.view(pair.host.dtype).reshape(n, *shape))
    return made


def bits(row: torch.Tensor) -> bytes:
    return row.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def hot_bits(pool: HotPool, layer: int, row: int) -> list[bytes]:
    return [bits(pair.hot[row]) for pair in pool.layers[layer]]


def host_bits(pool: HotPool, layer: int, slot: int, offset: int) -> list[bytes]:
    return [bits(pair.host[slot, offset]) for pair in pool.layers[layer]]


def select(*tokens: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor([tokens], dtype=torch.int32, device=device)


def decode(pool: HotPool, buffer: HotBuffer, n: int, layer: int = 0) -> dict[int, list[bytes]]:
    """Append `n` tokens one by one; the bytes of each."""
    truth = {}
    for _ in range(n):
        position = buffer.n_tokens(layer)
        rows = random_rows(pool, layer, 1, seed=1000 * layer + position)
        buffer.append(layer, position, rows)
        truth[position] = [bits(row[0]) for row in rows]
    return truth


def served(
    pool: HotPool, buffer: HotBuffer, layer: int, topk: torch.Tensor
) -> dict[int, list[bytes]]:
    rows = buffer.swap_in(layer, topk)
    assert rows.shape == topk.shape
    assert rows.dtype == torch.int32
    pairs = zip(topk.flatten().tolist(), rows.flatten().tolist(), strict=True)
    return {token: hot_bits(pool, layer, row) for token, row in pairs}


# --- the brute-force model -----------------------------------------------------------------------


class Model:
    """The expected rows of one layer of one request, handled one token at a time."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self.truth: list[list[bytes]] = []
        self.row: list[int | None] = [None] * n_rows
        self.used = [0] * n_rows
        self.clock = self.hit = self.moved = 0
        self.outgrown = False

    def _put(self, tokens: list[int], spared: set[int | None]) -> None:
        free = sorted(
            (row for row in range(self.n_rows) if self.row[row] not in spared - {None}),
            key=lambda row: (self.used[row], row),
        )
        self.outgrown |= len(self.truth) > self.n_rows
        short = not self.outgrown
        for token, row in zip(tokens, free, strict=False):
            self.row[token if short else row] = token

    def _use(self, tokens: Iterable[int]) -> None:
        self.clock += 1
        for token in tokens:
            self.used[self.row.index(token)] = self.clock

    def append(self, payloads: list[list[bytes]]) -> None:
        start = len(self.truth)
        self.truth += payloads
        kept = list(range(start, len(self.truth)))[-self.n_rows :]
        self._put(kept, set())
        self._use(kept)

    def truncate(self, n_tokens: int) -> None:
        self.outgrown |= len(self.truth) > self.n_rows
        del self.truth[n_tokens:]
        for row, token in enumerate(self.row):
            if token is not None and token >= n_tokens:
                self.row[row], self.used[row] = None, 0

    def fits(self, selected: set[int]) -> bool:
        newest = {len(self.truth) - 1} & set(self.row)
        return len(selected | newest) <= self.n_rows

    def select(self, selected: set[int]) -> None:
        missing = sorted(selected - set(self.row))
        self._put(missing, {*selected, len(self.truth) - 1})
        self._use(selected)
        self.moved += len(missing)
        self.hit += len(selected) - len(missing)

    def resident(self) -> list[int]:
        return [token for token in self.row if token is not None]


class HotBufferMachine(RuleBasedStateMachine):
    """One request after the other, beside a neighbour in the same pool, against the model."""

    LAYERS = (1, 4)

    @initialize(
        rows=st.sampled_from([GQA, MLA, {"flag": ()}]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        page_size=st.sampled_from([1, 2, 4]),
        hot_tokens=st.integers(1, 9),
    )
    def build(
        self, rows: dict[str, tuple[int, ...]], dtype: torch.dtype, page_size: int, hot_tokens: int
    ) -> None:
        self.hot_tokens, self.seed = hot_tokens, 0
        self.n_rows = hot_rows(hot_tokens, page_size)
        n_slots = 2 * self.n_rows // page_size + 1
        self.pool, self.hot, self.host = make_pool(
            rows=rows, dtype=dtype, layers=self.LAYERS, page_size=page_size,
            hot_slots=n_slots, host_slots=200,
        )  # fmt: skip
        self.hot_slots = self.n_rows // page_size
        self.free = list(range(n_slots))
        self.neighbour = HotBuffer(self.pool, self._take(Random(0)), hot_tokens)
        self.neighbour.add_host_pages(self.host.allocator.allocate(1) or b"")
        self.neighbour_row = {
            layer: self._append(self.neighbour, layer, 1)[0] for layer in self.LAYERS
        }
        self.buffer: HotBuffer | None = None

    def _take(self, order: Random) -> bytes:
        """Any of the free slots, in any order."""
        mine = order.sample(self.free, self.hot_slots)
        self.free = [slot for slot in self.free if slot not in mine]
        self.free_bits = self._free_bits()
        return slots(*mine)

    def _free_bits(self) -> list[bytes]:
        return [bits(plane[self.free]) for plane in self.hot.planes]

    def _append(self, buffer: HotBuffer, layer: int, n: int) -> list[list[bytes]]:
        self.seed += 1
        rows = random_rows(self.pool, layer, n, self.seed)
        buffer.append(layer, buffer.n_tokens(layer), rows)
        return [[bits(plane[i]) for plane in rows] for i in range(n)]

    @precondition(lambda self: self.buffer is None)
    @rule(
        prefix_pages=st.integers(0, 8),
        unfilled=st.integers(0, 3),
        order=st.randoms(use_true_random=False),
    )
    def open(self, prefix_pages: int, unfilled: int, order: Random) -> None:
        self.slots = self._take(order)
        self.buffer = HotBuffer(self.pool, self.slots, self.hot_tokens)
        self.models = {layer: Model(self.n_rows) for layer in self.LAYERS}
        self.pages = array("i", self.host.allocator.allocate(prefix_pages) or b"").tolist()
        self.rows_seen: set[int] = set()
        for layer in self.LAYERS:
            for slot in self.pages:
                self.seed += 1
                page = random_rows(self.pool, layer, self.pool.page_size, self.seed)
                for pair, rows in zip(self.pool.layers[layer], page, strict=True):
                    pair.host[slot] = rows
                self.models[layer].truth += [
                    [bits(plane[i]) for plane in page] for i in range(self.pool.page_size)
                ]
        n_tokens = max(0, prefix_pages * self.pool.page_size - unfilled)
        for model in self.models.values():
            del model.truth[n_tokens:]
        before = [plane.clone() for plane in self.hot.planes]
        self.buffer.adopt_prefix(slots(*self.pages), n_tokens)
        for old, new in zip(before, self.hot.planes, strict=True):
            assert bits(old) == bits(new)  # H5
        assert self.buffer.statistics == SwapStatistics(0, 0)

    @precondition(lambda self: self.buffer is not None and len(self.pages) < 40)
    @rule(layer=st.sampled_from(LAYERS), n=st.sampled_from([1, 1, 1, 2, 5, 20]))
    def append(self, layer: int, n: int) -> None:
        assert self.buffer is not None
        model = self.models[layer]
        need = -(-(len(model.truth) + n) // self.pool.page_size) - len(self.pages)
        if need > 0:
            taken = self.host.allocator.allocate(need) or b""
            self.pages += array("i", taken).tolist()
            self.buffer.add_host_pages(taken)
        model.append(self._append(self.buffer, layer, n))
        newest = len(model.truth) - 1
        assert newest in self.buffer.resident_tokens(layer).tolist()

    @precondition(lambda self: self.buffer is not None)
    @rule(n=st.integers(1, 6))
    def reject(self, n: int) -> None:
        """The last tokens were drafts."""
        assert self.buffer is not None
        n_tokens = max(0, max(len(model.truth) for model in self.models.values()) - n)
        self.buffer.truncate(n_tokens)
        for layer, model in self.models.items():
            model.truncate(n_tokens)
            assert self.buffer.n_tokens(layer) == len(model.truth)

    @precondition(lambda self: self.buffer is not None)
    @rule(layer=st.sampled_from(LAYERS), n_queries=st.integers(1, 3), data=st.data())
    def select_anything(self, layer: int, n_queries: int, data: st.DataObject) -> None:
        positions = st.integers(-1, len(self.models[layer].truth) - 1)
        k = data.draw(st.integers(0, 2 * self.n_rows), label="k")
        chosen = data.draw(
            st.lists(positions, min_size=n_queries * k, max_size=n_queries * k), label="topk"
        )
        self._select(layer, chosen, n_queries)

    @precondition(lambda self: self.buffer is not None)
    @rule(layer=st.sampled_from(LAYERS), start=st.floats(0, 1), slack=st.integers(-1, 3))
    def sweep(self, layer: int, start: float, slack: int) -> None:
        """As many neighbours as the buffer has rows, some fewer or one more."""
        n_tokens = len(self.models[layer].truth)
        first = int(start * n_tokens)
        self._select(layer, list(range(first, n_tokens))[: max(0, self.n_rows - slack)], 1)

    def _select(self, layer: int, chosen: list[int], n_queries: int) -> None:
        assert self.buffer is not None
        model = self.models[layer]
        topk = torch.tensor(chosen, dtype=torch.int32).reshape(n_queries, -1 if chosen else 0)
        selected = set(chosen) - {-1}
        moved_before = self.buffer.statistics.rows_moved
        if not model.fits(selected):
            with pytest.raises(BudgetError, match=f"> {self.n_rows} hot rows"):
                self.buffer.swap_in(layer, topk)
            assert self.buffer.statistics.rows_moved == moved_before
            return
        short = len(model.truth) <= self.n_rows
        resident = selected <= set(model.row)
        rows = self.buffer.swap_in(layer, topk).flatten().tolist()
        model.select(selected)
        for token, row in zip(chosen, rows, strict=True):
            if token == -1:
                assert row == -1
            else:
                assert hot_bits(self.pool, layer, row) == model.truth[token]  # H3
                self.rows_seen.add(row)
        if short and resident:
            assert self.buffer.statistics.rows_moved == moved_before  # H6

    @precondition(lambda self: self.buffer is not None)
    @rule()
    def close(self) -> None:
        assert self.buffer is not None
        mine = array("i", self.slots)
        assert {row // self.pool.page_size for row in self.rows_seen} <= set(mine)  # H8
        self.buffer.close()
        with pytest.raises(ContractViolation, match="H8"):
            self.buffer.close()
        self.host.allocator.free(slots(*self.pages))
        self.buffer = None
        self.free += mine
        self.free_bits = self._free_bits()

    @invariant()
    def rows_of_nobody_are_left_alone(self) -> None:
        if hasattr(self, "free_bits"):
            assert self._free_bits() == self.free_bits

    @invariant()
    def the_buffer_equals_the_model(self) -> None:
        if getattr(self, "buffer", None) is None:
            return
        assert self.buffer is not None
        self.buffer.check_integrity()
        for layer, model in self.models.items():
            assert self.buffer.resident_tokens(layer).tolist() == model.resident()
            for token, truth in enumerate(model.truth):
                page, offset = divmod(token, self.pool.page_size)
                assert host_bits(self.pool, layer, self.pages[page], offset) == truth  # H1
        assert self.buffer.statistics == SwapStatistics(
            sum(model.hit for model in self.models.values()),
            sum(model.moved for model in self.models.values()),
        )
        assert self.buffer.host_slots == slots(*self.pages)
        assert self.buffer.n_host_pages == len(self.pages)

    @invariant()
    def the_neighbour_keeps_its_rows(self) -> None:
        if not hasattr(self, "neighbour"):
            return
        for layer, truth in self.neighbour_row.items():
            row = int(self.neighbour.swap_in(layer, select(0))[0, 0])
            assert hot_bits(self.pool, layer, row) == truth


TestHotBufferAgainstModel = HotBufferMachine.TestCase
TestHotBufferAgainstModel.settings = settings(
    deadline=None, max_examples=40, stateful_step_count=30
)


# --- attention through the buffer -----------------------------------------------------------------


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Plain attention of `[heads, dim]` over `[k, heads, dim]`; the same code for both sources."""
    scores = torch.einsum("hd,khd->hk", query, keys) / keys.shape[-1] ** 0.5
    return torch.einsum("hk,khd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [GQA, {"latent": (1, 24)}], ids=["gqa", "mla"])
def test_sparse_attention_through_the_hot_buffer_equals_attention_over_the_host_copy(
    rows: dict[str, tuple[int, ...]], dtype: torch.dtype, device: str
) -> None:
    layers, page_size, k, prefix_pages = (0, 1, 2), 4, 8, 6
    pool, hot, host = make_pool(rows=rows, dtype=dtype, layers=layers, device=device)
    generator = torch.Generator().manual_seed(7)
    for layer in layers:
        for pair in pool.layers[layer]:
            pair.host.copy_(torch.randn(pair.host.shape, generator=generator))
    pages = array("i", host.allocator.allocate(prefix_pages + 8) or b"").tolist()
    buffer = HotBuffer(pool, taken(hot, 10), 10)
    buffer.adopt_prefix(slots(*pages[:prefix_pages]))
    buffer.add_host_pages(slots(*pages[prefix_pages:]))

    for position in range(prefix_pages * page_size, (prefix_pages + 8) * page_size):
        for layer in layers:
            new = [
                torch.randn((1, *shape), generator=generator).to(dtype).to(device)
                for shape in rows.values()
            ]
            buffer.append(layer, position, new)
            scores = torch.rand(position + 1, generator=generator)
            topk = scores.topk(k).indices.to(torch.int32)[None]
            held = buffer.swap_in(layer, topk.to(device))[0].long()
            through = [pair.hot[held] for pair in pool.layers[layer]]
            straight = [
                torch.stack([pair.host[pages[t // page_size], t % page_size] for t in topk[0]])
                for pair in pool.layers[layer]
            ]
            query = torch.randn(straight[0].shape[1:], generator=generator).to(dtype).to(device)
            got = attend(query, through[0], through[-1])
            want = attend(query, straight[0].to(device), straight[-1].to(device))
            assert bits(got) == bits(want)
    statistics = buffer.statistics
    assert statistics.rows_hit + statistics.rows_moved == 8 * page_size * len(layers) * k
    assert 0 < statistics.rows_moved < statistics.rows_hit + statistics.rows_moved


# --- the rules, one by one ------------------------------------------------------------------------


def open_buffer(
    pool: HotPool, hot: DevicePool, host: HostMirror, hot_tokens: int, n_pages: int
) -> HotBuffer:
    buffer = HotBuffer(pool, taken(hot, hot_tokens), hot_tokens)
    buffer.add_host_pages(host.allocator.allocate(n_pages) or b"")
    return buffer


@pytest.mark.rule("H1")
def test_a_decoded_token_is_on_the_host_before_its_hot_row_is_reused() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=5)
    truth = decode(pool, buffer, 20)
    evicted = set(range(20)) - set(buffer.resident_tokens(0).tolist())
    assert len(evicted) == 12
    table = array("i", buffer.host_slots)
    for token in evicted:
        assert host_bits(pool, 0, table[token // 4], token % 4) == truth[token]
        assert served(pool, buffer, 0, select(token)) == {token: truth[token]}


def test_an_append_without_a_host_page_is_refused_and_changes_nothing() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=2)
    decode(pool, buffer, 8)
    before = [bits(plane) for plane in hot.planes], bits(host.slab)
    with pytest.raises(BudgetError, match=r"layer 0: 9 tokens need 3 host pages.*has 2"):
        buffer.append(0, 8, random_rows(pool, 0, 1, seed=99))
    assert ([bits(plane) for plane in hot.planes], bits(host.slab)) == before
    assert buffer.n_tokens(0) == 8
    assert buffer.resident_tokens(0).tolist() == list(range(8))


def test_rows_of_rejected_drafts_are_the_first_to_be_used_again() -> None:
    """G2: nothing that was resident before them makes room for the next tokens."""
    pool, hot, host = make_pool(page_size=1)
    buffer = HotBuffer(pool, taken(hot, 3), 3)
    buffer.add_host_pages(host.allocator.allocate(8) or b"")
    truth = decode(pool, buffer, 4)
    assert buffer.n_rows == 4
    served(pool, buffer, 0, select(0, 1))
    decode(pool, buffer, 2)  # drafts, in the rows of tokens 2 and 3
    buffer.truncate(4)
    assert buffer.resident_tokens(0).tolist() == [0, 1]
    truth |= decode(pool, buffer, 2)
    assert sorted(buffer.resident_tokens(0).tolist()) == [0, 1, 4, 5]
    buffer.truncate(3)  # fits the rows again, and token 0 is not in row 0 below
    served(pool, buffer, 0, select(2))
    decode(pool, buffer, 3)
    served(pool, buffer, 0, select(0))
    buffer.truncate(3)
    for token in (1, 2, 0):
        assert served(pool, buffer, 0, select(token)) == {token: truth[token]}
        buffer.check_integrity()


@pytest.mark.rule("H2")
def test_the_newest_token_survives_selections_that_replace_every_other_row() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=6)
    truth = decode(pool, buffer, 24)
    n_rows = buffer.n_rows
    row = int(buffer.swap_in(0, select(23))[0, 0])
    for start in (0, 7, 14):
        selection = range(start, start + n_rows - 1)
        assert served(pool, buffer, 0, select(*selection)) == {t: truth[t] for t in selection}
        assert hot_bits(pool, 0, row) == truth[23]
    moved = buffer.statistics.rows_moved
    assert int(buffer.swap_in(0, select(23))[0, 0]) == row
    assert buffer.statistics.rows_moved == moved


def test_the_previous_newest_token_can_be_evicted_once_another_is_appended() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=6)
    decode(pool, buffer, 21)
    buffer.swap_in(0, select(*range(7)))
    assert 20 in buffer.resident_tokens(0).tolist()
    decode(pool, buffer, 1)
    buffer.swap_in(0, select(*range(7)))
    assert set(buffer.resident_tokens(0).tolist()) == {*range(7), 21}


def test_a_selection_that_fills_the_buffer_is_served_and_one_token_more_is_refused() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=6)
    truth = decode(pool, buffer, 24)
    full = [*range(7), 23]
    assert served(pool, buffer, 0, select(*full)) == {t: truth[t] for t in full}
    before = [bits(plane) for plane in hot.planes]
    with pytest.raises(BudgetError, match=r"layer 0: 8 selected tokens \+ 1 newest > 8 hot rows"):
        buffer.swap_in(0, select(*range(8)))
    with pytest.raises(BudgetError, match=r"layer 0: 9 selected tokens \+ 0 newest > 8 hot rows"):
        buffer.swap_in(0, select(*range(15, 24)))
    assert [bits(plane) for plane in hot.planes] == before
    assert sorted(buffer.resident_tokens(0).tolist()) == full


def test_the_least_recently_selected_rows_make_room_first() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=4)
    decode(pool, buffer, 16)
    assert sorted(buffer.resident_tokens(0).tolist()) == list(range(8, 16))
    buffer.swap_in(0, select(8, 10))
    buffer.swap_in(0, select(0, 1))
    assert sorted(buffer.resident_tokens(0).tolist()) == [0, 1, 8, 10, 12, 13, 14, 15]


def test_a_selection_never_evicts_its_own_rows() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=4)
    truth = decode(pool, buffer, 16)
    oldest = [8, 9, 10]
    selection = [*oldest, 0, 1, 2, 3]
    assert served(pool, buffer, 0, select(*selection)) == {t: truth[t] for t in selection}
    assert buffer.statistics == SwapStatistics(rows_hit=3, rows_moved=4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_tokens", [3, 20])
def test_padding_stays_padding(n_tokens: int, device: str) -> None:
    pool, hot, host = make_pool(device=device)
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=5)
    decode(pool, buffer, n_tokens)
    nothing = torch.full((2, 5), -1, dtype=torch.int32, device=device)
    assert torch.equal(buffer.swap_in(0, nothing), nothing)
    assert buffer.swap_in(0, nothing[:, :0]).shape == (2, 0)
    assert buffer.statistics == SwapStatistics(0, 0)
    mixed = buffer.swap_in(0, select(-1, 0, -1, 1, -1, device=device))
    assert (mixed[0] < 0).tolist() == [True, False, True, False, True]
    buffer.check_integrity()


def test_an_empty_sequence_serves_a_selection_of_padding() -> None:
    pool, hot, _ = make_pool()
    buffer = HotBuffer(pool, taken(hot, 4), 4)
    assert buffer.swap_in(0, select(-1, -1)).tolist() == [[-1, -1]]


def test_k_larger_than_the_sequence_serves_every_token() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=1)
    truth = decode(pool, buffer, 3)
    padded = select(0, 1, 2, *[-1] * 61)
    rows = buffer.swap_in(0, padded)
    assert rows[0, 3:].tolist() == [-1] * 61
    assert [hot_bits(pool, 0, int(row)) for row in rows[0, :3]] == list(truth.values())


def test_a_token_selected_by_many_queries_moves_once() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=5)
    truth = decode(pool, buffer, 20)
    topk = torch.tensor([[0, 0, 1], [1, 0, 19], [-1, 1, 1]], dtype=torch.int64)
    rows = buffer.swap_in(0, topk)
    assert rows.shape == (3, 3)
    assert buffer.statistics == SwapStatistics(rows_hit=1, rows_moved=2)
    for token, row in zip(topk.flatten().tolist(), rows.flatten().tolist(), strict=True):
        assert row == -1 if token == -1 else hot_bits(pool, 0, row) == truth[token]


def test_layers_arrange_their_own_tokens_in_the_same_slots() -> None:
    pool, hot, host = make_pool(layers=(3, 7), hot_slots=3)
    buffer = open_buffer(pool, hot, host, hot_tokens=5, n_pages=5)
    truth = {layer: decode(pool, buffer, 20, layer) for layer in (3, 7)}
    selections = {3: [0, 1, 2, 3], 7: [4, 5, 6]}
    rows = {layer: buffer.swap_in(layer, select(*tokens)) for layer, tokens in selections.items()}
    for layer, tokens in selections.items():
        for token, row in zip(tokens, rows[layer][0].tolist(), strict=True):
            assert hot_bits(pool, layer, row) == truth[layer][token]
    assert hot.allocator.n_free == 0
    with pytest.raises(ConfigError, match="no layer 0 in the hot pool"):
        buffer.swap_in(0, select(0))


def test_a_position_outside_the_sequence_is_refused_by_name() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=5)
    decode(pool, buffer, 6)
    for token in (6, 7, 5000):
        with pytest.raises(ContractViolation, match=rf"H3.*token {token} selected from.* of 6"):
            buffer.swap_in(0, select(0, token))


def test_a_prefix_hit_moves_no_row_and_later_selections_move_only_selected_rows() -> None:
    pool, hot, host = make_pool(layers=(0, 1))
    host.slab.copy_(torch.randint(0, 256, host.slab.shape, dtype=torch.uint8))
    before = [bits(plane) for plane in hot.planes]
    pages = array("i", host.allocator.allocate(10) or b"")
    buffer = HotBuffer(pool, taken(hot, 8), 8)
    buffer.adopt_prefix(pages.tobytes())
    assert buffer.statistics == SwapStatistics(0, 0)
    assert [bits(plane) for plane in hot.planes] == before
    got = served(pool, buffer, 1, select(0, 17, 39))
    assert got == {t: host_bits(pool, 1, pages[t // 4], t % 4) for t in (0, 17, 39)}
    assert buffer.statistics == SwapStatistics(rows_hit=0, rows_moved=3)


def test_a_prefix_may_end_inside_a_page_and_goes_on_there() -> None:
    pool, hot, host = make_pool()
    host.slab.copy_(torch.randint(0, 256, host.slab.shape, dtype=torch.uint8))
    pages = array("i", host.allocator.allocate(4) or b"")
    buffer = HotBuffer(pool, taken(hot, 8), 8)
    buffer.adopt_prefix(pages.tobytes(), 10)
    assert buffer.n_tokens(0) == 10
    with pytest.raises(ContractViolation, match=r"H3.*token 10 selected from a sequence of 10"):
        buffer.swap_in(0, select(10))
    truth = decode(pool, buffer, 3)
    assert served(pool, buffer, 0, select(11, 9)) == {
        11: truth[11],
        9: host_bits(pool, 0, pages[2], 1),
    }


def test_a_prefix_longer_than_its_host_pages_is_refused_and_not_adopted() -> None:
    pool, hot, host = make_pool()
    buffer = HotBuffer(pool, taken(hot, 8), 8)
    with pytest.raises(BudgetError, match="prefix of 9 tokens needs 3 host pages, 2 given"):
        buffer.adopt_prefix(host.allocator.allocate(2) or b"", 9)
    assert (buffer.n_tokens(0), buffer.host_slots) == (0, b"")


def test_a_prefix_is_adopted_by_a_new_sequence_only() -> None:
    pool, hot, host = make_pool()
    buffer = HotBuffer(pool, taken(hot, 8), 8)
    buffer.adopt_prefix(b"")
    buffer.adopt_prefix(host.allocator.allocate(2) or b"")
    with pytest.raises(ContractViolation, match=r"H5.*sequence of 2 pages"):
        buffer.adopt_prefix(host.allocator.allocate(1) or b"")


@pytest.mark.rule("H6")
def test_a_sequence_that_fits_reads_nothing_from_the_host_once_it_is_resident() -> None:
    pool, hot, host = make_pool()
    prefix = host.allocator.allocate(2) or b""
    host.slab.copy_(torch.randint(0, 256, host.slab.shape, dtype=torch.uint8))
    buffer = HotBuffer(pool, taken(hot, 12), 12)
    buffer.adopt_prefix(prefix)
    buffer.add_host_pages(host.allocator.allocate(2) or b"")
    truth = served(pool, buffer, 0, select(*range(8)))
    truth |= decode(pool, buffer, buffer.n_rows - 8)
    assert buffer.n_tokens(0) == buffer.n_rows == 16
    assert buffer.statistics == SwapStatistics(rows_hit=0, rows_moved=8)

    host.slab.fill_(0)
    for selection in (range(16), range(3, 9), [15, 0, 7]):
        assert served(pool, buffer, 0, select(*selection)) == {t: truth[t] for t in selection}
    assert buffer.statistics.rows_moved == 8


def test_a_decoded_sequence_that_fits_never_moves_a_row_from_the_host() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=12, n_pages=4)
    for _ in range(buffer.n_rows):
        decode(pool, buffer, 1)
        buffer.swap_in(0, select(*range(buffer.n_tokens(0))))
    assert buffer.statistics == SwapStatistics(rows_hit=16 * 17 // 2, rows_moved=0)


def test_more_tokens_at_once_than_rows_leaves_the_last_ones_resident() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=8)
    rows = random_rows(pool, 0, 30, seed=5)
    buffer.append(0, 0, rows)
    assert sorted(buffer.resident_tokens(0).tolist()) == list(range(22, 30))
    got = served(pool, buffer, 0, select(0, 21, 29))
    assert got == {t: [bits(plane[t]) for plane in rows] for t in (0, 21, 29)}


def test_pages_shared_by_a_checkpoint_are_read_from_their_new_slots() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=5)
    truth = decode(pool, buffer, 20)
    old = array("i", buffer.host_slots)
    shared = array("i", host.allocator.allocate(2) or b"")
    for pair in pool.layers[0]:
        for new, mine in zip(shared, old[:2], strict=True):
            pair.host[new] = pair.host[mine]
            pair.host[mine] = 0
    buffer.replace_host_pages(0, shared.tobytes())
    assert served(pool, buffer, 0, select(1, 6, 8)) == {t: truth[t] for t in (1, 6, 8)}
    assert buffer.host_slots == slots(*shared, *old[2:])
    with pytest.raises(ContractViolation, match=r"H4.*pages 4\.\.6 of a sequence of 5 pages"):
        buffer.replace_host_pages(4, slots(1, 2))


@pytest.mark.parametrize(
    ("hot_tokens", "page_size", "rows"), [(1, 1, 2), (1, 64, 128), (64, 64, 128), (65, 64, 192)]
)
def test_the_budget_is_the_padded_buffer_and_one_page(
    hot_tokens: int, page_size: int, rows: int
) -> None:
    assert hot_rows(hot_tokens, page_size) == rows
    pool, hot, _ = make_pool(page_size=page_size, hot_slots=8)
    buffer = HotBuffer(pool, taken(hot, hot_tokens), hot_tokens)
    assert buffer.n_rows == rows


@pytest.mark.parametrize(("hot_tokens", "page_size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_budget_of_no_tokens_is_refused(hot_tokens: int, page_size: int) -> None:
    with pytest.raises(ConfigError, match=f"hot_tokens {hot_tokens} and page_size {page_size}"):
        hot_rows(hot_tokens, page_size)


@pytest.mark.parametrize("numbers", [(), (5,), (5, 6), (5, 6, 7, 8)])
def test_slots_that_are_not_one_buffer_are_refused(numbers: tuple[int, ...]) -> None:
    pool, _, _ = make_pool()
    with pytest.raises(BudgetError, match=rf"{len(numbers)} slots given, 12 hot rows take 3;"):
        HotBuffer(pool, slots(*numbers), 8)


def test_every_layer_keeps_to_the_slots_it_was_given() -> None:
    pool, hot, host = make_pool(layers=(0, 1, 2), hot_slots=9)
    mine = (7, 0, 4)
    buffer = HotBuffer(pool, slots(*mine), 8)
    buffer.add_host_pages(host.allocator.allocate(10) or b"")
    for layer in range(3):
        truth = decode(pool, buffer, 40, layer)
        used = buffer.swap_in(layer, select(*range(11)))
        assert {row // 4 for row in used[0].tolist()} == set(mine)
        assert served(pool, buffer, layer, select(2, 30)) == {t: truth[t] for t in (2, 30)}
    others = [slot for slot in range(9) if slot not in mine]
    for plane in hot.planes:
        assert not plane[others].count_nonzero()
        assert all(plane[slot].count_nonzero() for slot in mine)


def test_closing_frees_nothing_and_happens_once() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=5)
    free = hot.allocator.free_slots()
    buffer.close()
    with pytest.raises(ContractViolation, match=r"H8.*close on a closed hot buffer of 8 rows"):
        buffer.close()
    assert hot.allocator.free_slots() == free


def test_a_closed_buffer_serves_nothing() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=2)
    buffer.close()
    for use in (
        lambda: buffer.swap_in(0, select(-1)),
        lambda: buffer.append(0, 0, random_rows(pool, 0, 1, seed=0)),
        lambda: buffer.adopt_prefix(b""),
        lambda: buffer.add_host_pages(b""),
        lambda: buffer.replace_host_pages(0, b""),
    ):
        with pytest.raises(ContractViolation, match="on a closed hot buffer"):
            use()


def test_an_append_out_of_order_is_refused() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=2)
    decode(pool, buffer, 3)
    for position in (2, 4):
        with pytest.raises(ContractViolation, match=f"position {position} of a sequence of 3"):
            buffer.append(0, position, random_rows(pool, 0, 1, seed=0))


def test_rows_that_do_not_fit_the_planes_are_refused_before_anything_is_written() -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=2)
    latent, rope = random_rows(pool, 0, 1, seed=3)
    before = bits(host.slab)
    for rows in (
        [latent],
        [latent, rope.to(torch.bfloat16)],
        [latent, rope[:, :1]],
        [latent, torch.cat([rope, rope])],
        [latent[:0], rope[:0]],
    ):
        with pytest.raises(ConfigError, match=r"layer 0: append of \[.*to planes \[\(n, 1, 24\)"):
            buffer.append(0, 0, rows)
    assert bits(host.slab) == before
    assert buffer.n_tokens(0) == 0


def test_a_pool_over_other_planes_than_the_host_has_is_refused() -> None:
    good = [PlaneSpec(0, "k", (4, 8), torch.float32)]
    for specs, message in (
        ([], "no planes"),
        ([PlaneSpec(0, "v", (4, 8), torch.float32)], "'v'.*is not on the host"),
        ([PlaneSpec(0, "k", (4, 8), torch.bfloat16)], "bfloat16 is not on the host"),
    ):
        with pytest.raises(ConfigError, match=message):
            HotPool(DevicePool(specs, 4), HostMirror(good, 4))
    mixed = [*good, PlaneSpec(1, "k", (8, 8), torch.float32)]
    with pytest.raises(ConfigError, match="8 tokens per slot, others 4"):
        HotPool(DevicePool(mixed, 4), HostMirror(mixed, 4))


def test_the_integrity_check_finds_a_hot_row_that_somebody_overwrote() -> None:
    pool, hot, host = make_pool(layers=(0, 1))
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=5)
    decode(pool, buffer, 20, layer=1)
    buffer.check_integrity()
    row = int(buffer.swap_in(1, select(2))[0, 0])
    pool.layers[1][1].hot[row].view(torch.uint8)[0] ^= 1
    with pytest.raises(IntegrityError, match="layer 1 plane 1: the hot row of token 2 differs"):
        buffer.check_integrity()


@pytest.mark.parametrize(
    ("table", "index", "value", "message"),
    [
        ("row_of", 0, 3, "9 tokens mapped to rows, 8 rows mapped to tokens"),
        ("row_of", -1, 3, "9 tokens mapped to rows, 8 rows mapped to tokens"),
        ("token_at", 2, 17, "not each other's inverse"),
        ("token_at", -1, 5, "padding's row holds token 5, not -1"),
        ("n_tokens", None, 19, "token 19 resident in a sequence of 19"),
    ],
)
def test_the_integrity_check_finds_a_damaged_map(
    table: str, index: int | None, value: int, message: str
) -> None:
    pool, hot, host = make_pool()
    buffer = open_buffer(pool, hot, host, hot_tokens=4, n_pages=5)
    decode(pool, buffer, 20)
    row_map = buffer._maps[0]
    if index is None:
        setattr(row_map, table, value)
    else:
        getattr(row_map, table)[index] = value
    with pytest.raises(IntegrityError, match=f"layer 0: .*{message}"):
        buffer.check_integrity()


def test_sizes_can_be_computed_without_importing_torch() -> None:
    program = (
        "import sys, kvgraft_hisparse.hot_pool as h; h.hot_rows(8, 4); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
