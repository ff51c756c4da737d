"""Where a prefill is cut for its states, and the tokens reused for it (`cut_tokens`, I10)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvgraft import Cache, ConfigError, TokenKey

from ..serving import life

PAGE = 64


def opened(cut_tokens: int, **components: dict[str, object]) -> Cache:
    components = {"full": {}, "mamba": {"states": 64}, **components}
    return Cache.open(components, device_tokens=64_000, page_size=PAGE, cut_tokens=cut_tokens)


def serve(
    cache: Cache,
    tokens: Sequence[int],
    chunk: int | None = None,
    resume_at: int | tuple[int, ...] = (),
) -> tuple[int, list[int]]:
    """A whole life: where it resumed, and where its passes ended."""
    request = cache.begin(TokenKey(list(tokens)), chunk=chunk, resume_at=resume_at)
    assert cache.admit(request).admitted
    resumed, ends = request.anchor_tokens, list[int]()
    life.prefill(cache, request, each=lambda request: ends.append(request.computed))
    cache.finish(request)
    cache.check_integrity()
    return resumed, ends


@pytest.mark.parametrize(
    ("cut_tokens", "alone", "behind_another"),
    [
        (0, [960, 1000], [576, 960, 1000]),
        (384, [960, 1000], [576, 960, 1000]),
        (385, [960, 1000], [576, 1000]),
        (577, [960, 1000], [960, 1000]),
        (961, [1000], [1000]),
    ],
)
def test_cuts_lie_apart_from_each_other_and_from_the_prefix(
    cut_tokens: int, alone: list[int], behind_another: list[int]
) -> None:
    prompt, other = list(range(1000)), [*range(600), *range(5000, 5400)]
    with opened(cut_tokens) as cache:
        assert serve(cache, other) == (0, alone)
        assert serve(cache, prompt) == (0, behind_another)


def test_nothing_is_cut_for_windows() -> None:
    with Cache.open(
        {"full": {}, "swa": {"window": 100}}, device_tokens=64_000, page_size=PAGE
    ) as cache:
        prompt = list(range(1000))
        assert serve(cache, prompt) == (0, [1000])
        assert serve(cache, prompt) == (960, [1000])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cut_tokens", [0, 1, 64, 128, 200, 500])
@pytest.mark.parametrize("length", [65, 300, 1000, 1023, 1024, 1025, 2000])
@pytest.mark.parametrize("chunk", [None, 256])
def test_an_identical_prompt_is_reused_to_within_a_page_and_the_distance_of_cuts(
    cut_tokens: int, length: int, chunk: int | None
) -> None:
    prompt = list(range(length))
    with opened(cut_tokens) as cache:
        serve(cache, [*prompt[: length // 3], *range(9000, 9300)], chunk)
        _, ends = serve(cache, prompt, chunk)
        if chunk is None:
            cuts = [end for end in ends if end < length]
            assert all(cut % PAGE == 0 for cut in cuts)
            assert all(b - a >= cut_tokens for a, b in zip([0, *cuts], cuts))
        resumed, _ = serve(cache, prompt, chunk)
        assert resumed >= length - PAGE - cut_tokens


def test_the_end_of_a_prompt_of_whole_pages_needs_no_cut_and_is_kept() -> None:
    prompt = list(range(1024))
    with opened(2000) as cache:
        assert serve(cache, prompt) == (0, [1024])
        assert serve(cache, [*prompt, *range(9000, 9100)])[0] == 1024


def test_a_cut_for_repetitions_alone_is_made_where_the_engine_asks_for_it() -> None:
    """It would save less than a quarter of a prompt of whole pages, so it is not made by itself."""
    conversation = list(range(1024))
    for resume_at, cut in (((), []), (1216, [1216])):
        with opened(0) as cache:
            serve(cache, conversation)
            prompt = [*conversation, *range(5000, 5256)]
            assert serve(cache, prompt, resume_at=resume_at) == (1024, [*cut, 1280])


def test_a_negative_distance_is_refused() -> None:
    with pytest.raises(ConfigError, match="cut_tokens=-1"):
        opened(-1)
