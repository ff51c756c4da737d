"""The loop around the model: a step admits requests, plans passes, computes, returns tokens."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvgraft import ConfigError, KvgraftError, LoadModel
from kvgraft_transformers.attention import attention_of_pass
from kvgraft_transformers.engine.drafting import Drafter, PromptLookup
from kvgraft_transformers.engine.generation import (
    FinishReason,
    Generation,
    GenerationRequest,
    NewToken,
    Work,
)
from kvgraft_transformers.engine.latencies import Latencies
from kvgraft_transformers.engine.measuring import measured_load
from kvgraft_transformers.engine.sampling import Choice, choose
from kvgraft_transformers.engine.schedule import Schedule
from kvgraft_transformers.engine.settings import EngineSettings, EngineTotals
from kvgraft_transformers.errors import PassError
from kvgraft_transformers.memory import ModelMemory, check_chunk
from kvgraft_transformers.probing import cache_argument
from kvgraft_transformers.session import positions
from kvgraft_transformers.session_cache import SessionCache

__all__ = ["Engine"]

LOAD_BACK_WAIT_S = 0.05
"""Longest wait for a load-back if nothing else can run."""

MOST_MISSES = 6
"""Passes in a row whose drafts were all rejected, as far as they are counted."""

PAUSE_S = 0.001
"""Pause while backups hold the pages that requests need, or all requests wait for storage."""


class Engine:
    """Many requests over one model.

    Args:
        memory: the model and its pools.
        settings: limits; defaults are for a small machine.
        clock: monotonic, in seconds.
        drafter: proposes drafts where `settings.max_drafts` allows some; prompt lookup by default.
            `close` closes it, too.

    Raises:
        ConfigError: more drafts than the memory's cache has slots for.

    Attributes:
        totals: counts since it was opened.
        latencies: histograms of its requests' latencies.
        end_tokens: the model's end-of-sequence tokens.

    One thread calls it. A step decodes one token of every running request, or several where drafts
    are accepted, computes chunks of prompts, and waits at most 50 ms where nothing can run;
    eviction under write-back waits for copies, up to the cache's `transfer_timeout_s`.
    """

    def __init__(
        self,
        memory: ModelMemory,
        settings: EngineSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        drafter: Drafter | None = None,
    ) -> None:
        self.memory = memory
        self.model: PreTrainedModel = memory.model
        self.settings = settings or EngineSettings()
        _check_drafts(memory, self.settings.max_drafts)
        self.drafter = drafter or PromptLookup(max(1, self.settings.max_drafts))
        self.totals = EngineTotals()
        self.latencies = Latencies()
        self.schedule = Schedule(memory, self.settings, self.totals, self.latencies, clock)
        self._clock = clock
        self._out: list[NewToken] = []
        self._caches: list[SessionCache] = []
        self.end_tokens = _end_tokens(self.model)
        self._argument = cache_argument(self.model)
        known = inspect.signature(self.model.forward).parameters
        self._keeps_last = "logits_to_keep" in known
        self._vocabulary = self.model.get_input_embeddings().num_embeddings

    @classmethod
    def open(
        cls,
        model: PreTrainedModel,
        settings: EngineSettings | None = None,
        *,
        drafter: Drafter | None = None,
        **memory: Any,
    ) -> Engine:
        """Open an engine with a memory of its own.

        Args:
            model: a decoder with a language-model head.
            settings: limits; recurrent states are kept at multiples of `chunk_tokens`.
            drafter: see `Engine`.
            memory: settings of `ModelMemory.open`, such as `device_tokens`. Without `load`, an
                accelerator's loads and the model's passes are measured first, in about 20 passes.

        Raises:
            UnsupportedModelError: the model keeps something that no component serves; it is named.
            ConfigError: settings that cannot work.
        """
        settings = settings or EngineSettings()
        limits = {"chunk_tokens": settings.chunk_tokens, "max_drafts": settings.max_drafts}
        memory = {**limits, **memory}
        on_device = isinstance(model, PreTrainedModel) and model.device.type != "cpu"
        if on_device and "load" not in memory:
            memory["load"] = cls.measured_load(model, settings, **memory)
        opened = ModelMemory.open(model, **memory)
        try:
            return cls(opened, settings, drafter=drafter)
        except ConfigError:
            opened.close()
            raise

    @classmethod
    def measured_load(
        cls, model: PreTrainedModel, settings: EngineSettings | None = None, **memory: Any
    ) -> LoadModel | None:
        """Measure loads and passes on small pools; the setting `load` for an engine.

        Args:
            model: as for `open`.
            settings: as for `open`.
            memory: as for `open`.

        Returns:
            None if nothing is weighed: without HOST, with a state in every load, if the model's
            context is too short, or if small pools take none of its prompts.
        """
        settings = settings or EngineSettings()
        page_size = memory.get("page_size", 16)
        check_chunk(memory.get("chunk_tokens", settings.chunk_tokens), page_size)
        if not any(memory.get(f"host_{size}") for size in ("tokens", "bytes", "memory")):
            return None
        named = ("chunk_tokens", "page_size", "sparse_on_host")
        sizes = {name: memory[name] for name in named if name in memory}
        n_tokens = settings.step_tokens + 16 * page_size
        sizes |= {"device_tokens": 2 * n_tokens, "host_tokens": n_tokens}
        trial = ModelMemory.open(model, probe_tokens=0, load=None, **sizes)
        try:
            if any(each.is_state for each in trial.cache.tree.components):
                return None
            return measured_load(cls(trial, settings.model_copy(update={"max_drafts": 0})))
        except KvgraftError:
            return None
        finally:
            trial.close()

    # -- requests

    def submit(self, request: GenerationRequest) -> Generation:
        """Submit a request; `step` returns its tokens.

        Raises:
            ConfigError: no token, a token that the model does not have, nothing to produce, more
                tokens than page tables hold or fewer than it must produce, a position to resume at
                outside the prompt, a negative number of `prompt_logprobs`, or a namespace that has
                no name in storage.
        """
        if not request.tokens or request.max_new_tokens < 1:
            raise ConfigError(
                f"request of {len(request.tokens)} tokens, {request.max_new_tokens} new ones; give "
                "at least 1 of each"
            )
        most = self.memory.cache.config.max_tokens
        if most is not None and len(request.tokens) + request.max_new_tokens > most:
            raise ConfigError(
                f"request of {len(request.tokens)} tokens, {request.max_new_tokens} new ones: page "
                f"tables hold max_tokens={most}; ask for fewer, or open the engine with more"
            )
        self.memory.check_tokens(request.tokens)
        named: Sequence[Any] = positions(request.resume_at)
        for each in named:
            whole = isinstance(each, int) and not isinstance(each, bool)
            if not (whole and 0 <= each <= len(request.tokens)):
                raise ConfigError(
                    f"resume_at {each!r} is no position in a prompt of {len(request.tokens)} "
                    "tokens; give tokens from its start"
                )
        if request.prompt_logprobs is not None and request.prompt_logprobs < 0:
            raise ConfigError(
                f"request of prompt_logprobs={request.prompt_logprobs}; give 0 or more, or None"
            )
        if not 0 <= request.min_new_tokens <= request.max_new_tokens:
            raise ConfigError(
                f"request of at least {request.min_new_tokens} new tokens and at most "
                f"{request.max_new_tokens}; give 0 to as many as are allowed"
            )
        device = str(self.memory.device)
        generation = Generation(request, device, self._clock(), self.end_tokens)
        self.schedule.append(generation)
        self.totals.requests += 1
        return generation

    def abort(self, generation: Generation) -> None:
        """Abort a request in any state and free its memory; nothing if it has ended."""
        if generation.finish is not None:
            return
        self.schedule.leave(generation, finished=False)
        generation.finish = FinishReason.ABORTED
        self.totals.aborted += 1

    def end(self, generation: Generation) -> None:
        """End a request whose next tokens are not needed, such as behind a stop sequence.

        It finishes as `STOP`, and its computed data stays cached. Nothing if it has ended.
        """
        if generation.finish is None and self._finish(generation, FinishReason.STOP):
            self.latencies.whole.observe(self._clock() - generation.submitted_at)

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return self.schedule.idle

    @property
    def storing(self) -> bool:
        """Whether data is being stored, which needs calls of `step`."""
        storage = self.memory.cache.storage
        return bool(storage and storage.n_in_flight)

    # -- the loop

    def step(self) -> list[NewToken]:
        """Compute one step's tokens; return the new tokens.

        If a pass of the model fails, its requests end as `FAILED`; an error of the cache about one
        request ends only that one. An exception is the engine's own error, or one of the cache that
        concerns no single request; tokens that were computed before it come with the next step.
        """
        out, schedule = self._out, self.schedule
        self.memory.cache.poll()
        schedule.fetched()
        schedule.arrived(self._fail)
        schedule.admit(self._reject, self._fail)
        schedule.arrived(self._fail)
        batch = schedule.decoding(self._fail, self._propose)
        ran = self._compute_alike(batch)
        budget_tokens = self.settings.step_tokens - sum(work.n_tokens for work in batch)
        ran |= self._compute_alike(schedule.prefilling(budget_tokens, self._fail))
        if not ran and not out and not schedule.idle:
            self._wait()
        self._out = []
        return out

    def run(self) -> Iterator[NewToken]:
        """Step until no request is left."""
        while not self.idle:
            yield from self.step()

    def generate(self, requests: Iterable[GenerationRequest]) -> list[Generation]:
        """Submit requests and run them to their end; returns their generations in order."""
        generations = [self.submit(request) for request in requests]
        for _ in self.run():
            pass
        return generations

    def close(self) -> None:
        """Abort the remaining requests, and close the memory and the drafter."""
        schedule = self.schedule
        for line in (
            *(schedule.running, schedule.loading, schedule.following),
            *(schedule.waiting, schedule.fetching),
        ):
            for generation in list(line):
                self.abort(generation)
        try:
            self.memory.close()
        finally:
            self.drafter.close()

    # -- inside

    def _propose(self, generation: Generation) -> Sequence[int]:
        """Drafts for its next pass, behind the known tokens: no more than it may produce.

        None for some passes where several in a row rejected all.
        """
        if generation.passes_to_skip:
            generation.passes_to_skip -= 1
            return ()
        most = min(self.settings.max_drafts + 1 - generation.n_known, generation.remaining - 1)
        if most <= 0:
            return ()
        drafts = self.drafter.propose(generation.key, most)[:most]
        unknown = [at for at, token in enumerate(drafts) if not 0 <= token < self._vocabulary]
        return drafts[: unknown[0]] if unknown else drafts

    def _compute_alike(self, works: Iterable[Work]) -> bool:
        """Compute the next tokens of each request, with requests that can share a pass in one."""
        alike: dict[tuple[int, int, bool], list[Work]] = {}
        for work in works:
            assert work.generation.session is not None
            computed = work.generation.session.computed
            # models take different code paths to begin a state and to continue one
            kind = min(computed, 1) if self.memory.self_check.padding is None else computed
            kinds = work.n_tokens, kind, work.generation.scores
            alike.setdefault(kinds, []).append(work)
        for together in alike.values():
            self._compute(together)
        return bool(alike)

    def _compute(self, works: Sequence[Work]) -> None:
        """One pass over the next tokens of several requests, of each as many, drafts as well."""
        group = [work.generation for work in works]
        n_new, drafts = works[0].n_tokens, [work.drafts for work in works]
        scores, starts = group[0].scores, [each.n_computed for each in group]
        n_last = n_new if scores else 1 + max(map(len, drafts))
        cache = self._cache_for(group)
        arguments = {**cache.inputs(n_new, drafts), self._argument: cache}
        if self._keeps_last:
            arguments["logits_to_keep"] = n_last
        try:
            # a tenth less per operator call, of which a pass has thousands
            with torch.inference_mode(), attention_of_pass(self.memory):
                output = self.model(use_cache=True, **arguments)
        except PassError as error:  # computed, but the cache cannot take the tokens of some
            output = error.output
        except Exception as error:  # noqa: BLE001 - a model may raise anything; others go on
            for generation in group:
                self._fail(generation, error)
            return
        except BaseException:
            for generation in group:
                self.abort(generation)
            raise
        self.totals.passes += 1
        self.totals.rows += len(group)
        self.totals.computed_tokens += n_new * len(group)
        logits = output.logits[:, -n_last:]
        if scores:
            for generation, start, row in zip(group, starts, logits):
                assert generation.score is not None
                generation.score.note(start, row)
            self._take(group, logits[:, -1])
        elif n_last > 1:
            self._verify(works, logits, cache)
        else:
            self._take(group, logits[:, 0])

    def _cache_for(self, group: Sequence[Generation]) -> SessionCache:
        """The cache of these sessions in this order; reused while the group is the same."""
        sessions = tuple(each.session for each in group if each.session is not None)
        left: list[SessionCache] = []
        for cache in self._caches:
            if cache.sessions == sessions:
                return cache
            # a session is in one group and does not return to former ones
            if any(each.ended or each in sessions for each in cache.sessions):
                cache.release()
            else:
                left.append(cache)
        cache = self.memory.session_cache(sessions)
        self._caches = [*left, cache]
        return cache

    def _take(self, group: Sequence[Generation], logits: torch.Tensor) -> None:
        """Take the next token of each request of a group whose prompt is computed."""
        rows: list[int] = []
        for row, generation in enumerate(group):
            assert generation.session is not None
            if generation.session.error is not None:
                self._fail(generation, generation.session.error)
            elif not generation.n_known:
                rows.append(row)
        if 0 < len(rows) < len(group):
            logits = torch.stack([logits[row] for row in rows])
        for row, choice in zip(rows, self._choose(group, rows, logits)):
            if isinstance(choice, Exception):
                self._fail(group[row], choice)
            else:
                self._hand_out(group[row], choice, self._accept(group[row], choice.token))

    def _verify(self, works: Sequence[Work], logits: torch.Tensor, cache: SessionCache) -> None:
        """The next tokens of requests with drafts: for as long as they are these, and one more.

        Args:
            works: one per row of the batch.
            logits: `[n, 1 + n_drafts, vocabulary]`, of the last tokens; a row has so many drafts or
                fewer.
            cache: of the pass; it is told how many tokens count.
        """
        group = [work.generation for work in works]
        produced: list[list[tuple[Choice, FinishReason | None]]] = [[] for _ in works]
        errors: dict[int, Exception] = {}
        known = [work.n_tokens - len(work.drafts) for work in works]
        rows = list(range(len(works)))
        for at in range(logits.shape[1]):
            places = [at - len(works[row].drafts) - 1 for row in rows]
            chosen = self._choose(group, rows, logits[rows, places])
            going: list[int] = []
            for row, choice in zip(rows, chosen):
                if isinstance(choice, Exception):
                    errors[row] = choice
                    continue
                finish = self._accept(group[row], choice.token)
                produced[row].append((choice, finish))
                if finish is None and works[row].drafts[at : at + 1] == (choice.token,):
                    going.append(row)
            rows = going
        cache.keep([n + max(0, len(tokens) - 1) for n, tokens in zip(known, produced)])
        for row, (work, tokens) in enumerate(zip(works, produced)):
            self._count_drafts(work, max(0, len(tokens) - 1))
            assert work.generation.session is not None
            if work.generation.session.error is not None:
                self._fail(work.generation, work.generation.session.error)
                continue
            for choice, finish in tokens:
                self._hand_out(work.generation, choice, finish)
            if row in errors:
                self._fail(work.generation, errors[row])

    def _count_drafts(self, work: Work, n_accepted: int) -> None:
        """Count a pass's drafts; the more in a row it rejected, the more go without (up to 16)."""
        if not work.n_found:
            return
        generation, n_accepted = work.generation, min(n_accepted, work.n_found)
        self.totals.draft_tokens += work.n_found
        self.totals.accepted_tokens += n_accepted
        generation.misses = 0 if n_accepted else min(generation.misses + 1, MOST_MISSES)
        generation.passes_to_skip = 2**generation.misses // 4

    def _choose(
        self, group: Sequence[Generation], rows: Sequence[int], logits: torch.Tensor
    ) -> Sequence[Choice | Exception]:
        """The next token of some requests of a group, from logits `[len(rows), vocabulary]`."""
        if not rows:
            return []
        try:
            return choose([group[row].sampler for row in rows], logits)
        except RuntimeError as error:  # an error of torch, such as a lost device
            return [error] * len(rows)

    def _accept(self, generation: Generation, token: int) -> FinishReason | None:
        """Take a new token of a request; whether it is the last one."""
        finish = generation.accept(token)
        self.totals.generated_tokens += 1
        if token in self.end_tokens and not generation.request.ignore_end:
            return FinishReason.STOP
        return finish

    def _hand_out(
        self, generation: Generation, choice: Choice, finish: FinishReason | None
    ) -> None:
        """A token that was taken comes out of `step`; the last one ends its request."""
        self._record(generation, finish)
        if finish is None or self._finish(generation, finish):
            self._out.append(NewToken(generation, choice.token, finish, choice))

    def _finish(self, generation: Generation, finish: FinishReason) -> bool:
        """Finish a request; its data stays cached. False if the cache cannot take it."""
        self._catch_up(generation)
        if generation.finish is not None:
            return False
        try:
            self.schedule.leave(generation, finished=True)
        except KvgraftError as error:
            self._fail(generation, error)
            return False
        generation.finish = finish
        self.totals.finished += 1
        return True

    def _catch_up(self, generation: Generation) -> None:
        """Compute verified tokens whose state was lost with drafts, if a page ends with them."""
        session, size = generation.session, self.memory.page_size
        if session is None or not generation.prefilled or session.error is not None:
            return
        n_tokens = generation.n_known - 1
        if n_tokens > 0 and (session.computed + n_tokens) % size == 0:
            self._compute([Work(generation, n_tokens)])

    def _record(self, generation: Generation, finish: FinishReason | None) -> None:
        """Record the latencies of a new token."""
        now, before, latencies = self._clock(), generation.token_at, self.latencies
        if before is None:
            latencies.first_token.observe(now - generation.submitted_at)
        else:
            latencies.between_tokens.observe(now - before)
        if finish is not None:
            latencies.whole.observe(now - generation.submitted_at)
        generation.token_at = now

    def _fail(self, generation: Generation, error: Exception) -> None:
        self.schedule.leave(generation, finished=False)
        generation.finish, generation.error = FinishReason.FAILED, error
        self.totals.failed += 1
        self._out.append(NewToken(generation, None, FinishReason.FAILED))

    def _reject(self, generation: Generation) -> None:
        generation.finish = FinishReason.REJECTED
        self.totals.rejected += 1
        self._out.append(NewToken(generation, None, FinishReason.REJECTED))

    def _wait(self) -> None:
        """Nothing can run: wait for a copy that a request needs or that holds pages.

        It waits for storage as well, but at most `PAUSE_S`.
        """
        for generation in self.schedule.loading:
            assert generation.session is not None
            for transfer in generation.session.request.waits:
                if not transfer.ended:
                    transfer.ticket.wait(LOAD_BACK_WAIT_S)
                    return
        storage = self.memory.cache.storage
        if not (storage and storage.busy):
            time.sleep(PAUSE_S)


def _check_drafts(memory: ModelMemory, max_drafts: int) -> None:
    """Refuse drafts that a memory cannot take.

    Raises:
        ConfigError: its cache has slots for fewer.
    """
    allowed = memory.cache.config.max_drafts
    if max_drafts > allowed:
        raise ConfigError(
            f"EngineSettings: max_drafts={max_drafts}, the memory's cache has max_drafts={allowed};"
            f" open the memory with max_drafts={max_drafts}"
        )


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """A model's end-of-sequence tokens."""
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        ends = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)
