"""Logits after restored prefixes, compared with those of one pass over all tokens.

The contract compares a component with its own declaration. Only the model shows whether the
declared reach is its own, and whether the restored bytes are right. Here it runs after prefixes
that end at every page boundary, were computed in every way, and come back from every tier.

    write     a request leaves a prefix: its prompt ends there, goes on, or was decoded
    move      nothing, all of it, or the part of one component leaves DEVICE
    garble    every free slot is overwritten
    restore   another request resumes from it, and its logits are compared
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from kvgraft.cache import Cache
from kvgraft.config import parse_config
from kvgraft.errors import ConfigError
from kvgraft.packages.registry import Plugin, select
from kvgraft.requests.request import Request
from kvgraft.transfers import Fence, PlaneCopy, Ticket
from kvgraft.tree.keys import TokenKey
from kvgraft.types import Tier
from kvgraft_testing.stepped import SteppedTransferEngine

__all__ = ["LogitsDifference", "LogitsReport", "PooledModel", "check_restored_logits"]

LEAST_PAGES, MOST_PAGES = 8, 128
"""Pages of a sequence; the work grows with their square."""

GARBAGE = 500
"""The value of garbled elements: finite, so that a masked weight of 0 times it is 0."""

Move = Callable[[Cache], None]


class PooledModel(Protocol):
    """A model that runs with a cache's pools, and without.

    Attributes:
        vocabulary: token ids are `0` to `vocabulary - 1`.
    """

    vocabulary: int

    def whole(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits `[len(tokens), vocabulary]` of a sequence, computed at once without a cache."""

    def step(self, cache: Cache, request: Request, tokens: Sequence[int]) -> torch.Tensor:
        """Logits `[len(tokens), vocabulary]` of a request's next tokens.

        `request.computed` tokens come before them. Read their data from the slots in `cache.table`
        and `cache.state_slot`, and write the new tokens' data there; all slots are allocated. Slots
        hold garbage before they are written: initialize states if `request.computed` is 0.
        """


class LogitsDifference(NamedTuple):
    """A run whose logits differ from those of the whole sequence.

    Attributes:
        restored: tokens it resumed from; 0 for a run without a prefix.
        origin: how the prefix was computed: `prompt`, `inside` or `decoded`.
        place: where it was: `device`, `host`, or `host: NAME` if only that component's data was
            there.
        position: the first token whose logits differ.
        distance: the largest difference of two logits; NaN if one is none.
    """

    restored: int
    origin: str
    place: str
    position: int
    distance: float

    def __str__(self) -> str:
        where = f"behind {self.restored} restored tokens ({self.origin}, {self.place})"
        if not self.restored:
            where = "without a restored prefix"
        return (
            f"{where}: logits differ by {self.distance:.3g}, first those of token {self.position}"
        )


class LogitsReport(NamedTuple):
    """The result of `check_restored_logits`.

    Attributes:
        runs: comparisons made.
        restored: by the place of the prefix, the resumed lengths in tokens.
        distance: the largest difference of two logits.
        tolerance: the largest one that is allowed.
        differences: runs beyond it; empty if the components serve the model.
    """

    runs: int
    restored: Mapping[str, tuple[int, ...]]
    distance: float
    tolerance: float
    differences: tuple[LogitsDifference, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.runs} runs, {len(self.differences)} of them more than {self.tolerance:g} away; "
            f"the largest distance is {self.distance:.3g}"
        ]
        for place, lengths in self.restored.items():
            said = (
                f"{len(lengths)} lengths, {lengths[0]} to {lengths[-1]} tokens" if lengths else "-"
            )
            lines.append(f"  resumed from {place}: {said}")
        lines += [f"  {each}" for each in self.differences]
        return "\n".join(lines)


def check_restored_logits(
    model: PooledModel,
    components: Mapping[str, Mapping[str, Any]],
    *,
    page_size: int = 4,
    n_tokens: int | None = None,
    tolerance: float = 1e-5,
    plugins: Sequence[Plugin] = (),
    **settings: Any,
) -> LogitsReport:
    """Compare a model's logits after restored prefixes with those of one pass over all tokens.

    Each run has a cache of its own. Prefixes end at every page boundary of a fixed sequence of
    random tokens. The work grows with the square of the sequence: give the model small windows, few
    layers and elements, and float64, whose rounding hides nothing.

    Args:
        model: runs with the pools, and without.
        components: the components that serve its layers, with their options, as in
            `CacheConfig.components`.
        page_size: tokens per page.
        n_tokens: length of the sequence; by default twice the widest bounded reach and four pages,
            so that every border is passed.
        tolerance: the largest difference of two logits that is allowed.
        plugins: packages to use instead of installed ones.
        settings: more of `CacheConfig`, such as `device`. Pools hold four sequences by default.

    Raises:
        ConfigError: a setting that cannot work, a sequence that is too short or too long, or
            components from which nothing was ever restored, with their reasons.
    """
    check = _Check(model, components, page_size, n_tokens, tolerance, plugins, settings)
    return check.run()


class _AtOnce(SteppedTransferEngine):
    """Runs every copy when it is submitted: threads would take longer than these small ones."""

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        """As in `TransferEngine`."""
        ticket = super().submit(copies, fence)
        self.run_all()
        return ticket


class _Check:
    """One call of `check_restored_logits`."""

    def __init__(
        self,
        model: PooledModel,
        components: Mapping[str, Mapping[str, Any]],
        page_size: int,
        n_tokens: int | None,
        tolerance: float,
        plugins: Sequence[Plugin],
        settings: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.tolerance = tolerance
        given = {plugin.name for plugin in plugins}
        packages = dict.fromkeys(name.partition("@")[0] for name in components)
        # found once: every run opens a cache
        self.plugins = [*plugins, *select([name for name in packages if name not in given])]
        self.page_size = page_size
        self.settings: dict[str, Any] = {
            "components": {name: dict(options) for name, options in components.items()},
            "page_size": page_size,
            "load": None,
            **settings,
        }
        self.n_tokens = self._length(n_tokens)
        room = 4 * (self.n_tokens + 4 * page_size) // page_size * page_size
        self.settings = {"device_tokens": room, "host_tokens": room, **self.settings}
        draw = random.Random(1)
        # decoding passes a page boundary
        self.decoded = page_size + 1
        self.tokens = draw.choices(range(model.vocabulary), k=self.n_tokens + self.decoded)
        self.others = draw.choices(range(model.vocabulary), k=self.n_tokens + self.decoded)
        self.expected = model.whole(self.tokens).detach().double().cpu()
        self.runs = 0
        self.distance = 0.0
        self.restored: dict[str, set[int]] = {}
        self.differences: list[LogitsDifference] = []
        self.why_not = ""

    def _length(self, n_tokens: int | None) -> int:
        with self._open(64 * self.page_size) as cache:
            widths = [each.component.reach.width_tokens for each in cache.mounted]
        size = self.page_size
        if n_tokens is None:
            widest = max([width for width in widths if math.isfinite(width)], default=0)
            n_tokens = max(LEAST_PAGES, 2 * math.ceil(widest / size) + 4) * size
        if not 2 * size <= n_tokens <= MOST_PAGES * size:
            raise ConfigError(
                f"sequence of {n_tokens} tokens in pages of {size}: give n_tokens of 2 to "
                f"{MOST_PAGES} pages, and a model with windows or chunks that fit into it"
            )
        return n_tokens

    def _open(self, tokens: int | None = None) -> Cache:
        sizes = {} if tokens is None else {"device_tokens": tokens, "host_tokens": tokens}
        config = parse_config({**sizes, **self.settings})
        transfers = _AtOnce() if config.device == "cpu" else None
        return Cache(config, plugins=self.plugins, transfers=transfers)

    def run(self) -> LogitsReport:
        with self._open() as cache:
            _garble(cache)
            self._compare(
                cache, self._begin(cache, self.tokens[: self.n_tokens]), "prompt", "device"
            )
            moves = dict(_moves(cache))
        self.restored = {place: set() for place in moves}
        for end in range(self.page_size, self.n_tokens, self.page_size):
            for origin in ("prompt", "inside", "decoded"):
                for place, move in moves.items():
                    self._try(end, origin, place, move)
        if not any(self.restored.values()):
            raise ConfigError(f"nothing was restored in {self.runs} runs; {self.why_not}")
        return LogitsReport(
            self.runs,
            {place: tuple(sorted(lengths)) for place, lengths in self.restored.items()},
            self.distance,
            self.tolerance,
            tuple(self.differences),
        )

    def _try(self, end: int, origin: str, place: str, move: Move) -> None:
        """Leave a prefix of `end` tokens in a cache, and resume from it."""
        with self._open() as cache:
            _garble(cache)
            self._write(cache, end, origin)
            _settle(cache)
            move(cache)
            _settle(cache)
            _garble(cache)
            request = self._begin(cache, self.tokens[: self.n_tokens], resume_at=end)
            if request.anchor_tokens:
                self.restored[place].add(request.anchor_tokens)
                self._compare(cache, request, origin, place)
            else:
                self.why_not = " ".join(str(cache.explain(request.key)).split())
                cache.abort(request)
            cache.check_integrity()

    def _write(self, cache: Cache, end: int, origin: str) -> None:
        """A request that computes the prefix, and perhaps goes on behind it."""
        prefix, size = self.tokens[:end], self.page_size
        prompt = prefix[:size] if origin == "decoded" else prefix
        behind = [*self.others[: max(2 * size, self.n_tokens - end)]] if origin == "inside" else []
        rest = prefix[size:] if origin == "decoded" else []
        request = self._begin(cache, prompt + behind, reserve=len(rest), resume_at=end)
        for _ in self._steps(cache, request, rest):
            pass
        cache.finish(request)

    def _begin(
        self, cache: Cache, prompt: Sequence[int], reserve: int | None = None, resume_at: int = 0
    ) -> Request:
        """An admitted request whose prefix has arrived."""
        reserve = self.decoded if reserve is None else reserve
        ends = [resume_at] if resume_at <= len(prompt) else []
        request = cache.begin(
            TokenKey(prompt), reserve=reserve, chunk=2 * self.page_size, resume_at=ends
        )
        decision = cache.admit(request)
        if not decision.admitted:
            raise ConfigError(f"a sequence of {len(prompt)} tokens does not fit: {decision}")
        cache.load_back(request)
        _settle(cache)
        if not request.ready or request.load_failed:
            raise ConfigError("a load-back did not arrive; check the component's copies")
        return request

    def _steps(
        self, cache: Cache, request: Request, decoded: Sequence[int]
    ) -> Iterator[torch.Tensor]:
        """Logits of the rest of the prompt, chunk by chunk, and of each decoded token."""
        while request.computed < request.prompt:
            yield self._step(cache, request, cache.next_chunk(request))
            cache.checkpoint(request)
        for token in decoded:
            request.key.extend([token])
            yield self._step(cache, request, 1)

    def _step(self, cache: Cache, request: Request, n_tokens: int) -> torch.Tensor:
        if not n_tokens or not cache.allocate(request, n_tokens):
            raise ConfigError("no slots for a chunk; give larger device_tokens")
        start = request.computed
        tokens = request.key.tokens(start, start + n_tokens).tolist()
        logits = self.model.step(cache, request, tokens)
        cache.computed(request, n_tokens)
        return logits.detach().double().cpu()

    def _compare(self, cache: Cache, request: Request, origin: str, place: str) -> None:
        start = request.computed
        steps = self._steps(cache, request, self.tokens[self.n_tokens :])
        logits, expected = torch.cat(list(steps)), self.expected[start:]
        if logits.shape != expected.shape:
            raise ConfigError(
                f"model.step gave logits {list(logits.shape)}, model.whole {list(expected.shape)} "
                f"behind token {start}; give [n_tokens, vocabulary]"
            )
        cache.finish(request)
        distances = (logits - expected).abs().amax(dim=-1)
        self.runs += 1
        worst = float(distances.max())
        self.distance = math.nan if math.isnan(worst) else max(self.distance, worst)
        wrong = (~(distances <= self.tolerance)).nonzero()
        if len(wrong):
            position = start + int(wrong[0])
            self.differences.append(LogitsDifference(start, origin, place, position, worst))


def _moves(cache: Cache) -> Iterator[tuple[str, Move]]:
    """Ways in which a prefix leaves DEVICE, by name."""

    def leave(*names: str) -> Move:
        def move(cache: Cache) -> None:
            for each in cache.tree.components:
                if each.name in names:
                    cache.evict(each.name, each.device.capacity, Tier.DEVICE)

        return move

    yield "device", leave()
    names = [each.name for each in cache.tree.components]
    if any(each.host is not None for each in cache.tree.components):
        yield "host", leave(*names)
        for name in names[1:]:  # where the widest reach's data goes, all goes
            yield f"host: {name}", leave(name)


def _settle(cache: Cache) -> None:
    """Wait for all copies."""
    if not cache.drain():
        raise ConfigError(f"copies did not end in {cache.config.transfer_timeout_s} s")


def _garble(cache: Cache) -> None:
    """Overwrite every free slot, so that reading one shows."""
    for mounted in cache.mounted:
        component = mounted.component
        free = component.device.allocator.free_slots()
        for plane in component.device.planes:
            plane[free] = GARBAGE if plane.is_floating_point() else 7
        if component.host is not None:
            free = component.host.allocator.free_slots()
            for spec in component.host.specs:
                plane = component.host.plane(spec.layer, spec.name)
                plane[free] = GARBAGE if plane.is_floating_point() else 7
