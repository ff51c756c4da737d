"""Scenes found by long runs in which the cache was right: the machine must not call them wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvgraft import Everything, Reach, Trailing
from kvgraft.config import LoadModel, WritePolicy
from kvgraft.packages.registry import load_plugin
from kvgraft.types import Tier
from kvgraft_testing.machine import BY_TERM, references, setup_for
from kvgraft_testing.machine.machine import machine_for
from kvgraft_testing.machine.setups import TENANTS

from ..mutants.packages import paged
from .setups import BROAD, LEAN, LOCAL, SETUPS, with_tenants

LOAD = LoadModel(bandwidth_bytes_s=25e9, latency_s=1e-4, prefill_tokens_s=20_000)


def test_a_page_that_comes_to_a_pinned_node_is_given_back_when_it_falls_behind_later() -> None:
    """Another request pins the window's page on HOST; the one that computed it needs it longer."""
    state = machine_for(SETUPS["full+swa+mamba"])()
    state.open(
        policy=WritePolicy.WRITE_THROUGH_SELECTIVE,
        page_size=2,
        device=16,
        host=9,
        load=LOAD,
        cut_tokens=0,
    )
    state.begin(
        stem=(),
        length=0,
        tail=(2, 1, 2, 10, 10),
        namespace=None,
        along=0,
        reserve=0,
        chunk=None,
    )
    state.admit(index=0)
    state.load_back(index=0)
    state.prefill(index=0, limit=None, whole=True)
    state.finish(index=0)
    state.go_on(along=1, chunk=2, index=0, reserve=4, tail=(2,))
    state.load_back(index=0)
    state.step_all()
    state.prefill(index=0, limit=6, whole=False)
    for _ in range(4):
        state.decode(index=0, tokens=[1])
    other = (1, 1, 2, 1, 2, 1, 1, 1, 2, 2, 1, 2, 2, 1, 1, 2, 1)
    state.begin_marked(along=3, chunk=1, length=17, mark=1, stem=other)
    state.go_on(along=3, chunk=9, index=0, reserve=0, tail=())
    state.finish(index=1)
    fork = (2, 1, 2, 2, 1, 1, 2, 1, 1, 1, 2, 1)
    state.begin_marked(along=3, chunk=2, length=12, mark=9, stem=fork)
    state.teardown()


def test_data_that_goes_to_the_tree_and_on_to_host_in_one_call_was_used_then() -> None:
    """A decoding request leaves a page behind, and its place is taken at once."""
    state = machine_for(SETUPS["sinks"])()
    state.open(
        policy=WritePolicy.WRITE_BACK, page_size=1, device=9, host=9, load=None, cut_tokens=0
    )
    state.serve(chunk=None, length=0, on=False, output=(), stem=(), tail=())
    common = (1, 1, 2, 1, 2, 1)
    state.begin(
        stem=(*common, 1),
        length=7,
        tail=(1, 2),
        chunk=None,
        namespace=None,
        reserve=2,
        along=0,
    )
    state.admit(index=0)
    state.load_back(index=0)
    state.prefill(index=0, limit=None, whole=True)
    state.decode(index=0, tokens=[1, 2, 2, 1])
    state.finish(index=0)
    state.begin(stem=common, length=6, tail=(), chunk=None, namespace=None, reserve=0, along=3)
    state.teardown()


def test_pages_given_back_for_want_of_room_are_no_sign_that_the_grid_was_met() -> None:
    """The boundary for repetitions lies on the grid; nothing is published at it yet."""
    state = machine_for(SETUPS["broad+near+far"])()
    state.open(
        policy=WritePolicy.WRITE_THROUGH, page_size=1, device=16, host=9, load=None, cut_tokens=0
    )
    state.begin_marked(along=1, chunk=None, length=4, mark=0, stem=(1, 1, 1, 1))
    state.load_back(index=0)
    state.prefill(index=0, limit=None, whole=False)
    state.begin(
        stem=(1, 1, 2, 1, 2),
        length=5,
        tail=(1, 2),
        chunk=None,
        namespace=None,
        reserve=4,
        along=1,
    )
    state.quiesce(finish=True, polls=False, index=0)
    state.finish(index=0)
    state.evict(index=7, n_slots=1, tier=Tier.DEVICE)
    state.begin(
        stem=(1, 1, 2, 1, 2, 1, 1, 1, 2, 2),
        length=10,
        tail=(2, 1, 2),
        chunk=None,
        namespace=None,
        reserve=1,
        along=3,
    )
    state.teardown()


def test_data_in_the_tree_behind_the_last_boundary_may_count_as_used_when_its_request_ends() -> (
    None
):
    """Full attention's pages are shared as a request runs; its states end before them."""
    state = machine_for(SETUPS["broad+local+lean"])()

    def begin(tail: tuple[int, ...], namespace: object, reserve: int, chunk: int | None) -> None:
        state.begin(
            stem=(),
            length=0,
            tail=tail,
            namespace=namespace,
            along=0,
            reserve=reserve,
            chunk=chunk,
        )

    ones = (1, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1, 2, 2, 2, 1, 1, 2, 1, 2, 1, 1, 2, 2, 1)
    twos = (2, 1, 2, 2, 1, 1, 2, 1, 1, 1, 2, 1, 2, 2, 2, 1, 1, 2, 1, 2, 2, 1, 1, 1)
    state.open(
        device=16,
        host=14,
        policy=WritePolicy.WRITE_THROUGH_SELECTIVE,
        load=LOAD,
        page_size=2,
        cut_tokens=0,
    )
    begin((1, 10, 10, 10, 10, 10, 10), None, 0, None)
    begin((1, 10, 10, 10, 10, 10, 10), None, 0, None)
    state.admit(index=0)
    state.load_back(index=0)
    state.prefill(index=0, limit=None, whole=True)
    state.admit(index=0)
    state.load_back(index=0)
    state.prefill(index=0, limit=None, whole=True)
    state.finish(index=1)
    begin((12, 1, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1, 2, 2, 2, 1), None, 0, 2)
    state.admit(index=0)
    state.load_back(index=0)
    state.prefill(index=0, limit=16, whole=False)
    state.begin(stem=(), length=0, tail=(1,), namespace="the rest", along=0, reserve=1, chunk=None)
    state.admit(index=0)
    state.abort(index=2)
    state.begin(stem=(), length=0, tail=(1,), namespace="the rest", along=0, reserve=0, chunk=None)
    state.admit(index=0)
    state.abort(index=2)
    state.arrive_twice(length=8, own=2, stem=ones)
    state.begin(along=2, chunk=6, length=18, namespace="tenant", reserve=1, stem=twos, tail=(2,))
    state.abort(index=0)
    state.begin_marked(along=0, chunk=2, length=12, mark=4, stem=ones)
    state.serve(chunk=4, length=22, on=True, output=(1,), stem=ones, tail=(1,))
    state.squeeze_in(index=1, reserve=15, stem=twos)
    state.abort(index=1)
    state.admit(index=0)
    state.load_back(index=0)
    state.prefill(index=0, limit=9, whole=True)
    state.serve(
        chunk=9,
        length=9,
        on=True,
        output=(2, 2, 2, 1),
        stem=(1, 1, 2, 1, 2, 1, 1, 1, 2, 2, 1, 2, 2, 1, 1, 2, 1, 1, 2, 2, 1, 1, 2, 2),
        tail=(),
    )
    state.finish(index=0)
    state.begin(stem=twos, length=9, tail=(1,), chunk=6, namespace=None, reserve=0, along=3)
    state.teardown()


def test_a_state_that_one_call_shares_and_evicts_with_its_window_is_gone() -> None:
    """Room for a window is made on the node that the state came to; no point is broken."""
    state = machine_for(SETUPS["full+swa+mamba"])()
    state.open(
        policy=WritePolicy.WRITE_THROUGH,
        page_size=4,
        device=9,
        host=14,
        load=None,
        cut_tokens=0,
    )
    stem = (1, 1, 2, 1, 2, 1, 1, 1, 2, 2, 1)
    state.serve(chunk=None, length=11, on=False, output=(1, 1), stem=stem, tail=(2, 1, 2, 1))
    state.clear_before_admission(alone=False, index=0)
    other = (*stem, 2, 2, 1, 1, 2, 1, 1, 2, 2)
    state.begin(stem=other, length=20, tail=(), chunk=1, namespace=None, reserve=1, along=1)
    state.quiesce(finish=False, polls=False, index=1)
    state.load_back(index=0)
    state.prefill(index=0, limit=None, whole=True)
    state.checkpoint(index=0)
    state.abort(index=0)
    state.serve(chunk=9, length=0, on=True, output=(2, 1, 2, 1), stem=(), tail=(1, 1, 1, 2))
    state.teardown()


def test_a_left_behind_state_need_not_be_kept_where_another_tenant_gives_first() -> None:
    """The tenant that borrowed most left no state behind, so one that was used would go for it."""
    state = machine_for(with_tenants(BROAD, LOCAL, LEAN))()
    state.open(
        policy=WritePolicy.WRITE_THROUGH,
        page_size=4,
        device=12,
        host=9,
        load=None,
        cut_tokens=0,
    )
    stem = (1, 1, 1, 1, 2, 2, 1, 2)
    state.serve(chunk=2, length=8, on=False, output=(1, 2), stem=stem, tail=(1, 2))
    other = (2, 1, 2, 2, 1, 1, 2, 1, 1, 1, 2, 1, 2, 2, 2, 1, 1, 2)
    state.begin(
        stem=other,
        length=18,
        tail=(1, 1, 1),
        chunk=3,
        namespace="tenant",
        reserve=0,
        along=3,
        max_deferrals=0,
    )
    state.teardown()


def test_a_page_evicted_before_its_namespace_was_cleared_is_not_missed_afterwards() -> None:
    """The request goes on in the cleared tree; a page that it left behind there is gone."""
    state = machine_for(SETUPS["full+swa"])()
    state.open(
        policy=WritePolicy.WRITE_THROUGH, page_size=1, device=16, host=20, load=None, cut_tokens=0
    )
    state.begin(
        stem=(10, 1, 1, 1, 1, 2, 2),
        length=7,
        tail=(),
        chunk=2,
        namespace=None,
        reserve=0,
        along=0,
    )
    state.admit(index=0)
    state.load_back(index=0)
    state.prefill(index=0, limit=None, whole=True)
    for index in (0, 1):
        state.evict(index=index, n_slots=16, tier=Tier.DEVICE)
    state.clear(namespace=None)
    state.decode(index=0, tokens=[1])
    state.teardown()


@pytest.mark.parametrize("name", ["full", "full+swa"])
def test_slots_kept_beside_others_data_go_at_the_next_checkpoint_that_keeps_none(
    name: str,
) -> None:
    """Two compute one prompt; the later one gives its own copies up once, and has none then."""
    state = machine_for(SETUPS[name])()
    state.open(
        policy=WritePolicy.WRITE_THROUGH, page_size=2, device=24, host=9, load=None, cut_tokens=0
    )
    for _ in range(2):
        state.begin(
            stem=(1, 1, 2, 1, 2, 1, 1, 1),
            length=8,
            tail=(),
            chunk=None,
            namespace=None,
            reserve=2,
            along=2,
        )
    for index in range(2):
        state.prefill(index=index, limit=None, whole=True)
    state.checkpoint(index=0)
    own = state.harness.live[1]
    for keeps in (True, False, False):
        state.checkpoint(index=1, keep_slots=keeps)
    assert own.request.components[0].runs == []
    state.teardown()


def test_a_checkpoint_may_take_the_place_of_the_left_behind_state_that_an_earlier_one_shared() -> (
    None
):
    """Whether that one counts as used by now is open, so it may go for the state that is due."""
    window = load_plugin("five", paged().implementation("five"))
    setup = setup_for([window], beside=references()[1:])
    state = machine_for(replace(setup, tenants=TENANTS))()
    state.open(
        policy=WritePolicy.WRITE_BACK, page_size=4, device=16, host=14, load=None, cut_tokens=5
    )
    harness = state.harness
    for token, n_tokens in ((10, 20), (16, 20), (17, 16), (10, 20)):
        live = harness.begin(None, (token,) * n_tokens, 0, None)
        harness.admit(live)
        harness.load_back(live)
        harness.prefill_all(live)
        harness.finish(live)
    prompt = (1, 1, 2, 1, 2, 1, 1, 1, 2, 2, 1, 2, 2, 1, 1, 2, 1, 1, 2, 2, 1, 1, 2, 1, 2, 2)
    live = harness.begin(None, prompt, 0, 6)
    harness.admit(live)
    harness.load_back(live)
    while live.computed < live.prompt and harness.prefill(live, None):
        harness.checkpoint(live)
    assert live.request.left >= {3, 5}
    harness.finish(live)
    state.teardown()


def test_in_a_step_of_two_requests_each_ones_data_has_its_own_retention() -> None:
    """One's time is over and the other's is not; each leaves a page behind, too."""
    narrow = load_plugin("narrow", paged(reach=Reach(Trailing(1))).implementation("narrow"))
    state = machine_for(replace(setup_for([narrow]), keeping=BY_TERM))()
    state.open(
        policy=WritePolicy.WRITE_THROUGH, page_size=1, device=12, host=9, load=None, cut_tokens=0
    )
    state.decode_together(form=(), length=0, n_requests=2, rounds=((5, "split"),), stem=())
    state.teardown()


def test_data_that_may_be_left_behind_need_not_be_in_the_clean_reserve() -> None:
    """A prefetch that was not worth it may have used the page, or not."""
    whole = load_plugin("whole", paged(reach=Reach(Everything())).implementation("whole"))
    state = machine_for(replace(setup_for([whole], beside=references()), stored=True))()
    state.open(
        policy=WritePolicy.WRITE_BACK, page_size=4, device=9, host=9, load=None, cut_tokens=0
    )
    stem = (1, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1, 2, 2)
    state.begin(stem=stem, length=13, tail=(), chunk=None, namespace=None, reserve=0, along=2)
    state.prefill(index=0, limit=9, whole=True)
    state.prefetch(stem=stem[:4], length=4, index=0, on=False)
    other = (1, 1, 2, 1, 2, 1, 1, 1, 2, 2, 1, 2, 2)
    state.begin_marked(along=1, chunk=None, length=13, mark=4, stem=other)
    state.quiesce(finish=False, polls=False, index=0)
    state.load_back(index=0)
    state.prefill(index=0, limit=None, whole=True)
    state.teardown()


def test_a_page_that_was_computed_again_may_count_as_used_on_host() -> None:
    """DEVICE lost it, and the request gives its own copy back."""
    state = machine_for(setup_for([references()[1]]))()
    state.open(
        policy=WritePolicy.WRITE_BACK, page_size=1, device=9, host=9, load=LOAD, cut_tokens=0
    )
    stem = (1, 1, 1, 1, 2, 2, 1, 2, 1, 1)
    state.serve(chunk=1, length=10, on=False, output=(2, 2, 2, 1), stem=stem, tail=(1,))
    state.pin(index=0, part=1)
    state.begin(
        stem=stem[:5], length=5, tail=(1, 2, 2, 2), chunk=None, namespace=None, reserve=0, along=3
    )
    state.teardown()


def test_device_data_that_leaves_with_its_canonical_copy_is_taken_as_host_lends() -> None:
    """The tenant borrowed two slots on HOST and one on DEVICE."""
    hosted = paged(home=Tier.HOST, reach=Reach(Everything())).implementation("hosted")
    setup = setup_for([load_plugin("hosted", hosted)])
    state = machine_for(replace(setup, tenants=TENANTS))()
    state.open(
        policy=WritePolicy.WRITE_THROUGH, page_size=2, device=16, host=14, load=None, cut_tokens=0
    )
    harness = state.harness
    for namespace, token, n_tokens in (("tenant", 13, 14), (None, 14, 15)):
        live = harness.begin(namespace, (token,) * n_tokens, 0, None)
        harness.admit(live)
        harness.load_back(live)
        harness.prefill_all(live)
        harness.finish(live)
    state.teardown()
