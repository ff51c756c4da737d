"""The generations of one HTTP request, and their text as it comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from kvgraft import ConfigError
from kvgraft_transformers.engine import (
    Choice,
    FinishReason,
    Generation,
    GenerationRequest,
    PromptToken,
)
from kvgraft_transformers.serving.protocol import ApiError, shutdown_refusal
from kvgraft_transformers.serving.replies import Usage
from kvgraft_transformers.serving.text import TextStream, Tokenizer
from kvgraft_transformers.serving.worker import EngineFailureError, EngineWorker, ShutdownError

__all__ = ["Answers", "Piece", "Prompts"]

log = logging.getLogger("kvgraft.serve")


class Piece(NamedTuple):
    """A piece of one answer's text, or its end.

    Attributes:
        answer: the answer's number.
        text: the new text.
        reason: its finish reason, as the API names it; None while it continues.
        choices: its tokens since the last piece if log-probabilities were requested, without the
            token that ended it.
        prompt: the tokens of its prompt with log-probabilities, if a whole answer has them.
    """

    answer: int
    text: str
    reason: str | None
    choices: tuple[Choice, ...] = ()
    prompt: tuple[PromptToken, ...] = ()


class Prompts(NamedTuple):
    """The parts of an answer that tell of its prompt.

    Attributes:
        echoed: the texts that answers begin with, by prompt; none without `echo`.
        tells_all: whether an answer has `prompt_logprobs`.
        choices: whether `logprobs` begin with the prompt's tokens.
        alone: whether the answer is the prompt alone.
    """

    echoed: Sequence[str] = ()
    tells_all: bool = False
    choices: bool = False
    alone: bool = False


class Answers:
    """Runs generations and merges their text.

    Args:
        worker: the engine's thread.
        tokenizer: decodes their text.
        requests: one per answer, in the order of prompts.
        per_prompt: answers per prompt; prompt tokens are counted once for each prompt.
        stops: strings that end an answer.
        usage: updated as they run.
        reasons: finish reasons by number, filled as answers end.
        prompts: the prompts' part in the answers.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of one reply
        self,
        worker: EngineWorker,
        tokenizer: Tokenizer,
        requests: Sequence[GenerationRequest],
        per_prompt: int,
        stops: Sequence[str],
        usage: Usage,
        reasons: dict[int, str],
        prompts: Prompts = Prompts(),  # noqa: B008 - a value
    ) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._stops = stops
        self._per_prompt = per_prompt
        self._usage = usage
        self._reasons = reasons
        self._prompts = prompts
        loop = asyncio.get_running_loop()
        self._scored: list[asyncio.Future[tuple[PromptToken, ...]]] = [
            loop.create_future() for _ in requests[::per_prompt]
        ]
        self._pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._left = len(requests)
        self._tasks = [
            asyncio.create_task(self._answer(index, request))
            for index, request in enumerate(requests)
        ]

    @property
    def ended(self) -> bool:
        """Whether all answers have ended by themselves."""
        return not self._left

    def cancel(self) -> None:
        """Abort running requests; does nothing when all have ended."""
        for task in self._tasks:
            task.cancel()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text of all answers as it comes, until each has ended.

        Raises:
            ApiError: a request was refused, or the engine failed.
        """
        while self._left:
            piece = await self._pieces.get()
            if isinstance(piece, Exception):
                self.cancel()
                raise piece
            if piece.reason is not None:
                self._left -= 1
                self._reasons[piece.answer] = piece.reason
            yield piece

    async def _answer(self, index: int, request: GenerationRequest) -> None:
        try:
            await self._run(index, request)
        except ApiError as error:
            self._pieces.put_nowait(error)
        except ConfigError as error:
            self._pieces.put_nowait(ApiError(str(error)))
        except ShutdownError as error:
            self._pieces.put_nowait(shutdown_refusal(str(error)))
        except EngineFailureError as error:
            self._pieces.put_nowait(ApiError(f"the engine failed: {error}", status=500))
        except Exception as error:
            log.exception("an answer failed")
            reason = f"the server failed: {type(error).__name__}"
            self._pieces.put_nowait(ApiError(reason, status=500))

    async def _run(self, index: int, request: GenerationRequest) -> None:
        text = TextStream(self._tokenizer, self._stops)
        tokens = self._worker.generate(request)
        reason = FinishReason.STOP
        counted = False
        choices: list[Choice] = []
        ends, n_tokens = {*self._worker.engine.end_tokens, *request.stop_tokens}, 0
        try:
            async for new in tokens:
                generation = new.generation
                if new.finish is FinishReason.REJECTED:
                    raise ApiError(
                        f"the request does not fit this server's memory: {generation.decision}",
                        code="context_length_exceeded",
                    )
                if not counted:
                    counted = True
                    self._count_prompt(index, generation.prompt_tokens, generation.cached_tokens)
                    await self._tell_prompt(index, generation)
                    if self._prompts.alone:
                        reason = FinishReason.LENGTH
                        break
                assert new.token is not None
                assert new.choice is not None
                self._usage.completion_tokens += 1
                if new.finish is FinishReason.STOP and new.token in ends:
                    break
                n_tokens += 1
                if new.choice.logprob is not None:
                    choices.append(new.choice)
                said = text.push(new.token, may_stop=n_tokens > request.min_new_tokens)
                if said:
                    self._pieces.put_nowait(Piece(index, said, None, tuple(choices)))
                    choices.clear()
                if text.stopped:
                    break
                if new.finish is not None:
                    reason = new.finish
        finally:
            await tokens.aclose()
        rest = text.finish()
        if rest:
            self._pieces.put_nowait(Piece(index, rest, None, tuple(choices)))
            choices.clear()
        ended = FinishReason.STOP if text.stopped else reason
        self._pieces.put_nowait(Piece(index, "", ended.value, tuple(choices)))

    async def _tell_prompt(self, index: int, generation: Generation) -> None:
        """Begin an answer with its prompt; the first answer of each has the log-probabilities."""
        told, first = self._prompts, index % self._per_prompt == 0
        scored = self._scored[index // self._per_prompt]
        if first:
            scored.set_result(tuple(generation.score.tokens) if generation.score else ())
        tokens: tuple[PromptToken, ...] = ()
        if told.tells_all or (told.echoed and told.choices):
            tokens = await scored
        if not told.echoed and not told.tells_all:
            return
        text = told.echoed[index // self._per_prompt] if told.echoed else ""
        choices = [Choice(each.token, each.logprob, each.top) for each in tokens]
        has_choices = told.echoed and told.choices
        piece = Piece(
            index,
            text,
            None,
            tuple(choices) if has_choices else (),
            tokens if told.tells_all else (),
        )
        self._pieces.put_nowait(piece)

    def _count_prompt(self, index: int, prompt_tokens: int, cached_tokens: int | None) -> None:
        if index % self._per_prompt == 0:
            self._usage.prompt_tokens += prompt_tokens
            self._usage.cached_tokens += cached_tokens or 0
