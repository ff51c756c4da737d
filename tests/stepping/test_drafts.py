"""Passes that verify drafts leave what passes of one token leave (G1 to G4, G6, I10)."""

from __future__ import annotations

import itertools
import random
import sys
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kvgraft import Cache, ConfigError, LeaseError, Outcome, Request, TokenKey
from kvgraft.compiled import is_compiled

from ..serving import life

Components = dict[str, dict[str, Any]]

FULL: Components = {"full": {}}
SWA: Components = {"swa": {"window": 64}}
MAMBA: Components = {"mamba": {"states": 24}}
SETS: dict[str, Components] = {
    "full": FULL,
    "full + swa": FULL | SWA,
    "full + mamba": FULL | MAMBA,
    "full + swa + mamba": FULL | SWA | MAMBA,
    "swa": SWA,
    "swa + mamba": SWA | MAMBA,
}
DRAFTED_TOKENS = 64
"""Tokens between two states of a decode with drafts beside windows."""


class Chat(NamedTuple):
    """A request and its answer's end."""

    request: Request
    end: int


def opened(components: Components, page_size: int, max_drafts: int, **settings: Any) -> Cache:
    settings = {"device_tokens": 4096, "payload": False, "guard": "off", **settings}
    return Cache.open(components, page_size=page_size, max_drafts=max_drafts, **settings)


def begun(cache: Cache, tokens: list[int], answer: int, reserve: int | None = None) -> Chat | None:
    """A request at the end of its prompt; None if it does not fit."""
    request = cache.begin(TokenKey(tokens), reserve=answer if reserve is None else reserve)
    if not cache.admit(request).admitted:
        cache.abort(request)
        return None
    life.prefill(cache, request)
    return Chat(request, len(tokens) + answer)


def passes(
    cache: Cache, chats: list[Chat], n_drafts: int, chance: float, draw: random.Random
) -> Iterator[list[Chat]]:
    """Decode answers together, each to its end; yields those that end, noted and not finished."""
    running, kept = chats, [0] * len(chats)
    while running:
        requests = [each.request for each in running]
        if draw.random() < 0.5:
            for request in requests:
                cache.computed(request, 0)  # its row is read anew, and it takes the slow path
        step = cache.step(requests, n_drafts=n_drafts, n_computed=kept)
        assert step.refused == []  # it is promised, drafts as well (G1)
        widths = [1] * len(running) if step.n_tokens is None else step.n_tokens.tolist()
        kept = []
        for (request, end), width in zip(running, widths):
            n = 1
            while n < width and draw.random() < chance:
                n += 1
            n = min(n, end - request.computed)
            request.key.extend([draw.randrange(1000) for _ in range(n)])
            kept.append(n)
        ended = [at for at, chat in enumerate(running) if chat.request.key.n_tokens == chat.end]
        if ended:
            over = [running[at] for at in ended]
            noted = [kept[at] for at in ended]
            cache.step([each.request for each in over], n_tokens=0, n_computed=noted)
            kept = [n for at, n in enumerate(kept) if at not in ended]
            running = [chat for at, chat in enumerate(running) if at not in ended]
            yield over


def found_next(cache: Cache, request: Request) -> tuple[int, int]:
    """The tokens that `finish` reports, and those that the next turn resumes from.

    Others' requests may need the room that it would pin: it resumes earlier then.
    """
    key = request.key
    told = cache.finish(request)
    key.extend([1] * cache.config.page_size)
    following = cache.begin(key)
    found = following.anchor_tokens if following.limited is None else told
    cache.abort(following)
    return told, found


def again(
    components: Components, page_size: int, n_drafts: int, seed: int, reserve: int | None = None
) -> list[int]:
    """Tokens that the next turns of some conversations compute again."""
    draw = random.Random(seed)
    chance = draw.choice((0.0, 0.4, 0.8, 1.0))
    with opened(components, page_size, n_drafts) as cache:
        chats = []
        for _ in range(3):
            tokens = [draw.randrange(1000) for _ in range(draw.randrange(20, 150))]
            chat = begun(cache, tokens, draw.randrange(100, 220), reserve)
            assert chat is not None
            chats.append(chat)
        lost = {}
        for ended in passes(cache, chats, n_drafts, chance, random.Random(seed)):
            for chat in ended:
                told, found = found_next(cache, chat.request)
                assert told == found  # G6
                lost[chats.index(chat)] = chat.end - found
        cache.check_integrity()
    return [lost[at] for at in range(3)]


def compare(name: str, page_size: int, seeds: range, reserve: int | None = None) -> None:
    components = SETS[name]
    has_both = "swa" in components and "mamba" in components
    interval = -(-DRAFTED_TOKENS // page_size) * page_size if has_both else 0
    for seed in seeds:
        plain = again(components, page_size, 0, seed)
        drafted = again(components, page_size, (1, 3, 8)[seed % 3], seed, reserve)
        assert all(with_drafts <= n + interval for with_drafts, n in zip(drafted, plain))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("name", SETS)
def test_the_next_turn_finds_behind_drafts_what_it_finds_without_up_to_an_interval(
    name: str, page_size: int
) -> None:
    """G3: of all components the same boundary, by the verified tokens alone."""
    compare(name, page_size, range(1, 3))


@pytest.mark.long
@pytest.mark.parametrize("page_size", [1, 2, 8, 32, 64])
@pytest.mark.parametrize("name", SETS)
def test_the_next_turn_finds_it_with_pages_of_any_size(name: str, page_size: int) -> None:
    compare(name, page_size, range(9))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("name", SETS)
def test_the_next_turn_finds_it_behind_an_answer_beyond_its_reservation(
    name: str, page_size: int
) -> None:
    compare(name, page_size, range(6), reserve=8)


def test_the_guard_looks_at_passes_with_drafts() -> None:
    """Windows wait for the state, keys and tables have the tokens of the pass alone."""
    for components in (FULL | MAMBA, SWA | MAMBA):
        with opened(components, 4, 5, guard="on") as cache:
            chats = [begun(cache, [*range(at, at + 40)], 90) for at in (0, 100, 200)]
            begins = [chat for chat in chats if chat is not None]
            for ended in passes(cache, begins, 5, 0.7, random.Random(3)):
                for chat in ended:
                    told, found = found_next(cache, chat.request)
                    assert told == found


@pytest.mark.parametrize("splits_at", range(6))
def test_a_node_that_is_split_behind_a_window_is_unpinned_at_the_next_page(splits_at: int) -> None:
    """L7: not with the next state, whichever steps read the request's row anew."""
    with opened(FULL | SWA | MAMBA, 2, 1, device_tokens=512, guard="on") as cache:
        stem = [*range(26)]
        life.serve(cache, stem)
        chat = begun(cache, [*stem, *range(100, 158)], 100)
        assert chat is not None
        request = chat.request
        cache.step([request], n_drafts=1)
        for at in range(30):
            request.key.extend([5])
            if at == 20 + splits_at:
                life.serve(cache, [*stem[:20], 7, 7, 7, 7])
            cache.step([request], n_drafts=1, n_computed=1)
        (start, _), *_ = request.receipt.segments[1]
        assert start == 10


@pytest.mark.one_in(12)
@pytest.mark.parametrize("seed", range(12))
def test_the_guard_allows_drafts_while_others_split_the_prefix_behind_a_window(seed: int) -> None:
    draw = random.Random(seed)
    stem = [*range(60)]
    with opened(FULL | SWA | MAMBA, 2, 3, guard="on") as cache:
        life.serve(cache, stem)
        lengths = [draw.randrange(41, 90) for _ in range(4)]
        chats = [begun(cache, stem + [100 + at] * n, 150) for at, n in enumerate(lengths)]
        running = {chat.request: chat.end for chat in chats if chat is not None}
        widths = dict.fromkeys(running, 0)
        while running:
            if draw.random() < 0.2:
                life.serve(cache, [*stem[: draw.randrange(2, 60)], 7, 7, 7])
            chosen = [request for request in running if draw.random() < 0.8]
            kept = [min(widths[request], draw.randrange(1, 5)) for request in chosen]
            for request, n in zip(chosen, kept):
                request.key.extend([draw.randrange(50) for _ in range(n)])
            n_drafts = draw.randrange(4)
            step = cache.step(chosen, n_drafts=n_drafts, n_computed=kept)
            given = [1] * len(chosen) if step.n_tokens is None else step.n_tokens.tolist()
            widths.update(zip(step.requests, given))
            for request in chosen:
                if request.computed + 4 >= running[request]:
                    cache.finish(request)
                    del running[request]
        cache.check_integrity()


def boundaries(cache: Cache, key: TokenKey) -> list[int]:
    """Every length, in whole pages, of a prefix that can be resumed from whole."""
    found = []
    for end in range(cache.config.page_size, key.n_tokens + 1, cache.config.page_size):
        request = cache.begin(TokenKey([*key.tokens(0, end).tolist(), 5000]))
        found += [end] if request.anchor_tokens == end else []
        cache.abort(request)
    return found


@pytest.mark.one_in(9)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", ["full + swa", "full + mamba", "swa"])
def test_every_boundary_that_is_left_is_one_without_drafts(name: str, page_size: int) -> None:
    """G3, I10: neither the most drafts of a cache nor those of a pass decide on boundaries."""
    draw = random.Random(f"{name} {page_size}")
    for seed in range(4):
        prompt = [*range(draw.randrange(20, 150))]
        answer, size = draw.randrange(60, 220), draw.choice((2048, 512))
        found = []
        for max_drafts, n_drafts in ((0, 0), (8, 0), (8, 8), (64, 3), (64, 64)):
            with opened(SETS[name], page_size, max_drafts, device_tokens=size) as cache:
                chat = begun(cache, prompt, answer)
                assert chat is not None
                key = chat.request.key
                for ended in passes(cache, [chat], n_drafts, 0.6, random.Random(seed)):
                    cache.finish(ended[0].request)
                found.append(boundaries(cache, key))
        assert found[0]
        assert found == [found[0]] * len(found)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", SETS)
def test_a_request_that_fits_without_drafts_fits_with_them(name: str, page_size: int) -> None:
    """G1: drafts that could never fit are promised no slots, and the passes go on without them."""
    sizes: dict[str, Any] = {"device_tokens": 256, "host_tokens": 0}

    def fits(answer: int, max_drafts: int) -> bool:
        with opened(SETS[name], page_size, max_drafts, **sizes) as cache:
            request = cache.begin(TokenKey(range(40)), reserve=answer)
            outcome = cache.admit(request).outcome
            assert outcome in (Outcome.ADMITTED, Outcome.NEVER_FITS)
            return outcome is Outcome.ADMITTED

    longest = bisect_left(range(300), True, lo=20, key=lambda answer: not fits(answer, 0)) - 1
    for answer in (20, longest - 16, longest - 1, longest):
        assert fits(answer, 64)
    for answer in (longest + 1, longest + 16, longest + 64):
        assert fits(answer, 64) is fits(answer, 0)
    with opened(SETS[name], page_size, 64, **sizes) as cache:
        chat = begun(cache, [*range(40)], min(longest, 200))
        assert chat is not None
        request, refused = chat.request, 0
        while request.computed < chat.end:
            step = cache.step([request], n_drafts=64, n_computed=0)
            if step.refused:
                refused += 1
                assert cache.step([request], n_computed=0).requests == [request]
            request.key.extend([1])
            cache.step([request], n_tokens=0, n_computed=1)
        assert refused or name not in ("full", "full + swa")
        cache.check_integrity()


@pytest.mark.parametrize("name", SETS)
def test_slots_for_drafts_are_promised_up_to_the_end_of_the_reservation(name: str) -> None:
    """G1: a cache that is full of admitted requests gives them all that they are promised."""
    for seed in range(2):
        draw = random.Random(seed)
        settings: dict[str, Any] = {"device_tokens": 700, "host_tokens": 0}
        with opened(SETS[name], draw.choice((1, 4)), 8, **settings) as cache:
            chats = []
            while chat := begun(
                cache, [draw.randrange(1000) for _ in range(40)], draw.randrange(30, 120)
            ):
                chats.append(chat)
            assert len(chats) > 3
            for ended in passes(cache, chats, 8, 0.7, draw):
                for request, end in ended:
                    told, found = found_next(cache, request)
                    assert told == found <= end
            cache.check_integrity()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("n_drafts", [0, 5])
@pytest.mark.parametrize("name", SETS)
def test_finish_reports_what_a_next_request_finds_where_room_is_short(
    name: str, n_drafts: int
) -> None:
    """G6: also of data that was shared before, and evicted since."""
    draw = random.Random(name)
    for seed in range(2):
        page_size = (4, 16)[seed % 2]
        shared = [draw.randrange(1000) for _ in range(30)]
        with opened(SETS[name], page_size, n_drafts, device_tokens=640) as cache:
            for _ in range(3):
                chats: list[Chat] = []
                for _ in range(3):
                    prompt = shared + [draw.randrange(1000) for _ in range(draw.randrange(5, 90))]
                    chat = begun(cache, prompt, draw.randrange(10, 90))
                    chats += [] if chat is None else [chat]
                for request, _ in chats:
                    if draw.random() < 0.5:
                        cache.checkpoint(request)
                for ended in passes(cache, chats, n_drafts, 0.6, draw):
                    for component in SETS[name]:
                        cache.evict(component, draw.choice((0, 4, 200)))
                    for request, _ in ended:
                        told, found = found_next(cache, request)
                        assert told == found
            cache.check_integrity()


def test_a_pass_ends_where_a_state_is_kept() -> None:
    """G4: the slots behind are padding, and the key has the tokens of the pass alone."""
    with opened(FULL | MAMBA, 4, 5, decode_interval_tokens=8, device_tokens=256) as cache:
        first, second = begun(cache, [*range(30)], 20), begun(cache, [*range(50, 71)], 20)
        assert first is not None
        assert second is not None
        requests = [first.request, second.request]
        step = cache.step(requests, [[1, 2, 3, 4, 5, 6]] * 2, n_drafts=5)
        assert step.n_tokens is not None
        assert step.n_tokens.tolist() == [2, 3]  # to 32 and to 24
        assert step.seq_lens.tolist() == [32, 24]
        assert first.request.key.tokens(30).tolist() == [1, 2]
        mapping = step.slot_mapping["full"].reshape(2, 6)
        assert (mapping < 0).tolist() == [[False] * 2 + [True] * 4, [False] * 3 + [True] * 3]
        for each, at in ((first.request, 0), (second.request, 1)):
            table = cache.table(each, "full")
            pages = torch.arange(each.computed, int(step.seq_lens[at])) // 4
            assert (mapping[at, : len(pages)] // 4).tolist() == table[pages.numpy()].tolist()
        second.request.key.truncate(22)  # one draft of two was rejected, and the other one
        step = cache.step(requests, [[1] * 6] * 2, n_drafts=5, n_computed=[2, 1])
        assert step.n_tokens is not None
        assert step.n_tokens.tolist() == [6, 2]


def test_without_states_a_pass_takes_all_drafts() -> None:
    with opened(FULL | SWA, 4, 5) as cache:
        chat = begun(cache, [*range(30)], 20)
        assert chat is not None
        step = cache.step([chat.request], n_drafts=5)
        assert step.n_tokens is not None
        assert step.n_tokens.tolist() == [6]
        assert cache.step([chat.request], n_computed=1).n_tokens is None


def calls_of_a_step(cache: Cache, requests: list[Request], n_drafts: int) -> int:
    """Functions that a step calls in which no page begins; numpy's own are among them."""
    tokens = np.zeros(len(requests), np.int32)
    cache.step(requests, tokens, n_drafts=n_drafts)
    found: list[str] = []

    def note(frame: Any, event: str, arg: object) -> None:
        del arg
        if event == "call" and frame.f_code.co_name[0] != "<":
            found.append(frame.f_code.co_name)

    counts = np.ones(len(requests), np.int64)
    sys.setprofile(note)
    try:
        cache.step(requests, tokens, n_drafts=n_drafts, n_computed=counts)
    finally:
        sys.setprofile(None)
    return len(found)


@pytest.mark.parametrize("name", ["full", "full + swa", "full + swa + mamba"])
def test_a_step_with_drafts_calls_no_function_for_each_request(name: str) -> None:
    """It costs about what one without costs: array operations over all requests."""
    components = SETS[name] | ({"mamba": {"states": 200}} if "mamba" in SETS[name] else {})
    found: dict[tuple[int, int], int] = {}
    for n_drafts, n in itertools.product((0, 4), (40, 10)):
        with opened(components, 16, 4, device_tokens=16384) as cache:
            chats = [begun(cache, [*range(at, at + 36)], 20) for at in range(n)]
            requests = [chat.request for chat in chats if chat is not None]
            found[n_drafts, n] = calls_of_a_step(cache, requests, n_drafts)
    assert found[4, 40] == found[4, 10]
    # calls among compiled functions are not seen: few are left, numpy's among them
    assert is_compiled() or found[4, 40] <= 1.3 * found[0, 40]


def test_drafts_without_room_are_refused_and_the_request_goes_on_without_them() -> None:
    """G1: beyond the reservation, as any step."""
    with opened(FULL, 1, 8, device_tokens=64) as cache:
        chat = begun(cache, [*range(40)], 0)
        assert chat is not None
        request = chat.request
        kept = 0
        while True:
            step = cache.step([request], n_drafts=8, n_computed=kept)
            if step.refused:
                break
            kept = 1
            request.key.extend([1])
        was = request.allocated, request.computed, request.key.n_tokens
        assert cache.step([request], n_drafts=8).refused == [request]
        assert (request.allocated, request.computed, request.key.n_tokens) == was
        assert cache.step([request], [7]).requests == [request]
        assert cache.step([request], [7]).requests == [request]
        cache.check_integrity()


def test_slots_of_rejected_drafts_are_used_again() -> None:
    """G2."""
    with opened(FULL | SWA | MAMBA, 4, 8) as cache:
        chat = begun(cache, [*range(30)], 20)
        assert chat is not None
        request = chat.request
        cache.step([request], n_drafts=8)
        held = {name: cache.table(request, name).tolist() for name in ("full", "swa")}
        for _ in range(3):
            step = cache.step([request], n_drafts=8, n_computed=0)
            assert {name: cache.table(request, name).tolist() for name in held} == held
        assert np.array_equal(step.seq_lens.numpy(), [39])


def test_more_drafts_than_the_cache_is_opened_for_are_refused() -> None:
    with opened(FULL, 4, 2) as cache:
        chat = begun(cache, [*range(30)], 20)
        assert chat is not None
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"n_drafts": 3}, "n_drafts=3, max_drafts=2; give fewer, or open"),
            ({"n_drafts": -1}, "n_drafts"),
            ({"n_drafts": 1.5}, "n_drafts"),
            ({"n_drafts": 1, "n_tokens": 2}, "n_drafts=1 with n_tokens=2; drafts go behind one"),
        ]
        for given, said in wrong:
            with pytest.raises(ConfigError, match=said):
                cache.step([chat.request], **given)
        assert chat.request.computed == 30


def test_a_step_that_is_not_told_how_many_drafts_count_says_so() -> None:
    with opened(FULL, 16, 3) as cache:
        chat = begun(cache, [*range(40)], 20)
        assert chat is not None
        request = chat.request
        cache.step([request], n_drafts=3)
        request.key.extend([1, 2])  # verified
        said = (
            "44 computed ones, the key holds 42, .*; give n_computed, how many of the last pass's 4"
        )
        with pytest.raises(LeaseError, match=said):
            cache.step([request], [[3, 4]], n_drafts=1)
        ways: list[dict[str, Any]] = [{"n_drafts": 3}, {"n_tokens": 0}, {}]
        for others in ways:
            with pytest.raises(LeaseError, match=r"all 4 .*, up to 44, .* 42, .*; give n_computed"):
                cache.step([request], **others)
        assert (request.computed, request.key.n_tokens) == (40, 42)
        assert cache.step([request], [[3, 4]], n_drafts=1, n_computed=2).seq_lens.tolist() == [44]


def test_an_answer_ends_after_a_pass_with_drafts_by_a_step_without_tokens() -> None:
    with opened(FULL | MAMBA, 16, 3, decode_interval_tokens=16) as cache:
        chat = begun(cache, [*range(41)], 23)
        assert chat is not None
        request = chat.request
        while request.computed < 60:
            step = cache.step([request], n_drafts=3, n_computed=0)
            assert step.n_tokens is not None
            n = min(60 - request.computed, int(step.n_tokens[0]))
            request.key.extend([9] * n)
            cache.step([request], n_tokens=0, n_computed=n)
        cache.step([request], n_drafts=3, n_computed=0)  # four tokens, of which three are right
        request.key.extend([9] * 3)
        cache.step([request], n_tokens=0, n_computed=3)
        told, found = found_next(cache, request)
        assert (request.computed, told, found) == (63, 48, 48)


def test_a_key_cut_before_its_request_steps_takes_nothing_from_later_passes() -> None:
    with opened(FULL, 16, 4) as cache:
        chat = begun(cache, [*range(40)], 100)
        assert chat is not None
        request = chat.request
        request.key.extend([1, 2, 3])
        request.key.truncate(40)
        cache.step([request], [[1, 2, 3, 4, 5]], n_drafts=4)
        request.key.truncate(42)
        step = cache.step([request], [[6, 7, 8, 9, 10]], n_drafts=4, n_computed=2)
        assert step.seq_lens.tolist() == [47]


def test_drafts_may_reach_beyond_the_longest_request() -> None:
    """A request is as long as `max_tokens` without them: its last passes have room for drafts."""
    with opened(FULL, 16, 4, max_tokens=128) as cache:
        chat = begun(cache, [*range(100)], 28)
        assert chat is not None
        request = chat.request
        for end in range(101, 129):
            cache.step([request], n_drafts=4, n_computed=int(end > 101))
            request.key.extend([1])
        cache.step([request], n_tokens=0, n_computed=1)
        assert request.computed == 128
