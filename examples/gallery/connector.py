"""Another engine's data: a connector fills a request's slots, and the model computes the rest.

kvgraft-full
"""

import torch

from kvgraft import Cache, Request, TokenKey

PAGE = 16
elsewhere: dict[tuple[int, ...], torch.Tensor] = {}  # the other engine's pages, by all their tokens


def run_model(tokens: list[int], start: int) -> torch.Tensor:
    """A stand-in: a row per token from `start` on, which depends on all tokens before."""
    return torch.tensor(tokens, dtype=torch.float32).cumsum(0)[start:, None, None]


def fetch(tokens: list[int], start: int, end: int) -> torch.Tensor | None:
    """Rows of tokens `[start, end)`; None for tokens that are not there, or a failure."""
    pages = [elsewhere.get(tuple(tokens[: at + PAGE])) for at in range(start, end, PAGE)]
    return None if any(page is None for page in pages) else torch.cat(pages)  # type: ignore[arg-type]


def write(cache: Cache, request: Request, rows: torch.Tensor) -> None:
    """Write rows of the next tokens to the slots that the table names."""
    positions = torch.arange(request.computed, request.computed + len(rows))
    slots = torch.from_numpy(cache.table(request, "full").astype("int64"))[positions // PAGE]
    for plane in cache.mounted[0].component.device.planes:
        plane[slots, positions % PAGE] = rows.to(plane.dtype)


def serve(cache: Cache, tokens: list[int]) -> dict[str, int]:
    """Serve a prompt; where its tokens' data came from."""
    request = cache.begin(TokenKey(tokens), chunk=64)
    assert cache.admit(request).admitted
    came = {"reused": request.anchor_tokens, "fetched": 0, "computed": 0}
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request)
        assert cache.allocate(request, n_tokens)  # the same slots, whoever fills them
        end = request.computed + n_tokens
        rows = fetch(tokens, request.computed, end) if end < request.prompt else None
        came["computed" if rows is None else "fetched"] += n_tokens
        write(cache, request, run_model(tokens[:end], request.computed) if rows is None else rows)
        cache.computed(request, n_tokens)  # only once the rows are there
        cache.checkpoint(request)  # others reuse them from now on
    held = cache.mounted[0].component.device.planes[0][cache.table(request, "full").tolist()]
    assert held.flatten(0, 1)[: len(tokens)].equal(run_model(tokens, 0).to(held.dtype))
    cache.finish(request)
    return came


prompt = list(range(400))
for at in range(0, 320, PAGE):  # the other engine has 320 tokens of it
    elsewhere[tuple(prompt[: at + PAGE])] = run_model(prompt[: at + PAGE], at)
sizes = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 1}
with Cache.open({"full": sizes}, page_size=PAGE, device_tokens=4096) as cache:
    print(serve(cache, prompt))
    print(serve(cache, [*prompt, 7, 8, 9]))
