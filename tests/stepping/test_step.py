"""A step's result, its tables, and the calls that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvgraft import Cache, ConfigError, LeaseError, Request, TokenKey
from kvgraft.transfers import Fence

from ..serving import life


class Counting(Cache):
    """A cache that counts the requests that take the slow path in a step."""

    n_alone = 0

    def __enter__(self) -> Counting:
        return self

    def computed(self, request: Request, n_tokens: int, fence: Fence | None = None) -> None:
        self.n_alone += 1
        super().computed(request, n_tokens, fence)

    def allocate(self, request: Request, n_tokens: int) -> bool:
        self.n_alone += 1
        return super().allocate(request, n_tokens)


def opened(**settings: Any) -> Counting:
    given: dict[str, Any] = {"page_size": 4, "device_tokens": 4096, "payload": False, **settings}
    components = given.pop("components", {"full": {}})
    cache = Counting.open(components, **given)
    assert isinstance(cache, Counting)
    return cache


def prefilled(cache: Cache, n_requests: int, n_tokens: int = 9, reserve: int = 64) -> list[Request]:
    starts = range(0, 100 * n_requests, 100)
    return [
        life.prefilled(cache, range(start, start + n_tokens), reserve=reserve) for start in starts
    ]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("components", [{"full": {}}, {"full": {}, "mamba": {"states": 32}}])
def test_most_requests_of_a_step_are_array_operations(
    components: dict[str, Any], page_size: int
) -> None:
    with opened(components=components, page_size=page_size) as cache:
        running = prefilled(cache, 6)
        for _ in range(8):  # the first page behind the prompt, and the first state kept
            cache.step(running, np.ones(6, np.int32))
        cache.n_alone = 0
        for _ in range(40):
            cache.step(running, np.ones(6, np.int32))
        assert cache.n_alone == 0
        assert [request.computed for request in running] == [9 + 47] * 6
        assert [request.key.n_tokens for request in running] == [9 + 48] * 6
        cache.check_integrity()


def test_reading_a_request_between_two_steps_leaves_it_among_the_others() -> None:
    with opened(components={"full": {}, "mamba": {"states": 32}}) as cache:
        running = prefilled(cache, 2)
        for _ in range(8):
            cache.step(running, [1, 1])
        cache.n_alone = 0
        for _ in range(8):
            for request in running:
                cache.table(request, "full")
                cache.state_slot(request, "mamba")
            cache.step(running, [1, 1])
        assert cache.n_alone == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_request_whose_prompt_left_nothing_to_keep_joins_the_array_operations(
    page_size: int,
) -> None:
    """Also one that another call changed: its row is read, and it is one of the others."""
    with opened(components={"full": {}, "swa": {"window": 64}}, page_size=page_size) as cache:
        running = prefilled(cache, 4)
        cache.n_alone = 0
        cache.step(running, np.ones(4, np.int32))
        assert cache.checkpoint(running[0])
        cache.step(running, np.ones(4, np.int32))
        assert cache.n_alone == 0
        for request in running:
            row = cache.table_rows("full")[request.row].numpy()
            table = cache.table(request, "full")
            assert row[: len(table)].tolist() == table.tolist()
        cache.check_integrity()


def test_the_changes_of_steps_make_a_copy_of_the_table() -> None:
    """On another device; also where rows are given to other requests and windows slide."""
    components = {"full": {}, "swa": {"window": 8}}
    with opened(components=components, max_requests=4, max_tokens=256) as cache:
        tables = {name: cache.table_rows(name) for name in components}
        mirrors = {name: torch.zeros_like(table) for name, table in tables.items()}
        running = prefilled(cache, 3)
        for at in range(60):
            if at == 20:
                cache.computed(running[0], 1)
                cache.finish(running.pop(0))
            if at == 30:
                running += prefilled(cache, 1, n_tokens=40)
            step = cache.step(running, np.ones(len(running), np.int32))
            for name, mirror in mirrors.items():
                change = step.changes[name]
                mirror.view(-1).index_copy_(0, change.places, change.slots)
                for request in step.requests:
                    table = torch.from_numpy(cache.table(request, name).copy())
                    assert torch.equal(mirror[request.row, : len(table)], table)
        for name, table in tables.items():
            assert cache.table_rows(name).data_ptr() == table.data_ptr()


def test_the_changes_of_a_step_stay_what_they_were_when_they_are_read_later() -> None:
    with opened(components={"full": {}, "swa": {"window": 8}}, max_requests=4) as cache:
        running = prefilled(cache, 3)
        steps = [cache.step(running, np.ones(3, np.int32))]
        told = {name: change.slots.clone() for name, change in steps[0].changes.items()}
        for _ in range(20):
            steps.append(cache.step(running, np.ones(3, np.int32)))
        cache.finish(running.pop(0))
        cache.step(running + prefilled(cache, 1, n_tokens=40))
        for name, change in steps[0].changes.items():
            assert len(change.slots)
            assert torch.equal(change.slots, told[name])
            assert len(change.places) == len(change.slots)


def test_a_step_in_which_no_page_begins_changes_no_entry() -> None:
    with opened(page_size=16) as cache:
        running = prefilled(cache, 3, n_tokens=17)
        cache.step(running, [1, 1, 1])
        step = cache.step(running, [1, 1, 1])
        assert step.changes["full"].places.tolist() == []


def test_tables_without_bounds_grow() -> None:
    with opened(page_size=1) as cache:
        running = prefilled(cache, 40, n_tokens=3, reserve=80)
        assert cache.table_rows("full").shape == (16, 64)
        for _ in range(80):
            step = cache.step(running, np.ones(40, np.int32))
        table = cache.table_rows("full")
        assert table.shape[0] >= 40
        assert table.shape[1] >= 83
        for request in step.requests:
            row = table[request.row, : request.allocated]
            assert row.tolist() == cache.table(request, "full").tolist()


def test_requests_without_room_are_named_and_unchanged() -> None:
    with opened(device_tokens=52) as cache:
        first, second = prefilled(cache, 2, n_tokens=16, reserve=0)
        refused: list[Request] = []
        while not refused:
            step = cache.step([first, second], [5, 6])
            refused = step.refused
        assert refused == [second]
        assert step.requests == [first]
        assert step.rows.tolist() == [first.row]
        assert second.key.n_tokens == second.computed
        assert cache.retract(second)
        assert cache.step([first], [7]).requests == [first]
        cache.check_integrity()


def test_more_tokens_than_the_pools_have_are_refused_without_a_table_for_them() -> None:
    with opened(device_tokens=256) as cache:
        running = prefilled(cache, 1)
        assert cache.step(running, [1], n_tokens=1_000_000).refused == running
        assert cache.table_rows("full").shape[1] < 1000


def test_rejected_drafts_are_not_computed() -> None:
    with opened() as cache:
        (request,) = prefilled(cache, 1)
        step = cache.step([request], [1], n_tokens=4)
        assert step.slot_mapping["full"].shape == (4,)
        request.key.extend([2, 3])  # two of three drafts were right
        cache.step([request], [4], n_tokens=4, n_computed=3)
        assert request.computed == 12
        assert request.key.tokens(9).tolist() == [1, 2, 3, 4]
        cache.step([request], n_tokens=0, n_computed=[1])
        assert request.computed == 13


def test_a_row_is_another_request_s_once_its_own_has_ended() -> None:
    with opened(max_requests=2, max_tokens=64) as cache:
        first, second = prefilled(cache, 2)
        cache.step([first, second], [1, 1])
        cache.abort(first)
        assert first.row == -1
        (third,) = prefilled(cache, 1)
        cache.step([third, second], [1, 1])
        assert {second.row, third.row} == {0, 1}
        cache.restart(third)
        assert third.row == -1
        cache.check_integrity()


def test_a_wrong_step_is_refused_and_changes_nothing() -> None:
    with opened(max_requests=2, max_tokens=20) as cache, opened() as other:
        running = prefilled(cache, 3)
        (stranger,) = prefilled(other, 1)
        leased = cache.begin(TokenKey(range(900, 909)))
        wrong: list[tuple[Sequence[Any], Any, dict[str, Any], type[Exception], str]] = [
            (running, [1, 1, 1], {}, ConfigError, "max_requests=2"),
            (running[:2], [1], {}, ConfigError, "for 2 sequences"),
            (running[:2], [1, -1], {}, ConfigError, "-1"),
            (running[:2], [1.5, 1], {}, ConfigError, "not integers"),
            (
                running[:2],
                [[1], [1, 2]],
                {},
                ConfigError,
                "different numbers of them; give as many",
            ),
            (running[:1], "1", {}, ConfigError, "^token ids given as str; give a list of integers"),
            (running[:1], [1], {"n_tokens": 0}, ConfigError, "1 tokens of each .*n_tokens=0; give"),
            (running[:1], [1], {"n_tokens": -1}, ConfigError, "n_tokens"),
            (running[:1], [1], {"n_tokens": 1.5}, ConfigError, "n_tokens"),
            (running[:1], [1], {"n_computed": 2.5}, ConfigError, "n_computed"),
            (running[:1], [1], {"n_computed": [1, 1]}, ConfigError, "n_computed"),
            (running[:1], [1], {"n_computed": 9}, LeaseError, "n_computed"),
            (running[:1], [1], {"fence": 3}, ConfigError, "fence 3 of type int"),
            (
                running[:1],
                [1],
                {"n_tokens": 12},
                ConfigError,
                r"of <Request .* at 9, max_tokens=20",
            ),
            ([running[0], running[0]], [1, 1], {}, LeaseError, "twice"),
            ([stranger], [1], {}, LeaseError, "another cache"),
            ([leased], [1], {}, LeaseError, "admit"),
            (["text"], [1], {}, LeaseError, "no request"),
            ([Request], [1], {}, LeaseError, "no request"),
            (running[0], [1], {}, LeaseError, r"no list; give \[request"),  # type: ignore[list-item]
            (running[:1], torch.ones(1, requires_grad=True), {}, ConfigError, "no array"),
            (running[:1], [1], {"n_tokens": 2**70}, ConfigError, "n_tokens"),
            (running[:1], [1], {"n_computed": 2**62}, ConfigError, "n_computed"),
            (running[:1], [1], {"n_computed": np.uint64(2**64 - 1)}, ConfigError, "n_computed"),
            (running[:2], [1, 1], {"n_computed": [[0], [0, 0]]}, ConfigError, "n_computed"),
        ]
        with pytest.raises(ConfigError, match=r"^begin: a prompt of 21 tokens, max_tokens=20; "):
            cache.begin(TokenKey(range(21)))
        table = cache.table(running[0], "full").tolist()
        with pytest.raises(ConfigError, match=r"^fork: a prompt of 21 tokens, max_tokens=20; "):
            cache.fork(running[0], range(12))
        assert cache.table(running[0], "full").tolist() == table
        before = cache.stats()
        for requests, tokens, named, error, said in wrong:
            with pytest.raises(error, match=said):
                cache.step(requests, tokens, **named)
            assert cache.stats() == before
            assert [request.key.n_tokens for request in running] == [9] * 3
            assert [request.row for request in running] == [-1] * 3
        cache.close()
        with pytest.raises(LeaseError, match="closed"):
            cache.step([], [])


def test_an_object_that_is_no_fence_is_refused_by_every_call_that_takes_one() -> None:
    with opened() as cache:
        (running,) = prefilled(cache, 1)
        before = cache.stats()
        no_fence: Any = "now"
        calls: list[tuple[Callable[..., object], list[int]]] = [
            (cache.load_back, []),
            (cache.computed, [1]),
            (cache.checkpoint, []),
            (cache.finish, []),
            (cache.retract, []),
        ]
        for call, given in calls:
            with pytest.raises(ConfigError, match="fence 'now' of type str"):
                call(running, *given, fence=no_fence)
        assert cache.stats() == before


def test_no_requests_are_a_step_of_nothing() -> None:
    with opened() as cache:
        step = cache.step([], np.zeros(0, np.int32))
        assert (step.requests, step.refused, step.rows.tolist()) == ([], [], [])


def test_a_state_has_no_page_table() -> None:
    with (
        opened(components={"full": {}, "mamba": {"states": 4}}) as cache,
        pytest.raises(ConfigError, match="keeps states"),
    ):
        cache.table_rows("mamba")
