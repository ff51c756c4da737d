"""Checks that a model's output behind a reused prefix equals that of one pass, before serving.

Shapes do not show everything: a scan may restart at every chunk, a mask may ignore the window,
positions may count padding. So sessions run on small pools as they will in service, and their
output is compared with the plain model's:

    chunks      0 ....|....|....|              one page each, shared at the end
    resumed                      ....|.|.      behind the shared pages, then token by token
    batch                              ..      beside another sequence of the same length
    padded                               .|..  beside a shorter one

Sums in another order round differently. The bound is the plain model's own difference between
passes of different lengths. If a sequence exceeds it, two others are tried, because experts and
indexers choose between near ties.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvgraft_transformers.architecture import Architecture, read_architecture
from kvgraft_transformers.errors import UnsupportedModelError
from kvgraft_transformers.probing import (
    cache_argument,
    describe_failure,
    layer_modules,
    plain_cache,
    takes_positions,
    widened,
)
from kvgraft_transformers.window_check import check_wide_window

if TYPE_CHECKING:
    from kvgraft_transformers.memory import ModelMemory
    from kvgraft_transformers.session import Session

__all__ = ["NOT_CHECKED", "SelfCheck", "check_reuse"]

PAGE_TOKENS = 16
"""Tokens per page and per chunk; fewer if the model's context is short."""

TAIL_TOKENS = (5, 1, 1, 2, 1, 2)
"""Tokens of each pass behind the shared pages: resumed, token by token, in a batch, padded."""

TRIES = 3
"""A model is refused if all of so many sequences differ."""

AGREE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Relative distance of logits, median over a pass, that always counts as rounding."""

STATE_AGREE = 1e-3
"""The same for a layer's whole recurrent state; recurrences accumulate in float32."""

NOISE, GROSS = 8.0, 0.25
"""Multiple of the plain model's own rounding that still counts as rounding, and its limit."""

WIDENED_AGREE = 2e-3
"""The same for half-precision weights in float32, whose tables were rounded."""

WIDEN_NBYTES = 1 << 30
"""Largest float32 copy of half-precision weights that is made for the comparison."""

OpenTrial = Callable[[Architecture, int, int], "ModelMemory"]


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The comparisons made when a model's memory was opened.

    Attributes:
        n_tokens: tokens of the longest sequence that ran; 0 if nothing was compared.
        padding: why sequences of different lengths cannot share a pass; None if they can.
    """

    n_tokens: int
    padding: str | None


NOT_CHECKED = SelfCheck(0, None)


class _Plan(NamedTuple):
    """Lengths in one trial."""

    page: int
    shared: int

    @property
    def n_tokens(self) -> int:
        return self.shared + sum(TAIL_TOKENS)

    @property
    def short(self) -> int:
        return self.page + 3 + sum(TAIL_TOKENS[-2:])


class _DiffersError(Exception):
    """The output of a trial differs from the plain model's."""


def check_reuse(
    model: PreTrainedModel,
    architecture: Architecture,
    open_trial: OpenTrial,
    *,
    sparse_on_host: bool,
    probe_tokens: int,
) -> SelfCheck:
    """Compare sessions of a model with the plain model.

    Args:
        model: the model, in evaluation mode, without gradients.
        architecture: the model's data per layer.
        open_trial: opens a memory for an architecture, a page size and a number of tokens.
        sparse_on_host: as in the memory that will be opened.
        probe_tokens: most tokens of a sequence; `kvgraft_transformers.window_check` also compares
            windows at their edge.

    Raises:
        UnsupportedModelError: a session's output differs, or a pass fails; the layer is named if it
            is known.
    """
    plan = _plan(model, architecture, probe_tokens)
    if plan is None:
        return NOT_CHECKED
    windows = _windows(architecture)
    try:
        padding = _Trial(model, architecture, open_trial, plan).run()
        if _can_widen(model):
            with widened(model):
                precise = _precise_trial(model, open_trial, plan, sparse_on_host=sparse_on_host)
                if precise is not None:
                    padding = precise.run()
                for window in windows:
                    check_wide_window(model, window, WIDENED_AGREE)
        else:
            for window in windows:
                check_wide_window(model, window, AGREE.get(model.dtype, GROSS))
    except UnsupportedModelError:
        raise
    except _DiffersError as error:
        raise UnsupportedModelError(model, str(error)) from None
    except Exception as error:
        raise UnsupportedModelError(
            model, f"does not run in a session: {describe_failure(model, error)}"
        ) from error
    return SelfCheck(plan.n_tokens, padding)


def _precise_trial(
    model: PreTrainedModel, open_trial: OpenTrial, plan: _Plan, *, sparse_on_host: bool
) -> _Trial | None:
    """A trial in float32; None if the model cannot compute in it."""
    try:
        architecture = read_architecture(model, sparse_on_host=sparse_on_host)
    except UnsupportedModelError:
        return None
    return _Trial(model, architecture, open_trial, plan, WIDENED_AGREE)


def _can_widen(model: PreTrainedModel) -> bool:
    """Whether half-precision weights are few and plain enough to compute in float32."""
    narrow = {each.dtype for each in model.parameters()} & {torch.float16, torch.bfloat16}
    return (
        bool(narrow)
        and not getattr(model, "is_quantized", False)
        and getattr(model, "hf_device_map", None) is None
        and str(model.config._attn_implementation) in ("eager", "sdpa", "flex_attention")
        and 4 * sum(each.numel() for each in model.parameters()) <= WIDEN_NBYTES
    )


def _windows(architecture: Architecture) -> list[int]:
    return sorted({plan.window for plan in architecture.layers if plan.window is not None})


def _plan(model: PreTrainedModel, architecture: Architecture, probe_tokens: int) -> _Plan | None:
    """Lengths within the model's context; None if it or `probe_tokens` is too short."""
    config = model.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None) or probe_tokens
    most = min(probe_tokens, int(context)) - sum(TAIL_TOKENS)
    page = PAGE_TOKENS
    while 3 * page > most:
        page //= 2
        if not page:
            return None
    needed = [each + page for each in _windows(architecture) if each + 2 * page <= most]
    return _Plan(page, max([3 * page, *(-(-each // page) * page for each in needed)]))


class _Trial:
    """Sessions of one model on pools of their own."""

    def __init__(
        self,
        model: PreTrainedModel,
        architecture: Architecture,
        open_trial: OpenTrial,
        plan: _Plan,
        agree: float | None = None,
    ) -> None:
        self.model = model
        self.architecture = architecture
        self.plan = plan
        self._open = open_trial
        found = max(AGREE.get(each.dtype, 0.0) for each in model.parameters())
        self._agree = found if agree is None else agree
        self._bound = self._agree

    def run(self) -> str | None:
        """Compare; returns why padded batches differ, None if they do not.

        Raises:
            _DiffersError: every sequence differs from the plain model.
        """
        padding: str | None = None
        for seed in range(TRIES):
            try:
                padding = self._compare(random.Random(seed))
            except _DiffersError:
                if seed == TRIES - 1:
                    raise
                continue
            if padding is None:
                break
        return padding

    def _compare(self, source: random.Random) -> str | None:
        plan = self.plan
        tokens = draw_tokens(self.model, source, plan.n_tokens)
        other = tokens[: plan.shared] + draw_tokens(self.model, source, sum(TAIL_TOKENS[:4]))
        short = draw_tokens(self.model, source, plan.short)
        expected = {id(each): self._plain(each) for each in (tokens, other, short)}
        self._measure_noise(tokens, expected[id(tokens)])
        self._check_states(tokens[: plan.shared])
        with self._open(self.architecture, plan.page, 4 * plan.n_tokens) as memory:
            run = _Run(memory, expected)
            with memory.session(tokens[: plan.shared], chunk_tokens=plan.page) as session:
                chunks = [
                    run(0, [(session, tokens)], plan.page) for _ in range(plan.shared // plan.page)
                ]
            for distances in chunks:
                self._agreed("in chunks", distances, tokens, memory)
            first, second, third = (
                memory.session(each, chunk_tokens=plan.page) for each in (tokens, other, short)
            )
            if first.computed != plan.shared:
                raise RuntimeError(f"resumed at {first.computed}, not at {plan.shared}")
            passes = [run(0, [(first, tokens)], n) for n in TAIL_TOKENS[:3]]
            self._agreed("behind a reused prefix", torch.cat(passes), tokens, memory)
            run(0, [(second, other)], sum(TAIL_TOKENS[:3]))
            pair = [(first, tokens), (second, other)]
            n_batch = TAIL_TOKENS[3]
            both = run.all(pair, n_batch)
            self._agreed("in a batch", torch.cat(both), tokens, memory)
            run(0, [(third, short)], plan.page + 3)
            return self._try_padding(run, [(first, tokens), (third, short)])

    def _try_padding(self, run: _Run, pair: list[tuple[Session, list[int]]]) -> str | None:
        try:
            passes = [run.all(pair, n) for n in TAIL_TOKENS[4:]]
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            return describe_failure(self.model, error)
        distance = max(float(torch.cat(rows).median()) for rows in zip(*passes))
        if distance <= self._bound:
            return None
        return (
            f"a row's logits are {distance:.1g} from those it has alone (rounding: "
            f"{self._bound:.1g})"
        )

    def _agreed(
        self, how: str, distances: torch.Tensor, tokens: list[int], memory: ModelMemory
    ) -> None:
        distance = float(distances.median())
        if distance <= self._bound:
            return
        layer = self._first_layer(tokens, memory)
        raise _DiffersError(
            f"a sequence {how} is answered differently from one pass: logits are {distance:.1g} "
            f"apart (rounding: {self._bound:.1g}){layer}; a reused prefix would change answers"
        )

    def _measure_noise(self, tokens: list[int], expected: torch.Tensor) -> None:
        """Measure the distance between a pass and a slightly shorter one.

        Raises:
            _DiffersError: almost every token differs, so tokens depend on later ones.
        """
        noise = 0.0
        for cut in (1, self.plan.page + 1):
            prefix = self._plain(tokens[:-cut])
            distances = distance_of(prefix, expected[: len(prefix)])
            differing = distances > self._agree
            if float(differing.float().mean()) > 0.75:
                advice = (
                    "; set is_decoder=True in its configuration"
                    if getattr(self.model.config, "is_decoder", True) is False
                    else ""
                )
                raise _DiffersError(
                    "is not causal: its output for a token changes with the tokens behind it "
                    f"(by {float(distances.median()):.1g}), so no prefix can be reused{advice}"
                )
            noise = max(noise, float(distances.max()))
        self._bound = max(self._agree, min(NOISE * noise, GROSS))

    def _check_states(self, tokens: list[int]) -> None:
        """Compare recurrent states after chunks with those after one pass.

        A lost state changes entirely, though the model's output may change little.

        Raises:
            _DiffersError: it names the layer.
        """
        if not self.architecture.of_package("mamba"):
            return
        bound = max(STATE_AGREE, self._agree)
        whole, pieces = plain_cache(self.model), plain_cache(self.model)
        self._plain(tokens, whole)
        for start in range(0, len(tokens), self.plan.page):
            self._plain(tokens[start : start + self.plan.page], pieces, start)
        for index, (one, other) in enumerate(zip(whole.layers, pieces.layers)):
            for expected, given in zip(_states(one), _states(other)):
                distance = float(
                    distance_of(given.float().flatten()[None], expected.float().flatten()[None])
                )
                if not distance <= bound:
                    raise _DiffersError(
                        f"layer {index}: the state that a sequence in chunks leaves is "
                        f"{distance:.1g} from that of one pass (rounding: {bound:.1g}), so a "
                        "reused prefix would change answers; transformers restarts it, or keeps "
                        "it incompletely"
                    )

    def _plain(
        self, tokens: Sequence[int], cache: Cache | None = None, start: int = 0
    ) -> torch.Tensor:
        """Logits of one plain pass, with transformers' own cache or none, `[n, vocabulary]`."""
        more = {} if cache is None else {cache_argument(self.model): cache}
        output = _forward(self.model, [tokens], [start], use_cache=cache is not None, **more)
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def _first_layer(self, tokens: list[int], memory: ModelMemory) -> str:
        """The first layer whose output in chunks differs from one pass."""
        layers = layer_modules(self.model)
        with _Recorded(layers) as whole:
            self._plain(tokens[: self.plan.shared])
        with (
            _Recorded(layers) as pieces,
            memory.session(tokens, namespace="layers", chunk_tokens=self.plan.page) as session,
        ):
            run = _Run(memory, {id(tokens): self._plain(tokens)})
            pieces.clear()
            for _ in range(self.plan.shared // self.plan.page):
                run(0, [(session, tokens)], self.plan.page)
        for name in layers:
            one, other = whole.get(name), pieces.get(name)
            if one is None or other is None or one.shape != other.shape:
                return ""
            last = slice(-self.plan.page, None)  # behind every crossed window
            if float(distance_of(other[last], one[last]).median()) > self._bound:
                return f", first behind {name}"
        return ""


class _Run:
    """Passes of sessions, compared token by token."""

    def __init__(self, memory: ModelMemory, expected: dict[int, torch.Tensor]) -> None:
        self._memory = memory
        self._expected = expected

    def __call__(
        self, row: int, group: Sequence[tuple[Session, list[int]]], n_tokens: int
    ) -> torch.Tensor:
        """The distances of one row of a pass."""
        return self.all(group, n_tokens)[row]

    def all(self, group: Sequence[tuple[Session, list[int]]], n_tokens: int) -> list[torch.Tensor]:
        """Per row, distances of each sequence's next `n_tokens` tokens from its single pass."""
        memory = self._memory
        sessions = [session for session, _ in group]
        starts = [session.computed for session in sessions]
        rows = [tokens[start : start + n_tokens] for (_, tokens), start in zip(group, starts)]
        more: dict[str, Any] = {}
        if min(starts) < max(starts):
            columns = torch.arange(max(starts) + n_tokens)
            padding = max(starts) - torch.tensor(starts)[:, None]
            more["attention_mask"] = (columns >= padding).long().to(memory.device)
        more[cache_argument(memory.model)] = memory.session_cache(sessions)
        output = _forward(memory.model, rows, starts, use_cache=True, **more)
        return [
            distance_of(logits.float(), self._expected[id(tokens)][start : start + n_tokens])
            for logits, (_, tokens), start in zip(output.logits, group, starts)
        ]


class _Recorded:
    """Records outputs of modules, `[n, hidden]` by name, with passes concatenated."""

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        self._modules = modules
        self._outputs: dict[str, list[torch.Tensor]] = {}

    def __enter__(self) -> _Recorded:
        self._handles = [
            module.register_forward_hook(self._hook(name)) for name, module in self._modules.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def record(_: Any, __: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, torch.Tensor):
                self._outputs.setdefault(name, []).append(hidden.reshape(-1, hidden.shape[-1]))

        return record

    def clear(self) -> None:
        self._outputs.clear()

    def get(self, name: str) -> torch.Tensor | None:
        outputs = self._outputs.get(name)
        return None if outputs is None else torch.cat(outputs).float()


def distance_of(given: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative distance of each row, `[n]`: 0 for equal rows, about 1 for unrelated ones."""
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    distance = (given - expected).norm(dim=-1) / spread.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.nan_to_num(distance, nan=torch.inf)


def _forward(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], starts: Sequence[int], **more: Any
) -> Any:
    """Run one pass, with positions as `generate` gives them if the model takes them."""
    if takes_positions(model):
        positions = torch.tensor(starts)[:, None] + torch.arange(len(rows[0]))
        more["position_ids"] = positions.to(model.device)
    return model(input_ids=torch.tensor(rows, device=model.device), **more)


def _states(layer: Any) -> Iterator[torch.Tensor]:
    """Convolution and recurrent states of a layer of transformers' cache."""
    for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
        for state in states.values():
            if state is not None:
                yield state


def draw_tokens(model: PreTrainedModel, source: random.Random, n_tokens: int) -> list[int]:
    """Random tokens of the vocabulary, without special ones."""
    config = model.config.get_text_config(decoder=True)
    special = {*_special_tokens(config), *_special_tokens(model.config)}
    drawn: list[int] = []
    while len(drawn) < n_tokens:
        token = source.randrange(config.vocab_size)
        if token not in special or config.vocab_size <= len(special):
            drawn.append(token)
    return drawn


def _special_tokens(config: Any) -> Iterator[int]:
    """Token ids a configuration names."""
    for name, value in vars(config).items():
        if name.endswith(("token_id", "token_ids", "token_index")):
            for each in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(each, int):
                    yield each
