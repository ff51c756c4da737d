"""Tokens that a conversation's next turn computes again, after answers decoded with drafts.

Every answer is decoded twice: without drafts, and with 1 to 8 a pass, each of which is right at
random. A pass of a model with states ends where a state is kept, and leaves drafts out for that:
`passes` is what this costs, beside passes that never do. `told` counts the answers of which
`finish` reported more tokens, or fewer, than the next turn resumes from.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from _measure import arguments, grid, heading

from kvgraft import Cache, TokenKey

SWA: dict[str, dict[str, Any]] = {"swa": {"window": 1024}}
MAMBA: dict[str, dict[str, Any]] = {"mamba": {"states": 64}}
FULL: dict[str, dict[str, Any]] = {"full": {}}
SETS: dict[str, dict[str, dict[str, Any]]] = {
    "full": FULL,
    "full + swa 1024": FULL | SWA,
    "full + mamba": FULL | MAMBA,
    "full + swa 1024 + mamba": FULL | SWA | MAMBA,
    "swa 1024": SWA,
    "swa 1024 + mamba": SWA | MAMBA,
}
PAGE_SIZES = (1, 16, 64, 256)
BAR = "most over none at most 64 (states beside windows; 0 else), told 0"
CHANCES = (0.3, 0.6, 0.9)


class Answer(NamedTuple):
    """An answer of a conversation.

    Attributes:
        prompt: tokens before it.
        right: of each of its tokens, whether a draft of it is right.
        n_drafts: drafts of a pass.
    """

    prompt: int
    right: Sequence[bool]
    n_drafts: int


class Turn(NamedTuple):
    """The turn after an answer.

    Attributes:
        again: tokens of the conversation so far that it computes again.
        differs: whether `finish` reported another number of cached tokens.
        passes: passes of the model that decoded the answer.
    """

    again: int
    differs: bool
    passes: int


def kept(answer: Answer, at: int, width: int) -> int:
    """Tokens that a pass of so many keeps at a token of the answer: up to the first wrong draft."""
    n = 1
    while n < width and at + n < len(answer.right) and answer.right[at + n]:
        n += 1
    return n


def free_passes(answer: Answer) -> int:
    """Passes that it takes where none ends early."""
    at = n_passes = 0
    while at < len(answer.right):
        at += kept(answer, at, 1 + answer.n_drafts)
        n_passes += 1
    return n_passes


def decode(cache: Cache, answer: Answer, n_drafts: int) -> Turn:
    """Decode an answer with up to so many drafts a pass, and begin the next turn."""
    prompt, end = answer.prompt, answer.prompt + len(answer.right)
    request = cache.begin(TokenKey(range(prompt)), reserve=len(answer.right))
    assert cache.admit(request).admitted
    while request.computed < prompt:
        n_tokens = cache.next_chunk(request)
        assert cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
    n_kept = n_passes = 0
    while request.computed + n_kept < end:
        step = cache.step([request], n_drafts=n_drafts, n_computed=n_kept)
        assert not step.refused
        width = 1 if step.n_tokens is None else int(step.n_tokens[0])
        n_kept = kept(answer, request.computed - prompt, width)
        request.key.extend(range(n_kept))
        n_passes += 1
    cache.step([request], n_tokens=0, n_computed=n_kept)
    key = request.key
    told = cache.finish(request)
    key.extend([1] * 64)
    following = cache.begin(key)
    found = following.anchor_tokens
    cache.abort(following)
    return Turn(end - found, told != found, n_passes)


def measured(
    components: dict[str, dict[str, Any]], page_size: int, answers: list[Answer]
) -> tuple[str, ...]:
    """A row: all answers together."""
    plain: list[Turn] = []
    drafted: list[Turn] = []
    more: list[float] = []
    settings: dict[str, Any] = {"page_size": page_size, "device_tokens": 16384, "payload": False}
    for answer in answers:
        for n_drafts, turns in ((0, plain), (answer.n_drafts, drafted)):
            with Cache.open(components, max_drafts=n_drafts, **settings) as cache:
                turns.append(decode(cache, answer, n_drafts))
        more.append(100 * drafted[-1].passes / free_passes(answer) - 100)
    over = max(one.again - other.again for one, other in zip(drafted, plain))
    return (
        f"{statistics.mean(turn.again for turn in plain):.0f}",
        f"{statistics.mean(turn.again for turn in drafted):.0f}",
        str(max(turn.again for turn in drafted)),
        str(over),
        str(sum(turn.differs for turn in (*plain, *drafted))),
        f"{statistics.mean(more):.1f}",
        f"{max(more):.1f}",
    )


def drawn(n: int) -> list[Answer]:
    """Answers of 1,500 to 2,100 tokens behind about a thousand."""
    draw = random.Random(0)
    answers = []
    for at in range(n):
        prompt, length = draw.randrange(900, 1100), draw.randrange(1500, 2100)
        chance = CHANCES[at % len(CHANCES)]
        right = [draw.random() < chance for _ in range(length)]
        answers.append(Answer(prompt, right, 1 + at % 8))
    return answers


def main() -> None:
    quick = arguments(__doc__).parse_args().quick
    answers = drawn(2 if quick else 12)
    heading("drafts", answers=len(answers), chances=CHANCES, drafts="1 to 8", bar=BAR)
    head = ("components", "page", "again: none", "drafts", "worst", "most over none", "told")
    rows = [
        (name, str(page_size), *measured(components, page_size, answers))
        for name, components in SETS.items()
        for page_size in (PAGE_SIZES[1:2] if quick else PAGE_SIZES)
    ]
    grid((*head, "passes: + %", "worst"), rows)


if __name__ == "__main__":
    main()
