"""Data that requests leave behind, driven by hand: random calls seldom last that long."""

from __future__ import annotations

import pytest

from kvgraft import Everything, Reach, Trailing
from kvgraft.errors import ContractViolation
from kvgraft.requests.slots import PageSlots
from kvgraft.tree import inserting
from kvgraft_testing.machine import Sizes, paged_plugin, setup_for
from kvgraft_testing.machine.harness import Harness
from kvgraft_testing.machine.live import Live

from .setups import SETUPS

CHUNK = 4

PLAIN = paged_plugin("plain", Reach(Everything()))


def driven(name: str, page_size: int) -> Harness:
    """A harness whose pools hold 48 pages, that of `small` 24."""
    if name == "small":
        small = paged_plugin("small", Reach(Trailing(5 * page_size)))
        setup = setup_for([PLAIN, small], {"small": {"device_tokens": 24 * page_size}})
        return Harness(setup, Sizes(page_size=page_size, device=48, host=0))
    return Harness(SETUPS[name], Sizes(page_size=page_size, device=48, host=0))


def serve(harness: Harness, tokens: tuple[int, ...], output: int = 0) -> Live:
    """A request from match to finish, in chunks, without a checkpoint."""
    live = harness.begin(None, tokens, output, CHUNK)
    assert harness.admit(live).admitted
    harness.load_back(live)
    harness.prefill_all(live)
    for _ in range(output):
        assert harness.decode(live, 1)
    harness.finish(live)
    return live


def resumed(harness: Harness, tokens: tuple[int, ...]) -> int:
    """Where a request with these tokens resumes."""
    live = harness.begin(None, tokens, 0, CHUNK)
    harness.abort(live)
    return live.request.anchor_tokens


def long_prompt(harness: Harness) -> tuple[int, ...]:
    """Tokens of which most of the window's pool is left behind, twice over."""
    return tuple(50 + n % 7 for n in range(28 * harness.model.page_size))


def windows_outlive_a_long_prompt(page_size: int = 1) -> None:
    """Two conversations end; a long prompt runs through the window's pool, which is small."""
    harness = driven("small", page_size)
    talks = [(number,) * (6 * page_size) for number in (1, 2)]
    ends = [serve(harness, talk).tuple for talk in talks]
    serve(harness, long_prompt(harness))
    for end in ends:
        assert resumed(harness, (*end, 9)) == len(end), "its window was pushed out"
    harness.close()


@pytest.mark.parametrize("page_size", [1, 2])
def test_windows_of_finished_conversations_outlive_the_evict_first_data_of_a_long_prompt(
    page_size: int,
) -> None:
    windows_outlive_a_long_prompt(page_size)


@pytest.mark.plain_build
def test_windows_pushed_out_by_a_long_prompt_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data left behind counts as used, so that older windows leave before it."""
    monkeypatch.setattr(inserting, "LEFT_BEHIND", 0)
    with pytest.raises(ContractViolation, match=r"small.* left device"):
        windows_outlive_a_long_prompt()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["full+swa", "broad+near+far", "swa"])
@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("output", [0, 1, 20])
def test_an_identical_prompt_resumes_at_its_last_page_however_long_the_answer_was(
    name: str, page_size: int, output: int
) -> None:
    """Without a checkpoint, and where decoding has left the prompt's window behind."""
    harness = driven(name, page_size)
    prompt = (1,) * (8 * page_size)
    serve(harness, prompt, output)
    assert resumed(harness, prompt) == 7 * page_size
    harness.close()


@pytest.mark.plain_build
def test_a_decode_that_drops_data_of_points_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageSlots, "is_worth_keeping", lambda self, request, page: False)
    monkeypatch.setattr(PageSlots, "has_promise_left", lambda self, parts, pages: False)
    harness = driven("full+swa", 1)
    with pytest.raises(ContractViolation, match="I9"):
        serve(harness, (1,) * 8, 20)


def test_aborting_keeps_data_left_behind() -> None:
    harness = driven("broad+near+far", 1)
    live = harness.begin(None, tuple(range(1, 21)), 1, CHUNK)
    harness.admit(live)
    harness.load_back(live)
    harness.prefill_all(live)
    harness.abort(live)
    assert resumed(harness, live.tuple) == 13, "far's window of 7 tokens was still its own"
    harness.close()
