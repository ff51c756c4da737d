"""An engine whose kernels give states inside a chunk hands them over; nothing is cut (I10, I11).

The states of these tests are stamps made of all the tokens before a boundary, so that a state that
is resumed from is right to the byte or it is not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvgraft import Cache, ConfigError, LeaseError, Tier, TokenKey
from kvgraft.config import CacheConfig
from kvgraft.packages.registry import load_plugin
from kvgraft.pools import DevicePool
from kvgraft.requests.request import Request
from kvgraft.transfers import CpuTransferEngine, TransferEngine
from kvgraft.types import PointKind

from .serving.components import StatePackage
from .serving.server import ledgers, slots_on
from .serving.setups import INSTALLED
from .transfers.gates import Held

PAGE = 4
PROMPT = list(range(1, 160))
"""39 whole pages and three tokens."""
STATES = ("near", "far")

Planes = dict[str, dict[int, list[torch.Tensor]]]


def opened(
    *,
    inside: bool = True,
    states: int = 1024,
    engine: TransferEngine | None = None,
    **settings: Any,
) -> Cache:
    """Full attention under two components with states of their own."""
    packages = [StatePackage(name) for name in STATES]
    return Cache(
        CacheConfig(
            components={"full": {}, **{name: {"states": states} for name in STATES}},
            page_size=PAGE,
            device_tokens=1024,
            states_inside_chunks=inside,
            **settings,
        ),
        plugins=[INSTALLED["full"], *(load_plugin(each.name, each) for each in packages)],
        transfers=engine,
    )


@pytest.fixture
def cache() -> Iterator[Cache]:
    with opened() as cache:
        yield cache
        cache.check_integrity()


def pool_of(cache: Cache, name: str) -> DevicePool:
    return next(each.component.device for each in cache.mounted if each.name == name)


def state_of(cache: Cache, name: str, tokens: Sequence[int]) -> list[torch.Tensor]:
    """The planes of the state behind `tokens`."""
    stamp = zlib.crc32(f"{name} {list(tokens)}".encode())
    specs = pool_of(cache, name).specs
    return [
        torch.full(spec.shape, (stamp >> place) % 251, dtype=spec.dtype)
        for place, spec in enumerate(specs)
    ]


def held_state(cache: Cache, name: str, slot: int | None) -> list[torch.Tensor]:
    assert slot is not None
    return [plane[slot] for plane in pool_of(cache, name).planes]


def states_at(cache: Cache, request: Request, positions: Sequence[int]) -> Planes:
    """The kernels' states at these positions, of every component."""
    tokens = request.key.tokens(0, request.key.n_tokens).tolist()
    return {name: {at: state_of(cache, name, tokens[:at]) for at in positions} for name in STATES}


def start(cache: Cache, tokens: Sequence[int], chunk: int | None = None) -> Request:
    request = cache.begin(TokenKey(list(tokens)), chunk=chunk)
    assert cache.admit(request).admitted
    return request


def compute(cache: Cache, request: Request, n_tokens: int, states: Planes) -> None:
    """One chunk: the live states of the request stand at its end afterwards."""
    assert cache.allocate(request, n_tokens)
    end = request.computed + n_tokens
    for name in STATES:
        slot = cache.state_slot(request, name)
        if request.computed:
            tokens = request.key.tokens(0, request.computed).tolist()
            expected = state_of(cache, name, tokens)
            assert all(map(torch.equal, held_state(cache, name, slot), expected))
        live = states_at(cache, request, [end])[name][end]
        pool_of(cache, name).write_slot(slot.to_bytes(4, "little"), live)
    cache.computed(request, n_tokens, states=states)


def serve(cache: Cache, tokens: Sequence[int], chunk: int | None = None) -> Request:
    """A whole life with all states handed over."""
    request = start(cache, tokens, chunk)
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request)
        asked = cache.state_boundaries(request, n_tokens)
        compute(cache, request, n_tokens, states_at(cache, request, asked))
    cache.finish(request)
    return request


def resumed_at(cache: Cache, tokens: Sequence[int]) -> int:
    """Where a prompt resumes; the states there are the right ones."""
    request = start(cache, tokens)
    anchor = request.anchor_tokens
    if anchor:
        compute(cache, request, 1, {})
    cache.abort(request)
    return anchor


def grid_of(cache: Cache, end: int) -> list[int]:
    """Positions of the grid up to `end` tokens."""
    step = cache.points.spacing * PAGE
    return list(range(step, end + 1, step))


def test_the_grid_of_these_tests_has_points_inside_the_prompt(cache: Cache) -> None:
    assert len(grid_of(cache, len(PROMPT))) >= 3


def test_a_prompt_is_computed_in_one_chunk_and_asks_for_its_states_inside(cache: Cache) -> None:
    request = start(cache, PROMPT)
    assert cache.next_chunk(request) == len(PROMPT)
    repeat = (len(PROMPT) - 1) // PAGE * PAGE
    wanted = sorted({repeat, *grid_of(cache, len(PROMPT) - 1)})
    assert cache.state_boundaries(request, len(PROMPT)) == wanted
    assert cache.state_boundaries(request, wanted[0]) == []
    assert cache.state_boundaries(request, wanted[0] + 1) == wanted[:1]
    cache.abort(request)


@pytest.mark.parametrize("chunk", [None, 64, 20])
def test_every_boundary_that_was_handed_over_is_resumed_from(
    cache: Cache, chunk: int | None
) -> None:
    serve(cache, PROMPT, chunk)
    repeat = (len(PROMPT) - 1) // PAGE * PAGE
    assert resumed_at(cache, PROMPT) == repeat
    for point in grid_of(cache, len(PROMPT)):
        assert resumed_at(cache, [*PROMPT[:point], 999, 998]) == point
    assert cache.points.made[PointKind.REPEAT] == 1
    assert cache.points.made[PointKind.GRID] >= 3
    assert not any(cache.points.skipped.values())


def test_states_in_the_tree_have_the_bytes_that_were_handed_over(cache: Cache) -> None:
    serve(cache, PROMPT)
    for name in STATES:
        slots = slots_on(cache, PROMPT, name, Tier.DEVICE)
        pages = [page for page, slot in enumerate(slots, start=1) if slot is not None]
        assert {each // PAGE for each in grid_of(cache, len(PROMPT))} <= set(pages)
        for page in pages:
            expected = state_of(cache, name, PROMPT[: page * PAGE])
            assert all(map(torch.equal, held_state(cache, name, slots[page - 1]), expected))


def test_states_that_are_handed_over_are_copied(cache: Cache) -> None:
    request = start(cache, PROMPT)
    handed = states_at(cache, request, cache.state_boundaries(request, len(PROMPT)))
    compute(cache, request, len(PROMPT), handed)
    for planes in (each for name in STATES for each in handed[name].values()):
        for plane in planes:
            plane.fill_(0)
    cache.finish(request)
    assert resumed_at(cache, PROMPT) == (len(PROMPT) - 1) // PAGE * PAGE


def test_a_boundary_that_is_left_out_is_no_point_and_is_counted(cache: Cache) -> None:
    request = start(cache, PROMPT)
    first, second, *others = cache.state_boundaries(request, len(PROMPT))
    compute(cache, request, len(PROMPT), states_at(cache, request, [second]))
    cache.finish(request)
    assert cache.points.skipped[PointKind.GRID] + cache.points.skipped[PointKind.REPEAT] == (
        1 + len(others)
    )
    assert resumed_at(cache, PROMPT) == second
    assert resumed_at(cache, [*PROMPT[:second], 999, 998]) == second
    assert resumed_at(cache, [*PROMPT[: second - 1], 999, 998]) == 0
    assert first < second


def test_a_point_is_kept_for_every_component_or_not_at_all(cache: Cache) -> None:
    """Contract: I10, I11."""
    request = start(cache, PROMPT)
    asked = cache.state_boundaries(request, len(PROMPT))
    handed = states_at(cache, request, asked)
    del handed["far"][asked[0]]
    compute(cache, request, len(PROMPT), handed)
    cache.finish(request)
    for name in STATES:
        assert slots_on(cache, PROMPT, name, Tier.DEVICE)[asked[0] // PAGE - 1] is None
        assert slots_on(cache, PROMPT, name, Tier.DEVICE)[asked[1] // PAGE - 1] is not None
    assert sum(cache.points.skipped.values()) == 1


@pytest.mark.parametrize("inside", [True, False])
def test_a_point_that_is_skipped_gives_its_promised_slots_back(
    inside: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    with opened(inside=inside) as cache:
        request = start(cache, PROMPT)
        assert cache.allocate(request, len(PROMPT))
        promised = [part.account.promised for part in request.state_parts]
        points = list(request.checkpoints)
        assert points
        cache.computed(request, len(PROMPT))
        assert cache.points.skipped[PointKind.REPEAT] == len(points)
        left = [part.account.promised for part in request.state_parts]
        assert left == [each - len(points) for each in promised]
        cache.check_integrity()
        cache.finish(request)


def test_without_any_state_the_prompt_is_resumed_nowhere(cache: Cache) -> None:
    request = start(cache, PROMPT)
    asked = cache.state_boundaries(request, len(PROMPT))
    assert cache.allocate(request, len(PROMPT))
    cache.computed(request, len(PROMPT))
    cache.finish(request)
    assert resumed_at(cache, PROMPT) == 0
    assert sum(cache.points.skipped.values()) == len(asked)


@pytest.mark.parametrize("chunk", [64, 160])
def test_positions_nobody_asked_for_are_refused_and_change_nothing(
    cache: Cache, chunk: int
) -> None:
    """Contract: I8."""
    request = start(cache, PROMPT, chunk)
    n_tokens = cache.next_chunk(request)
    asked = cache.state_boundaries(request, n_tokens)
    assert cache.allocate(request, n_tokens)
    before = ledgers(cache)
    for position in (asked[0] + PAGE, asked[0] // PAGE, n_tokens, 0, -4, "24", None, 2.5):
        handed = states_at(cache, request, asked)
        handed["far"][position] = handed["far"][asked[0]]  # type: ignore[index]
        said = (
            f"computed: states of component 'far' at {position!r}, inside these {n_tokens} tokens "
            f"they are wanted at {', '.join(map(str, asked))}; give them where state_boundaries "
            "says"
        )
        with pytest.raises(ConfigError) as refused:
            cache.computed(request, n_tokens, states=handed)
        assert str(refused.value) == said
    assert request.computed == 0
    assert ledgers(cache) == before
    assert cache.state_boundaries(request, n_tokens) == asked
    cache.abort(request)


def test_a_prompt_of_whole_pages_leaves_its_end_and_the_boundary_before(cache: Cache) -> None:
    prompt = PROMPT[:156]
    request = start(cache, prompt)
    assert 152 in cache.state_boundaries(request, 156)
    cache.abort(request)
    serve(cache, prompt)
    assert resumed_at(cache, prompt) == 152
    assert resumed_at(cache, [*prompt, 999]) == 156


def test_a_grid_point_without_a_slot_is_skipped_and_a_promised_one_is_not() -> None:
    """Contract: A12, I11."""
    with opened(states=3) as cache:
        request = serve(cache, PROMPT)
        assert request.anchor_tokens == 0
        repeat = (len(PROMPT) - 1) // PAGE * PAGE
        assert resumed_at(cache, PROMPT) == repeat
        grid = [each for each in grid_of(cache, len(PROMPT) - 1) if each != repeat]
        assert cache.points.skipped[PointKind.GRID] == len(grid)
        assert cache.points.made[PointKind.GRID] == 0
        cache.check_integrity()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda planes: planes[:-1], "has planes "),
        (lambda planes: [*planes[:-1], torch.zeros(5)], "has planes "),
        (lambda planes: [planes[0].to(torch.float64), *planes[1:]], "has planes "),
        (lambda planes: [planes[0].tolist(), *planes[1:]], "is a list; give "),
        (lambda planes: [3, 4], "is a list; give "),
        (lambda planes: planes[0], "is a Tensor; give "),
        (lambda planes: None, "is None; give "),
        (lambda planes: "planes", "is a str; give "),
    ],
    ids=[
        *("a plane is missing", "a plane is too long", "another element type"),
        *("lists for tensors", "numbers", "one tensor", "nothing", "text"),
    ],
)
def test_states_of_other_shapes_or_types_are_refused_and_change_nothing(
    cache: Cache, spoil: Callable[[list[torch.Tensor]], Any], said: str
) -> None:
    """Contract: I8."""
    request = start(cache, PROMPT)
    asked = cache.state_boundaries(request, len(PROMPT))
    good = states_at(cache, request, asked)
    assert cache.allocate(request, len(PROMPT))
    bad = {**good, "far": {**good["far"], asked[-1]: spoil(good["far"][asked[-1]])}}
    before = ledgers(cache)
    with pytest.raises(ConfigError) as refused:
        cache.computed(request, len(PROMPT), states=bad)
    line = str(refused.value)
    subject = f"computed: the state of component 'far' at token {asked[-1]} "
    assert line.startswith(f"{subject}{said}")
    assert "\n" not in line
    assert request.computed == 0
    assert ledgers(cache) == before
    assert cache.state_boundaries(request, len(PROMPT)) == asked
    compute(cache, request, len(PROMPT), good)
    cache.finish(request)
    assert resumed_at(cache, PROMPT) == (len(PROMPT) - 1) // PAGE * PAGE


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([1, 2], "computed: states=[1, 2]; give "),
        ("near", "computed: states='near'; give "),
        ({"near": [1, 2]}, "computed: states of component 'near' are a list; give "),
        ({"near": None}, "computed: states of component 'near' are None; give "),
        ({3: {}}, "computed: component 3 keeps no states; those that do are far, near"),
    ],
)
def test_states_come_by_component_and_position(cache: Cache, states: Any, said: str) -> None:
    request = start(cache, PROMPT)
    assert cache.allocate(request, len(PROMPT))
    with pytest.raises(ConfigError) as refused:
        cache.computed(request, len(PROMPT), states=states)
    assert str(refused.value).startswith(said)
    assert request.computed == 0
    cache.abort(request)


@pytest.mark.parametrize("n_tokens", [-3, 0.5, None, "4", 4096])
def test_an_invalid_number_of_tokens_is_refused_with_and_without_states(
    cache: Cache, n_tokens: Any
) -> None:
    request = start(cache, PROMPT)
    assert cache.allocate(request, len(PROMPT))
    states = states_at(cache, request, cache.state_boundaries(request, len(PROMPT)))
    for given in (states, None):
        with pytest.raises(LeaseError, match=r"is no number of tokens|slots for 160 allocated"):
            cache.computed(request, n_tokens, states=given)
    if n_tokens != 4096:
        with pytest.raises(LeaseError, match=r"state_boundaries: .* is no number of tokens"):
            cache.state_boundaries(request, n_tokens)
    assert request.computed == 0
    cache.abort(request)


def test_a_state_gets_its_room_though_copies_of_evicted_states_do_not_end() -> None:
    """Under write-back others leave without a copy then (A7, E4)."""
    engine = CpuTransferEngine()
    with opened(
        states=5,
        engine=engine,
        host_tokens=1024,
        write_policy="write-back",
        transfer_timeout_s=0.05,
    ) as cache:
        for number in range(1, 6):
            serve(cache, [each + 1000 * number for each in PROMPT[:6]])
        request = cache.begin(TokenKey(PROMPT), resume_at=[40, 80])
        assert cache.admit(request).admitted
        asked = cache.state_boundaries(request, len(PROMPT))
        assert cache.allocate(request, len(PROMPT))
        fence = Held()
        engine.submit([], fence)  # the only worker waits for something else
        assert fence.met.wait(60)
        cache.computed(request, len(PROMPT), states=states_at(cache, request, asked))
        assert request.computed == len(PROMPT)
        assert not any(cache.points.skipped.values())
        cache.check_integrity()
        fence.set()
        while not cache.drain():
            pass
        cache.finish(request)
        cache.check_integrity()
        for name in STATES:
            slots = slots_on(cache, PROMPT, name, Tier.DEVICE)
            assert [page for page, slot in enumerate(slots, 1) if slot is not None] == [10, 20, 39]
            expected = state_of(cache, name, PROMPT[:40])
            assert all(map(torch.equal, held_state(cache, name, slots[9]), expected))


def test_a_component_without_states_is_named(cache: Cache) -> None:
    request = start(cache, PROMPT)
    assert cache.allocate(request, 8)
    with pytest.raises(ConfigError, match="'full' keeps no states; those that do are far, near"):
        cache.computed(request, 8, states={"full": {4: []}})
    assert request.computed == 0
    cache.abort(request)


def test_without_the_setting_states_are_refused_and_chunks_are_cut() -> None:
    with opened(inside=False) as cache:
        request = start(cache, PROMPT)
        repeat = (len(PROMPT) - 1) // PAGE * PAGE
        assert cache.next_chunk(request) == repeat
        assert cache.state_boundaries(request, len(PROMPT)) == []
        assert cache.allocate(request, 8)
        with pytest.raises(ConfigError, match="states_inside_chunks=True"):
            cache.computed(request, 8, states=states_at(cache, request, [4]))
        assert request.computed == 0
        cache.computed(request, 8)
        cache.abort(request)


def test_the_grid_lies_at_the_same_pages_wherever_chunks_end() -> None:
    """Contract: I12. A chunk's end is no point of its own beside one that is a page further."""
    with opened(guard="on") as cache:
        spacing = cache.points.spacing
        request = start(cache, PROMPT)
        compute(cache, request, (spacing + 2) * PAGE, {})
        asked = cache.state_boundaries(request, spacing * PAGE)
        assert asked == [2 * spacing * PAGE]
        compute(cache, request, spacing * PAGE, states_at(cache, request, asked))
        grid = [page for page, kind in request.points.items() if kind is PointKind.GRID]
        assert grid == [2 * spacing]
        cache.finish(request)
