"""Every decoder family of transformers that can be made small: accepted and exact, or refused.

    python -m plugins.transformers.tests.survey [FAMILY ...]

prints a line per family and the totals. `test_survey.py` asserts the same, family by family.
"""

from __future__ import annotations

import sys
import warnings
from typing import NamedTuple

import click
import torch
from transformers import PreTrainedModel

from kvgraft_transformers import ModelMemory, UnsupportedModelError
from kvgraft_transformers.engine import Engine, EngineSettings, Generation, GenerationRequest
from kvgraft_transformers.probing import cache_argument, plain_cache, takes_positions

from .families import SURVEYED, build_family

__all__ = ["Verdict", "survey_family"]

TOKENS, CHUNK, NEW = 84, 16, 6


class Verdict(NamedTuple):
    """The outcome of a family.

    Attributes:
        kind: "exact", "exact, no padding", "refused" or "wrong".
        reason: why it was refused, or the fault.
    """

    kind: str
    reason: str = ""


def survey_family(family: str, dtype: torch.dtype = torch.float32) -> Verdict:
    """Open a family's model; where it is accepted, compare sessions and a crowd with it."""
    model = build_family(family, dtype=dtype)
    try:
        memory = ModelMemory.open(model, page_size=16, chunk_tokens=CHUNK, device_tokens=512)
    except UnsupportedModelError as error:
        return Verdict("refused", str(error))
    with memory:
        if not _same_bits(model, memory):
            return Verdict("wrong", "bits behind a reused prefix differ from the same chunks")
        padding = memory.self_check.padding
    wrong = _wrong_answers(model)
    if wrong:
        return Verdict("wrong", wrong)
    return Verdict("exact" if padding is None else "exact, no padding", padding or "")


def _same_bits(model: PreTrainedModel, memory: ModelMemory) -> bool:
    """Whether a session behind a reused prefix says what transformers' own cache says."""
    tokens = _tokens(TOKENS, 1)
    expected = _run(model, tokens, plain_cache(model), 0)
    for _ in range(2):
        with memory.session(tokens, chunk_tokens=CHUNK) as session:
            start = session.computed
            if not torch.equal(_run(model, tokens, session.cache, start), expected[start:]):
                return False
    return start == TOKENS // CHUNK * CHUNK


def _run(model: PreTrainedModel, tokens: list[int], cache: object, start: int) -> torch.Tensor:
    logits = []
    while start < len(tokens):
        end = min(start + CHUNK, len(tokens))
        arguments: dict[str, object] = {cache_argument(model): cache}
        if takes_positions(model):
            arguments["position_ids"] = torch.arange(start, end)[None]
        with torch.no_grad():
            ids = torch.tensor([tokens[start:end]])
            logits.append(model(input_ids=ids, use_cache=True, **arguments).logits[0])
        start = end
    return torch.cat(logits)


def _wrong_answers(model: PreTrainedModel) -> str:
    """Greedy answers of a crowded engine that are not those of the plain model, computed whole.

    Where the best two tokens are closer than rounding, both are right.
    """
    shared = _tokens(40, 2)
    prompts = [shared + _tokens(n, seed) for n, seed in ((5, 3), (30, 4), (12, 5))] + [shared[:21]]
    engine = Engine.open(model, EngineSettings(chunk_tokens=CHUNK), page_size=16, device_tokens=512)
    try:
        answers: list[tuple[list[int], Generation]] = []
        for _ in range(2):
            asked = [GenerationRequest(each, NEW, ignore_end=True) for each in prompts]
            answers += zip(prompts, engine.generate(asked))
    finally:
        engine.close()
    for prompt, generation in answers:
        if generation.error is not None:
            return f"a request fails: {generation.error}"
        sequence = [*prompt, *generation.tokens]
        arguments = (
            {"position_ids": torch.arange(len(sequence))[None]} if takes_positions(model) else {}
        )
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sequence]), use_cache=False, **arguments).logits
        for index, token in enumerate(generation.tokens):
            said = logits[0, len(prompt) + index - 1].float()
            if float(said.max() - said[token]) > CLOSE * float(said.std()):
                return f"answer of a prompt of {len(prompt)} tokens differs at token {index}"
    return ""


CLOSE = 0.05
"""Standard deviations of logits; near ties of experts and indexers move them by as much."""


def _tokens(n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(3, 500, (n,), generator=generator)]


def main(families: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    totals: dict[str, int] = {}
    for family in families or SURVEYED:
        verdict = survey_family(family)
        totals[verdict.kind] = totals.get(verdict.kind, 0) + 1
        click.echo(f"{family:24} {verdict.kind:18} {verdict.reason}")
    click.echo(", ".join(f"{count} {kind}" for kind, count in sorted(totals.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
