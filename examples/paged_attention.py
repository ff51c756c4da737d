"""Page tables in a kernel: torch's flex_attention reads a cache's pools where they are.

    python examples/paged_attention.py [cpu | cuda]

Two layers, one of full attention and one of a sliding window. Chats of different lengths join and
leave, share a system prompt, and come back from the host. What the kernel gives for each new token
is compared with attention over the whole sequence, of which nothing is cached. Exits with 1 if it
differs.

    cache.step ──► DeviceTables.upload ──► write new keys and values by slot ──► kernel
     numpy            one copy                     index_copy_                  page table

Between the step and the kernel nothing waits for the device: on CUDA torch raises where it would.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kvgraft import Cache, Request, Step, TokenKey
from kvgraft_scheduling import DeviceTables

PAGE, CHUNK, WINDOW = 16, 64, 40
N_HEADS, N_KV_HEADS, WIDTH, VOCABULARY = 4, 2, 16, 97
MOST_REQUESTS, MOST_TOKENS, DEVICE_TOKENS = 4, 256, 1024
QUERY_BLOCK = 128
"""Queries for which a block mask has one list of pages."""
SHAPE = {"n_layers": 1, "n_kv_heads": N_KV_HEADS, "head_dim": WIDTH, "dtype": "float32"}
COMPONENTS = {"full": SHAPE, "swa": {**SHAPE, "window": WINDOW}}
SEES = {"full": 1 << 20, "swa": WINDOW}
"""How many tokens before itself a token attends to."""

warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # on a CPU


class Model:
    """Queries, keys and values of a token at a position: random numbers."""

    def __init__(self, device: str) -> None:
        random = torch.Generator().manual_seed(5)
        shape = (N_HEADS + 2 * N_KV_HEADS, WIDTH)
        self.of_token, self.of_position = (
            {name: torch.randn(n, *shape, generator=random).to(device) for name in COMPONENTS}
            for n in (VOCABULARY, MOST_TOKENS)
        )

    def qkv(self, name: str, tokens: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each `[..., n_heads, width]` for tokens `[...]` at positions `[...]`."""
        together = self.of_token[name][tokens] + self.of_position[name][at]
        return torch.split(together, [N_HEADS, N_KV_HEADS, N_KV_HEADS], dim=-2)

    def whole(self, name: str, tokens: Sequence[int]) -> torch.Tensor:
        """Attention of every token `[n_tokens, n_heads, width]`, where nothing is cached."""
        device = self.of_token[name].device
        at = torch.arange(len(tokens), device=device)
        q, k, v = self.qkv(name, torch.tensor(tokens, device=device), at)
        distance = at[:, None] - at
        seen = (distance >= 0) & (distance <= SEES[name])
        k, v = (each.repeat_interleave(N_HEADS // N_KV_HEADS, dim=1) for each in (k, v))
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        found: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen
        )
        return found.transpose(0, 1)


class Kernel:
    """Attention over pages: the pool's tokens are one long sequence, and a mask picks from it."""

    def __init__(self, *, compiled: bool) -> None:
        self.attention: Any = flex_attention
        if compiled:
            self.attention = torch.compile(flex_attention, dynamic=False)

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        n_new: int,
        sees: int,
    ) -> torch.Tensor:
        """The last `n_new` tokens of each row attend to their pages.

        Args:
            q: `[n_rows, n_heads, n_queries, width]`; those behind the first `n_new` are padding.
            keys, values: of the pool, `[n_slots, PAGE, n_kv_heads, width]`.
            table: slots by page, int32 `[n_rows, n_pages]`.
            lengths: tokens of each row, int32 `[n_rows]`; 0 for a row without a request.
            n_new: how many tokens the pass computes.
            sees: how many tokens before itself a token attends to.
        """
        n_rows, _, n_queries, _ = q.shape
        n_slots, device = len(keys), q.device
        page = torch.arange(table.shape[1], dtype=torch.int32, device=device)
        start = lengths - n_new
        first = ((start - sees).clamp(min=0) // PAGE)[:, None]
        behind = ((lengths + PAGE - 1) // PAGE)[:, None]

        # Of which page of its row a slot is; -1 for others'. Column `n_slots` is nobody's.
        is_held = (page >= first) & (page < behind)
        page_of = torch.full((n_rows, n_slots + 1), -1, dtype=torch.int32, device=device)
        slots = torch.where(is_held, table, n_slots).long()
        page_of.scatter_(1, slots, page.expand(n_rows, -1))
        limit = torch.full((), sees, dtype=torch.int32, device=device)

        def sees_token(
            row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, token: torch.Tensor
        ) -> torch.Tensor:
            del head
            page = page_of[row, token // PAGE]
            distance = start[row] + query - (page * PAGE + token % PAGE)
            return (page >= 0) & (distance >= 0) & (distance <= limit)

        # The row's pages from the first that is needed on; a list as wide as the pool.
        pages = table.gather(1, (page + first).clamp(max=table.shape[1] - 1).long())
        pages = torch.nn.functional.pad(pages.clamp(min=0), (0, max(0, n_slots - len(page))))
        n_blocks = -(-n_queries // QUERY_BLOCK)
        mask = BlockMask.from_kv_blocks(
            (behind - first)[:, None].expand(-1, 1, n_blocks).contiguous(),
            pages[:, None, None].expand(-1, 1, n_blocks, -1).contiguous(),
            BLOCK_SIZE=(QUERY_BLOCK, PAGE),
            mask_mod=sees_token,
            seq_lengths=(n_queries, n_slots * PAGE),
            compute_q_blocks=False,
        )
        keys, values = (each.flatten(0, 1).transpose(0, 1)[None] for each in (keys, values))
        found: torch.Tensor = self.attention(
            q, keys, values, block_mask=mask, enable_gqa=True, kernel_options={"BLOCK_N": PAGE}
        )
        return found


class Given(NamedTuple):
    """The kernel's output for tokens of a request from `start` on, `[n_heads, n_new, width]`."""

    component: str
    key: TokenKey
    start: int
    outputs: torch.Tensor


class Runner:
    """Runs passes of the model with steps of the cache."""

    def __init__(self, cache: Cache, *, compiled: bool) -> None:
        self.device = cache.config.device
        self.model, self.kernel = Model(self.device), Kernel(compiled=compiled)
        self.tables = DeviceTables(cache)
        pools = {each.name: each.component.device for each in cache.mounted}
        self.planes = {
            name: (pools[name].plane(0, "k"), pools[name].plane(0, "v")) for name in COMPONENTS
        }
        self.ran: set[int] = set()
        self.given: list[Given] = []

    def run(self, cache: Cache, requests: list[Request], tokens: Any, n_queries: int) -> None:
        """A pass of `tokens`, int64 `[n_requests, n_new]` on the device."""
        n_new = tokens.shape[1]
        with never_waits(self.device if n_queries in self.ran else "cpu"):
            step = self.tables.upload(cache.step(requests, n_tokens=n_new, n_computed=0))
            found = self._attend(step, tokens, n_queries)
        assert not step.refused  # all is reserved
        self.ran.add(n_queries)  # the first time, torch compiles
        for name, outputs in found.items():
            for request, output in zip(requests, outputs[:, :, :n_new]):
                self.given.append(Given(name, request.key, request.computed, output))

    def _attend(self, step: Step, tokens: Any, n_queries: int) -> dict[str, torch.Tensor]:
        """The output of each component's attention for the step's requests."""
        n_new, rows = tokens.shape[1], step.rows
        start = step.seq_lens - n_new
        at = start[:, None] + torch.arange(n_new, dtype=torch.int32, device=self.device)
        lengths = torch.zeros(MOST_REQUESTS, dtype=torch.int32, device=self.device)
        lengths.index_copy_(0, rows, step.seq_lens)
        found = {}
        for name, (keys, values) in self.planes.items():
            q, k, v = self.model.qkv(name, tokens, at)
            for pool, new in ((keys, k), (values, v)):
                pool.flatten(0, 1).index_copy_(0, step.slot_mapping[name], new.flatten(0, 1))
            # a place for each request that there can be: the kernel's shapes stay the same
            placed = q.new_zeros(MOST_REQUESTS, N_HEADS, n_queries, WIDTH)
            placed[:, :, :n_new].index_copy_(0, rows, q.transpose(1, 2))
            table = self.tables.tables[name]
            given = self.kernel(placed, keys, values, table, lengths, n_new, SEES[name])
            found[name] = given.index_select(0, rows)
        return found

    def largest_difference(self) -> float:
        """Between the kernel's numbers and those of whole sequences; forgets them."""
        keys = {id(each.key): each.key for each in self.given}
        whole = {
            (name, at): self.model.whole(name, key.tokens().tolist())
            for at, key in keys.items()
            for name in COMPONENTS
        }
        differences = [
            whole[name, id(key)][start : start + outputs.shape[1]] - outputs.transpose(0, 1)
            for name, key, start, outputs in self.given
        ]
        self.given.clear()
        return float(torch.cat(differences).abs().max())


@contextmanager
def never_waits(device: str) -> Iterator[None]:
    """Torch raises where the host would wait for the device."""
    if not device.startswith("cuda"):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Chat(NamedTuple):
    """A conversation, and how many tokens its next answer has."""

    key: TokenKey
    n_new: int


def serve(cache: Cache, runner: Runner, chats: Sequence[Chat]) -> tuple[int, int]:
    """Answer all; tokens that were cached, and how many of them came from the host."""
    waiting, running = list(chats), dict[Request, int]()
    cached = from_host = 0
    while waiting or running:
        while waiting and len(running) < MOST_REQUESTS:
            chat = waiting.pop(0)
            request = cache.begin(chat.key, reserve=chat.n_new, chunk=CHUNK)
            assert cache.admit(request).admitted
            cache.load_back(request)
            while not request.ready:
                cache.poll()
            cached += request.anchor_tokens
            from_host += request.anchor_tokens - request.device_tokens
            while request.computed < request.prompt:
                n_tokens = cache.next_chunk(request)
                tokens = request.key.tokens(request.computed, request.computed + n_tokens)
                given = torch.tensor(tokens.tolist(), device=runner.device)[None]
                runner.run(cache, [request], given, CHUNK)
                cache.computed(request, n_tokens)
            cache.checkpoint(request)  # others resume from here already
            running[request] = chat.n_new
        for request in running:
            request.key.extend([request.computed % VOCABULARY])  # it is sampled
        last = [int(request.key.tokens()[-1]) for request in running]
        runner.run(cache, [*running], torch.tensor(last, device=runner.device)[:, None], 1)
        for request in [*running]:
            cache.computed(request, 1)
            running[request] -= 1
            if not running[request]:
                cache.finish(request)
                del running[request]
        cache.poll()
    return cached, from_host


def main(device: str = "cpu", *, compiled: bool | None = None) -> int:
    """Serve the chats and compare everything; 1 if something differs, or nothing was cached."""
    random = torch.Generator().manual_seed(1)

    def words(n_tokens: int) -> list[int]:
        return torch.randint(VOCABULARY, (n_tokens,), generator=random).tolist()

    cache = Cache.open(
        COMPONENTS,
        page_size=PAGE,
        device=device,
        device_tokens=DEVICE_TOKENS,
        host_tokens=4096,
        load=None,
        max_requests=MOST_REQUESTS,
        max_tokens=MOST_TOKENS,
    )
    runner = Runner(cache, compiled=device != "cpu" if compiled is None else compiled)
    system, failed = words(50), False
    keys = [TokenKey([*system, *words(7 * n + 3)]) for n in range(6)]
    print("turn   prompt tokens   cached   of that from the host   largest difference")
    for turn in range(3):
        for n, key in enumerate(keys):
            key.extend(words(5 * n + 1))
        n_tokens = sum(key.n_tokens for key in keys)
        cached, from_host = serve(
            cache, runner, [Chat(key, 2 + 3 * n) for n, key in enumerate(keys)]
        )
        difference = runner.largest_difference()
        failed = failed or difference > 1e-3 or not cached or bool(from_host) != (turn == 2)
        print(f"{turn + 1:4}   {n_tokens:13}   {cached:6}   {from_host:21}   {difference:18.1e}")
        if turn == 1:
            for name in COMPONENTS:
                cache.evict(name, DEVICE_TOKENS // PAGE)
    cache.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
