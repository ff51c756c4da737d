"""The `hisparse` component as a user gets it: found, given options, built, budgeted."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from kvgraft import (
    HOST_MIRROR,
    Demand,
    DemandQuery,
    Direction,
    Everything,
    Kind,
    PluginError,
    Reach,
    Tier,
    TransferQuery,
)
from kvgraft.admission.decision import default_demand
from kvgraft.packages.dispatch import Mounted, mount, parse_options
from kvgraft.pools import BuildContext, SlotAllocator, plane_nbytes
from kvgraft.pools.component import pair_planes, run_copy
from kvgraft.tree.component import ComponentShape
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.tree import Tree
from kvgraft_hisparse.hot_buffer import HotBuffer
from kvgraft_hisparse.pools import SparseComponent
from tests.installed import expect_no_torch, installed

CONTEXT = BuildContext(
    page_size=16, device="cpu", device_tokens=160, host_tokens=320, pin_host=False
)
DEEPSEEK_V32 = {
    "kind": "mla", "latent_dim": 512, "rope_dim": 64, "index_dim": 132, "index_dtype": "uint8",
}  # fmt: skip
SMALL_HOT = {"hot_tokens": 20, "max_running": 2}


def mounted(options: dict[str, Any], context: BuildContext = CONTEXT) -> Mounted:
    return mount(installed("hisparse"), {**SMALL_HOT, **options}, context)


def built(options: dict[str, Any]) -> SparseComponent:
    component = mounted(options).component
    assert isinstance(component, SparseComponent)
    return component


def test_the_entry_point_is_found_and_declares_a_component_at_home_on_host() -> None:
    plugin = installed("hisparse")
    assert plugin.distribution == "kvgraft-hisparse"
    declaration = plugin.declaration
    assert (declaration.kind, declaration.home) == (Kind.PAGED, Tier.HOST)
    assert declaration.capabilities == {HOST_MIRROR}


def test_finding_it_imports_no_torch() -> None:
    expect_no_torch("hisparse")


def test_its_reach_is_everything_before_the_boundary() -> None:
    assert built({}).reach == Reach(Everything())


@pytest.mark.parametrize(
    ("options", "device", "host"),
    [
        ({}, {"index"}, {"k", "v", "index"}),
        (DEEPSEEK_V32, {"index"}, {"latent", "index"}),
    ],
)
def test_the_device_holds_indexer_keys_alone_and_the_host_everything(
    options: dict[str, Any], device: set[str], host: set[str]
) -> None:
    component = built(options)
    assert component.host is not None
    assert {spec.name for spec in component.device.specs} == device
    assert {spec.name for spec in component.host.specs} == host
    assert set(component.device.specs) <= set(component.host.specs)
    assert [spec.layer for spec in component.host.specs] == sorted(
        spec.layer for spec in component.host.specs
    )


@pytest.mark.parametrize(
    ("options", "index_nbytes", "host_nbytes"),
    [({}, 16, 48), (DEEPSEEK_V32, 2 * 132, 2 * (1152 + 132))],
)
def test_slots_take_one_page_of_the_geometry(
    options: dict[str, Any], index_nbytes: int, host_nbytes: int
) -> None:
    component = built(options)
    assert component.host is not None
    assert component.device.slot_nbytes == 16 * index_nbytes
    assert sum(plane_nbytes(spec) for spec in component.host.specs) == 16 * host_nbytes


def test_a_load_back_moves_the_indexer_keys_and_nothing_else() -> None:
    component = built({})
    host = component.host
    assert host is not None
    noise = torch.Generator().manual_seed(7)
    host.slab[3] = torch.randint(1, 256, host.slab[3].shape, generator=noise).to(torch.uint8)
    copies = pair_planes(component, TransferQuery(Direction.LOAD_BACK, slots(5), slots(3)))
    assert len(copies) == 2  # one plane in each of two layers
    for copy in copies:
        run_copy(copy)
    for layer in (0, 1):
        loaded = component.device.plane(layer, "index")[5]
        assert loaded.view(torch.uint8).count_nonzero() == loaded.nbytes
        assert torch.equal(
            loaded.view(torch.uint8), host.plane(layer, "index")[3].view(torch.uint8)
        )


def test_indexer_keys_survive_the_way_to_the_host_and_back() -> None:
    component = built(DEEPSEEK_V32)
    device, host = component.device, component.host
    assert host is not None
    device.plane(1, "index")[2] = torch.arange(16 * 132).reshape(16, 132).to(torch.uint8)
    partners = {spec[:2]: lanes for spec, lanes in zip(host.specs, host.lanes, strict=True)}
    for spec, lanes in zip(device.specs, device.lanes, strict=True):
        partners[spec[:2]][4] = lanes[2]
    for spec, lanes in zip(device.specs, device.lanes, strict=True):
        lanes[9] = partners[spec[:2]][4]
    assert torch.equal(device.plane(1, "index")[9], device.plane(1, "index")[2])
    assert device.plane(1, "index")[9].count_nonzero() > 0


def test_hot_rows_are_those_of_the_host_without_the_indexer() -> None:
    component = built({"head_dim": 3, "v_head_dim": 5})
    assert [pair.hot.shape for pair in component.hot.layers[0]] == [(96, 1, 3), (96, 1, 5)]
    assert [pair.host.shape for pair in component.hot.layers[0]] == [
        (20, 16, 1, 3), (20, 16, 1, 5),
    ]  # fmt: skip


def test_the_private_pool_fits_exactly_the_hot_buffers_of_max_running_requests() -> None:
    component = built({})
    (private,) = component.private
    assert private.name == "hot"
    assert private.allocator.capacity == 2 * component.hot_slots == 2 * 3
    rows = {pair.hot.shape[0] for pairs in component.hot.layers.values() for pair in pairs}
    assert rows == {private.allocator.capacity * CONTEXT.page_size}


def test_a_decoded_token_is_on_the_host_and_comes_back_when_selected() -> None:
    component = built({})
    host = component.host
    assert host is not None
    pages = host.allocator.allocate(4)
    assert pages is not None
    (private,) = component.private
    hot_slots = private.allocator.allocate(component.hot_slots)
    assert hot_slots is not None
    buffer = HotBuffer(component.hot, hot_slots, component.hot_tokens)
    buffer.add_host_pages(pages)
    keys = torch.arange(60 * 4).reshape(60, 1, 4).to(torch.bfloat16)
    buffer.append(0, 0, [keys, -keys])
    row = buffer.swap_in(0, torch.tensor([[3]]))[0, 0].item()
    hot_keys, hot_values = (pair.hot[int(row)] for pair in component.hot.layers[0])
    assert torch.equal(hot_keys, keys[3])
    assert torch.equal(hot_values, -keys[3])
    buffer.check_integrity()
    buffer.close()


QUERIES = [
    # page_size, computed, chunk, prompt, total, host_slots, checkpoints
    DemandQuery(16, 0, 100, 100, 120, 0, 0),
    DemandQuery(16, 0, 64, 1000, 1000, 0, 0),
    DemandQuery(16, 32, 17, 49, 65, 2, 0),
    DemandQuery(16, 48, 1, 48, 49, 3, 0),
    DemandQuery(16, 64, 0, 64, 64, 0, 0),
]


@pytest.mark.parametrize("query", QUERIES)
def test_the_indexer_rows_are_budgeted_as_the_core_budgets_full_reach(query: DemandQuery) -> None:
    ledger = Ledger("hisparse", Tier.DEVICE, SlotAllocator(8))
    shape = ComponentShape("hisparse", Reach(Everything()))
    (component,) = Tree(16, [shape], {"hisparse": ledger}, {}).components
    budget = mounted({}).budget_contribution
    assert budget is not None
    default = default_demand(component, query)
    assert budget(query) == Demand(default.now, default.later, (3,))


@pytest.mark.parametrize(("hot_tokens", "hot_slots"), [(1, 2), (16, 2), (17, 3), (4096, 257)])
def test_every_request_is_budgeted_the_padded_hot_buffer_and_one_page(
    hot_tokens: int, hot_slots: int
) -> None:
    budget = mounted({"hot_tokens": hot_tokens}).budget_contribution
    assert budget is not None
    extend, decode = budget(QUERIES[1]), budget(QUERIES[3])
    assert extend is not None
    assert decode is not None
    assert extend.private == decode.private == (hot_slots,)


def test_extending_reserves_this_chunk_now_and_the_rest_of_the_request_for_later() -> None:
    budget = mounted({}).budget_contribution
    assert budget is not None
    # 32 computed, 17 more: pages 2 and 3, one of slack, two to load; total of 65 needs 5 pages
    assert budget(QUERIES[2]) == Demand(now=2 + 1 + 2, later=1, private=(3,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hot_tokens": 0}, "component 'hisparse': option hot_tokens=0"),
        ({"max_running": 0}, "component 'hisparse': option max_running=0"),
        ({"index_dim": 0}, "component 'hisparse': option index_dim=0"),
        ({"index_dtype": "int4"}, "component 'hisparse': option index_dtype='int4'"),
        ({"kind": "mla"}, "component 'hisparse': option latent_dim=None"),
        ({"top_k": 4}, "component 'hisparse': no option 'top_k'; options: "),
    ],
)
def test_impossible_options_are_refused_with_the_field_named(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        parse_options(installed("hisparse"), options)


def test_without_a_host_tier_it_is_refused_with_the_field_named() -> None:
    with pytest.raises(PluginError, match="component 'hisparse': host_tokens is 0, but keys"):
        mounted({"host_tokens": 0})


def slots(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
