"""Workloads from a seed, for demos, tests and machines without a trace.

Each kind has a few distributions with fixed parameters. Lengths are lognormal (given as median and
sigma of the logarithm), sessions begin as a Poisson process, popularity is Zipf. A prompt always
repeats its session so far, outputs included.

Arrival times assume a server without queues: 1 ms per 10 new prompt tokens and 20 ms per output
token, with all earlier tokens cached. Think times do not depend on that.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

from kvgraft_replay.errors import TraceError
from kvgraft_replay.workload import Addresses, Span, TraceRequest, Workload, join_spans

__all__ = [
    "AgentsShape",
    "ChatShape",
    "Length",
    "RagShape",
    "SyntheticKind",
    "synthetic_workload",
]

SyntheticKind = Literal["agents", "chat", "rag"]

PREFILL_TOKENS_PER_S = 10_000.0
OUTPUT_TOKENS_PER_S = 50.0


@dataclass(frozen=True, slots=True)
class Length:
    """A lognormal length in tokens (or seconds), at most `most`."""

    median: float
    sigma: float
    most: float

    def draw(self, random: Random) -> float:
        """A length, not rounded."""
        return min(random.lognormvariate(math.log(self.median), self.sigma), self.most)

    def tokens(self, random: Random) -> int:
        """A length in whole tokens, at least 1."""
        return max(1, round(self.draw(random)))


@dataclass(frozen=True, slots=True)
class AgentsShape:
    """Coding agents: long contexts that grow by many short turns, with sub-agents that branch off.

    A session opens with one of a few preambles (system prompt and tools) and its project, then
    every turn appends a tool result. Sometimes it starts a sub-agent, usually on a fork of the
    parent's context, else on the preamble alone. The sub-agent's turns run before the parent
    continues with a summary of them. Some turns wait for a person.
    """

    sessions_per_s: float = 0.05
    n_preambles: int = 3
    preamble: Length = Length(10_000, 0.3, 30_000)
    project: Length = Length(6_000, 0.8, 60_000)
    turns: Length = Length(25, 0.8, 200)
    tool_result: Length = Length(500, 1.2, 20_000)
    output: Length = Length(200, 0.9, 4_000)
    tool_time_s: Length = Length(3, 0.8, 120)
    person_share: float = 0.1
    person_time_s: Length = Length(60, 1.0, 300)
    subagent_share: float = 0.04
    fork_share: float = 0.7
    subagent_turns: Length = Length(5, 0.6, 20)


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Many conversations of a few turns over a handful of system prompts."""

    sessions_per_s: float = 1.0
    n_preambles: int = 4
    preamble: Length = Length(600, 0.6, 4_000)
    opening: Length = Length(400, 1.4, 30_000)
    message: Length = Length(80, 1.2, 8_000)
    output: Length = Length(250, 0.8, 2_000)
    turns: Length = Length(3, 0.9, 40)
    think_s: Length = Length(40, 1.0, 600)


@dataclass(frozen=True, slots=True)
class RagShape:
    """Short questions behind documents of Zipf popularity, some with a follow-up."""

    sessions_per_s: float = 2.0
    preamble: Length = Length(300, 0.0, 300)
    n_documents: int = 500
    document: Length = Length(4_000, 0.7, 30_000)
    question: Length = Length(40, 0.7, 400)
    output: Length = Length(150, 0.7, 1_000)
    turns: Length = Length(1.2, 0.5, 5)
    think_s: Length = Length(20, 0.8, 300)


class _Turn(NamedTuple):
    """A request of a session before it has an index."""

    think_s: float
    prompt: tuple[Span, ...]
    prompt_tokens: int
    output: Span
    new_tokens: int


_Sessions = Callable[[], Iterator[_Turn]]


TOLD_EVERY = 1000
"""Requests between two reports of progress."""

MOST_REQUESTS = {"agents": 1_000_000, "chat": 2_500_000, "rag": 5_000_000}
"""Most requests: with more, token ids run out, at about 1,550, 710 or 370 new tokens each."""


def synthetic_workload(
    kind: SyntheticKind,
    *,
    requests: int,
    seed: int,
    progress: Callable[[float, float], None] = lambda done, total: None,
) -> Workload:
    """Make a workload; equal arguments give equal workloads.

    Args:
        kind: `"agents"`, `"chat"` or `"rag"`; see `AgentsShape`, `ChatShape`, `RagShape`.
        requests: how many; the first to arrive, so late sessions are cut.
        seed: seed of all randomness.
        progress: called with the number of generated and of requested requests.

    Raises:
        TraceError: an unknown kind, or no requests.
    """
    if requests < 1:
        raise TraceError(f"synthetic {kind}: {requests} requests; ask for at least 1")
    most = MOST_REQUESTS.get(kind, requests)
    if requests > most:
        raise TraceError(
            f"synthetic {kind}: {requests:,} requests have more distinct tokens than int32 has "
            f"numbers; ask for at most {most:,}"
        )
    name = f"{kind}, seed {seed}"
    random, addresses = Random(seed), Addresses(f"synthetic {name}")
    if kind == "agents":
        agents = AgentsShape()
        new_session, per_s = _agents(agents, random, addresses), agents.sessions_per_s
    elif kind == "chat":
        chat = ChatShape()
        new_session, per_s = _chat(chat, random, addresses), chat.sessions_per_s
    elif kind == "rag":
        rag = RagShape()
        new_session, per_s = _rag(rag, random, addresses), rag.sessions_per_s
    else:
        raise TraceError(f"synthetic {kind!r}: unknown kind; use agents, chat or rag")
    return Workload.of(
        _told(_in_order(new_session, per_s, random, requests), requests, progress),
        name=name,
        format="synthetic",
        has_absolute_time=True,
        block_tokens=1,
    )


def _told(
    made: Iterable[TraceRequest], requests: int, progress: Callable[[float, float], None]
) -> Iterator[TraceRequest]:
    for number, each in enumerate(made, start=1):
        if not number % TOLD_EVERY:
            progress(number, requests)
        yield each


class _Context:
    """The tokens that an agent or a conversation has seen; forks share them."""

    def __init__(self, addresses: Addresses, spans: tuple[Span, ...]) -> None:
        self._addresses = addresses
        self._spans = spans
        self._n_tokens = sum(span.length for span in spans)
        self._seen = self._n_tokens

    def fork(self) -> _Context:
        return _Context(self._addresses, self._spans)

    def append(self, n_tokens: int) -> None:
        self._add(self._addresses.take(n_tokens))

    def turn(self, think_s: float, output_tokens: int) -> _Turn:
        """A request for an output, which joins the context."""
        output = self._addresses.take(output_tokens)
        new_tokens = self._n_tokens - self._seen
        turn = _Turn(think_s, self._spans, self._n_tokens, output, new_tokens)
        self._add(output)
        self._seen = self._n_tokens
        return turn

    def _add(self, span: Span) -> None:
        self._spans = join_spans((*self._spans, span))
        self._n_tokens += span.length


def _agents(shape: AgentsShape, random: Random, addresses: Addresses) -> _Sessions:
    preambles = [addresses.take(shape.preamble.tokens(random)) for _ in range(shape.n_preambles)]
    weights = _zipf(shape.n_preambles)

    def turns(context: _Context, n_turns: int) -> Iterator[_Turn]:
        for position in range(n_turns):
            person = position > 0 and random.random() < shape.person_share
            pause = shape.person_time_s if person else shape.tool_time_s
            think_s = pause.draw(random) if position else 0.0
            yield context.turn(think_s, shape.output.tokens(random))
            context.append(shape.tool_result.tokens(random))

    def session() -> Iterator[_Turn]:
        preamble = random.choices(preambles, weights)[0]
        context = _Context(addresses, (preamble,))
        context.append(shape.project.tokens(random))
        for turn in turns(context, shape.turns.tokens(random)):
            yield turn
            if random.random() < shape.subagent_share:
                forks = random.random() < shape.fork_share
                branch = context.fork() if forks else _Context(addresses, (preamble,))
                branch.append(shape.tool_result.tokens(random))
                yield from turns(branch, shape.subagent_turns.tokens(random))

    return session


def _chat(shape: ChatShape, random: Random, addresses: Addresses) -> _Sessions:
    preambles = [addresses.take(shape.preamble.tokens(random)) for _ in range(shape.n_preambles)]
    weights = _zipf(shape.n_preambles)

    def session() -> Iterator[_Turn]:
        context = _Context(addresses, tuple(random.choices(preambles, weights)))
        context.append(shape.opening.tokens(random))
        yield context.turn(0.0, shape.output.tokens(random))
        for _ in range(shape.turns.tokens(random) - 1):
            context.append(shape.message.tokens(random))
            yield context.turn(shape.think_s.draw(random), shape.output.tokens(random))

    return session


def _rag(shape: RagShape, random: Random, addresses: Addresses) -> _Sessions:
    preamble = addresses.take(shape.preamble.tokens(random))
    documents = [addresses.take(shape.document.tokens(random)) for _ in range(shape.n_documents)]
    weights = _zipf(shape.n_documents)

    def session() -> Iterator[_Turn]:
        document = random.choices(documents, weights)[0]
        context = _Context(addresses, join_spans((preamble, document)))
        for position in range(shape.turns.tokens(random)):
            context.append(shape.question.tokens(random))
            think_s = shape.think_s.draw(random) if position else 0.0
            yield context.turn(think_s, shape.output.tokens(random))

    return session


def _zipf(n: int) -> list[float]:
    return [1 / rank for rank in range(1, n + 1)]


def _in_order(
    new_session: _Sessions, sessions_per_s: float, random: Random, n_requests: int
) -> Iterator[TraceRequest]:
    """The first requests to arrive, of sessions that begin as a Poisson process.

    A session generates its next turn when the one before has its place, so no turn is wasted.
    """
    pending: list[tuple[float, int, _Turn, Iterator[_Turn]]] = []
    next_start_s = 0.0
    n_sessions = 0
    for index in range(n_requests):
        while not pending or next_start_s <= pending[0][0]:
            turns = new_session()
            heapq.heappush(pending, (next_start_s, n_sessions, next(turns), turns))
            n_sessions += 1
            next_start_s += random.expovariate(sessions_per_s)
        arrival_s, session, turn, turns = heapq.heappop(pending)
        yield TraceRequest(
            index=index,
            session=session,
            arrival_s=arrival_s,
            think_s=turn.think_s,
            prompt_tokens=turn.prompt_tokens,
            output_tokens=turn.output.length,
            content=join_spans((*turn.prompt, turn.output)),
        )
        following = next(turns, None)
        if following is not None:
            busy_s = (
                turn.new_tokens / PREFILL_TOKENS_PER_S + turn.output.length / OUTPUT_TOKENS_PER_S
            )
            heapq.heappush(
                pending, (arrival_s + busy_s + following.think_s, session, following, turns)
            )
