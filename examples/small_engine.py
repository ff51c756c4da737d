"""A whole engine around the cache, to copy from: a queue, chunked prefill, batched decode.

    python examples/small_engine.py

Its model is a hybrid: full attention, a sliding window, a recurrent state. Six chats of four turns
share a system prompt, and the device pools hold a few of them: prefixes go to the host and come
back, requests wait, and make room for others. Every answer is compared with the one that the model
gives when it computes everything again. Exits with 1 if one differs.

    submit ─► line ─► loading ─► prefilling ─► decoding ─► done
               ▲         │            │            │
               └─────────┴── retract, back to its place
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from kvgraft import Cache, Outcome, Request, Step, TokenKey
from kvgraft_scheduling import WaitingPlace, WaitingQueue

PAGE, CHUNK, WINDOW = 16, 64, 32
WIDTH, VOCABULARY = 8, 97
FAR = 1 << 30

ATTENTION = {"n_layers": 1, "n_kv_heads": 1, "head_dim": WIDTH, "dtype": "float64"}
STATE = {"n_layers": 1, "conv_dim": 0, "head_dim": WIDTH, "state_dim": 1, "state_dtype": "float64"}
COMPONENTS = {
    "full": ATTENTION,
    "swa": {**ATTENTION, "window": WINDOW},
    "mamba": {**STATE, "states": 24, "host_states": 48},
}
SEES = {"full": FAR, "swa": WINDOW}
"""How many tokens before itself a token attends to."""


class Model:
    """Random weights, one layer per component; tokens in, logits of the last ones out."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(5)
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=random, dtype=torch.float64)
        self.weights = {
            name: torch.randn(3, WIDTH, WIDTH, generator=random, dtype=torch.float64)
            for name in COMPONENTS
        }

    def whole(self, tokens: Sequence[int]) -> list[int]:
        """The next token behind each, where nothing is cached."""
        hidden, at = self.embedding[list(tokens)], torch.arange(len(tokens))
        for name, weights in self.weights.items():
            q, k, v = hidden @ weights
            if name == "mamba":
                hidden = hidden + recurrence(torch.zeros(WIDTH, dtype=torch.float64), k)
            else:
                hidden = hidden + attention(q, k, v, at[:, None] - at, SEES[name])
        return (hidden @ self.embedding.T).argmax(-1).tolist()

    def prefill(self, cache: Cache, request: Request, tokens: Sequence[int]) -> int:
        """One chunk of one request; the next token."""
        start, end = request.computed, request.computed + len(tokens)
        hidden = self.embedding[list(tokens)]
        for name, weights in self.weights.items():
            q, k, v = hidden @ weights
            if name == "mamba":
                states = plane(cache, name, "recurrent")
                slot = cache.state_slot(request, name)
                if request.fresh:  # the slot has another's old state
                    states[slot] = 0
                after = recurrence(states[slot], k)
                states[slot] = after[-1]
                hidden = hidden + after
                continue
            at = torch.arange(max(0, start - SEES[name]), end)
            pages = torch.tensor(cache.table(request, name)).long()
            slots = pages[at // PAGE] * PAGE + at % PAGE
            keys, values = plane(cache, name, "k"), plane(cache, name, "v")
            keys[slots[-len(tokens) :]], values[slots[-len(tokens) :]] = k, v
            distance = torch.arange(start, end)[:, None] - at
            hidden = hidden + attention(q, keys[slots], values[slots], distance, SEES[name])
        return int((hidden[-1] @ self.embedding.T).argmax())

    def decode(self, cache: Cache, step: Step, tokens: Sequence[int]) -> list[int]:
        """One token of each request in the step; their next ones."""
        hidden, lengths = self.embedding[list(tokens)], step.seq_lens.long()
        for name, weights in self.weights.items():
            q, k, v = hidden @ weights
            if name == "mamba":
                states = plane(cache, name, "recurrent")
                slots = step.state_slots[name]
                states[slots] = after = 0.9 * states[slots] + torch.tanh(k)
                hidden = hidden + after
                continue
            at = torch.arange(int(lengths.max()))
            pages = cache.table_rows(name)[step.rows].long()
            # behind a request's pages, and before its window, there is no slot of its own
            slots = pages[:, at // PAGE].clamp(min=0) * PAGE + at % PAGE
            keys, values = plane(cache, name, "k"), plane(cache, name, "v")
            keys[step.slot_mapping[name]], values[step.slot_mapping[name]] = k, v
            distance = (lengths[:, None] - 1 - at)[:, None]
            seen = attention(q[:, None], keys[slots], values[slots], distance, SEES[name])
            hidden = hidden + seen[:, 0]
        return (hidden @ self.embedding.T).argmax(-1).tolist()


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, distance: torch.Tensor, sees: int
) -> torch.Tensor:
    """Attention, `[..., n, width]`, of tokens so far behind others, `[..., n, m]`."""
    unseen = (distance < 0) | (distance > sees)
    scores = (q @ k.transpose(-1, -2)).masked_fill(unseen, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def recurrence(state: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """The states after each input, `[n, width]`."""
    states = []
    for each in inputs:
        state = 0.9 * state + torch.tanh(each)
        states.append(state)
    return torch.stack(states)


def plane(cache: Cache, name: str, kind: str) -> torch.Tensor:
    """A component's tensor on the device, a row for each token or state."""
    component = next(each.component for each in cache.mounted if each.name == name)
    return component.device.plane(0, kind).view(-1, WIDTH)


class Ticket:
    """One request of a client.

    Attributes:
        key: its tokens, a conversation's; answers are appended to it.
        n_new: how many tokens to generate.
        output: those generated so far; the last one is not in the key yet while it decodes.
        error: why it was rejected.
        cached: how much of its prompt was cached, and how much of that came from the host.
        retracted: how often it made room for others.
        deferrals_left: how many more rounds it waits while another computes what it would resume
            from.
        place: its place in line.
    """

    def __init__(self, key: TokenKey, n_new: int) -> None:
        self.key = key
        self.n_new = n_new
        self.output: list[int] = []
        self.error = ""
        self.cached = self.from_host = self.retracted = 0
        self.deferrals_left = 8
        self.place: WaitingPlace[Ticket] | None = None

    @property
    def done(self) -> bool:
        return bool(self.error) or len(self.output) == self.n_new


class Engine:
    """Serves tickets; call `step` until nothing is left to do."""

    def __init__(self, model: Model, cache: Cache) -> None:
        self.model = model
        self.cache = cache
        self.line: WaitingQueue[Ticket] = WaitingQueue()
        self.prefilling: dict[Request, Ticket] = {}
        self.decoding: dict[Request, Ticket] = {}

    def submit(self, ticket: Ticket) -> None:
        self.line.append(ticket)

    def step(self) -> bool:
        """One round of the scheduler; False if nothing is left to do."""
        self.cache.poll()  # takes in copies that ended
        self._admit()
        self._prefill()
        self._decode()
        return bool(self.line or self.prefilling or self.decoding)

    def _admit(self) -> None:
        for ticket in self.line.round():
            n_left = ticket.n_new - len(ticket.output)
            request = self.cache.begin(
                ticket.key, reserve=n_left, chunk=CHUNK, max_deferrals=ticket.deferrals_left
            )
            decision = self.cache.admit(request)
            if decision.admitted:
                self.cache.load_back(request)
                if not ticket.retracted:
                    ticket.cached = request.anchor_tokens
                    ticket.from_host = request.anchor_tokens - request.device_tokens
                self.prefilling[request] = ticket
            else:
                ticket.deferrals_left = request.deferrals_left
                self.cache.abort(request)  # its lease would hold room
            if decision.outcome is Outcome.NEVER_FITS:
                ticket.error = str(decision)
            if decision.outcome is not Outcome.DEFERRED:
                ticket.place = self.line.take(ticket)

    def _prefill(self) -> None:
        for request, ticket in [*self.prefilling.items()]:
            if not request.ready:  # copies from the host are on their way
                continue
            if request.load_failed:
                self.cache.restart(request)
                if not self.cache.admit(request).admitted:
                    self.cache.abort(request)
                    self._back(self.prefilling, request)
                continue
            n_tokens = self.cache.next_chunk(request)
            if not n_tokens or not self.cache.allocate(request, n_tokens):
                continue
            start = request.computed
            sampled = self.model.prefill(
                self.cache, request, ticket.key.tokens(start, start + n_tokens).tolist()
            )
            self.cache.computed(request, n_tokens)
            self.cache.checkpoint(request)  # others resume from here already
            if request.computed == request.prompt:
                ticket.output.append(sampled)
                self.decoding[request] = self.prefilling.pop(request)

    def _decode(self) -> None:
        ended = [request for request, ticket in self.decoding.items() if ticket.done]
        self.cache.step(ended, n_tokens=0)  # notes the last pass of each
        for request in ended:
            self.cache.finish(request)
            del self.decoding[request]
        if not self.decoding:
            return
        sampled = [ticket.output[-1] for ticket in self.decoding.values()]
        step = self.cache.step([*self.decoding], sampled)
        for request in step.refused:  # only beyond a reservation, and here all is reserved
            self.cache.retract(request)  # what it computed stays cached
            ticket = self._back(self.decoding, request)
            ticket.key.extend(ticket.output[-1:])
        if step.requests:
            tokens = [self.decoding[each].output[-1] for each in step.requests]
            for request, token in zip(step.requests, self.model.decode(self.cache, step, tokens)):
                self.decoding[request].output.append(token)

    def _back(self, stage: dict[Request, Ticket], request: Request) -> Ticket:
        """A request that made room, or could not be loaded, has its place in line again."""
        ticket = stage.pop(request)
        ticket.retracted += 1
        assert ticket.place is not None
        self.line.put_back(ticket.place)
        return ticket


def main(**settings: Any) -> int:
    """Serve the chats and compare every answer; 1 if one is wrong. Settings: those of a cache."""
    torch.set_num_threads(1)  # of small tensors
    model, random = Model(), torch.Generator().manual_seed(1)

    def words(n_tokens: int) -> list[int]:
        return torch.randint(VOCABULARY, (n_tokens,), generator=random).tolist()

    pools = {"page_size": PAGE, "device_tokens": 1024, "host_tokens": 4096}
    cache = Cache.open(COMPONENTS, **{**pools, **settings})
    engine, system, n_wrong = Engine(model, cache), words(100), 0
    chats = [TokenKey(system, namespace="demo") for _ in range(6)]
    print("turn   prompt tokens   cached   of that from the host   right answers")
    for turn in range(4):
        tickets = []
        for key in chats:
            key.extend(words(40))
            tickets.append(Ticket(key, n_new=24))
        prompts = [key.tokens().tolist() for key in chats]
        for ticket in tickets:
            engine.submit(ticket)
        while engine.step():
            pass
        for error in {ticket.error for ticket in tickets if ticket.error}:
            print(f"rejected: {error}")
        n_right = 0
        for ticket, prompt in zip(tickets, prompts):
            expected = model.whole(prompt + ticket.output)[len(prompt) - 1 : -1]
            n_right += len(expected) == ticket.n_new and ticket.output == expected
            ticket.key.extend(ticket.output[-1:])  # the last one was not computed
        n_wrong += len(tickets) - n_right
        print(
            f"{turn + 1:4}   {sum(map(len, prompts)):13,}   {sum(t.cached for t in tickets):6,}   "
            f"{sum(t.from_host for t in tickets):21,}   {n_right} of {len(tickets)}"
        )
    cache.close()
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
