"""`kvgraft serve` beside `transformers serve` over HTTP: one model, one machine, one run.

Each server is a process of its own and serves alone; between the contestants the machine rests. A
wave is one request from each of 8 or 64 clients at once: a completion, streamed, of prompts that
begin with 1,024 tokens that all share (`shared`), or that share none (`own`). A warm-up wave with
other prompts goes first. Wave by wave the contestants take turns. What is printed: output tokens a
second over a wave, time to the first token, time between two, each as medians over waves of the
clients' medians, and p99 over all.

transformers' server needs its own packages: `pip install 'transformers[serving]'`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
import transformers
from _measure import arguments, grid, heading

from kvgraft_transformers.tiny import build_tiny_model
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

SHARED, OWN, OUTPUT = 1024, 64, 32
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
TIMEOUT_S = 900
BIN = Path(sys.executable).parent


class Wave(NamedTuple):
    """Times and counts of one wave of clients.

    Attributes:
        rate: output tokens a second of all together.
        first: per client, seconds to the first token.
        between: per client, mean seconds between two tokens.
    """

    rate: float
    first: list[float]
    between: list[float]


class Server(NamedTuple):
    """A server that runs.

    Attributes:
        name: what it is.
        url: where.
        process: its process.
    """

    name: str
    url: str
    process: subprocess.Popen[bytes]


def commands(model: Path, threads: int) -> dict[str, list[str]]:
    """How each contestant is started, but for the port."""
    ours = [str(BIN / "kvgraft"), "serve", str(model), "--max-running", "64"]
    ours += ["--device-tokens", "131072", "--host-tokens", "0", "--threads", str(threads)]
    theirs = [str(BIN / "transformers"), "serve", str(model), "--device", "cpu"]
    theirs += ["--dtype", "float32"]
    return {
        "kvgraft serve": ours,
        "transformers serve": theirs,
        "transformers serve, continuous batching": [
            *theirs,
            "--continuous-batching",
            *("--cb-num-blocks", "4096", "--cb-block-size", "32", "--cb-max-batch-tokens", "2048"),
        ],
    }


@contextlib.contextmanager
def running(name: str, command: Sequence[str], threads: int, log: Path) -> Iterator[Server]:
    """Start a server and wait until it answers.

    Raises:
        SystemExit: it ended, or does not answer.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} does not answer:\n{log.read_text()[-2000:]}")
            time.sleep(0.3)
        yield Server(name, url, process)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


async def ask(client: httpx.AsyncClient, url: str, model: str, prompt: str) -> list[float]:
    """The times at which the tokens of one completion arrived."""
    body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT, "stream": True}
    body |= {"temperature": 0.0}
    times = []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{url}: {answer.status_code} {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if line.startswith("data:") and '"text"' in line:
                times.append(time.perf_counter())
    return times


async def play(server: Server, model: str, prompts: Sequence[str]) -> Wave:
    """One request of each client at once."""
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        start = time.perf_counter()
        asked = (ask(client, server.url, model, prompt) for prompt in prompts)
        all_times = await asyncio.gather(*asked)
        end = time.perf_counter()
    if not all(all_times):
        raise SystemExit(f"{server.name}: a completion without text")
    return Wave(
        OUTPUT * len(prompts) / (end - start),
        [times[0] - start for times in all_times],
        [(times[-1] - times[0]) / (OUTPUT - 1) for times in all_times],
    )


class Prompts:
    """Texts of about so many tokens, none of which begins as another unless it is to."""

    def __init__(self, tokenizer: Any) -> None:
        self._random = random.Random(0)
        found = (tokenizer.decode([token]).strip() for token in range(260, len(tokenizer)))
        words = sorted({word for word in found if word.isalpha()})
        self._words = [word for word in words if len(tokenizer(f" {word}")["input_ids"]) == 1]

    def text(self, n_tokens: int) -> str:
        return "".join(f" {word}" for word in self._random.choices(self._words, k=n_tokens))

    def wave(self, n_clients: int, *, shared: bool) -> list[str]:
        """Prompts of one wave: new ones each time, so nothing is known from the wave before."""
        if not shared:
            return [self.text(SHARED + OWN) for _ in range(n_clients)]
        start = self.text(SHARED)
        return [start + self.text(OWN) for _ in range(n_clients)]


def save_model(folder: Path) -> int:
    """Write a model with random weights and its tokenizer; its number of parameters."""
    tokenizer = build_tiny_tokenizer()
    model = build_tiny_model("llama", vocab_size=len(tokenizer), **MODEL)
    # an answer has as many tokens as were asked for, whatever the weights say
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=OUTPUT
    )
    model.config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(sum(each.numel() for each in model.parameters()))


def row(name: str, waves: Sequence[Wave], base: Sequence[Wave]) -> list[str]:
    """Medians, and beside them the ratio to the first contestant's."""

    def of(values: Sequence[float], others: Sequence[float], scale: float, digits: int) -> str:
        mine, other = statistics.median(values), statistics.median(others)
        return f"{scale * mine:.{digits}f} ({mine / other:.2f})"

    def p99(all_waves: Sequence[Wave], field: str) -> float:
        values = sorted(itertools.chain.from_iterable(getattr(each, field) for each in all_waves))
        return float(values[min(len(values) - 1, int(0.99 * len(values)))])

    firsts = [statistics.median(each.first) for each in waves]
    gaps = [statistics.median(each.between) for each in waves]
    return [
        name,
        of([each.rate for each in waves], [each.rate for each in base], 1, 1),
        of(firsts, [statistics.median(each.first) for each in base], 1e3, 0),
        f"{1e3 * p99(waves, 'first'):.0f}",
        of(gaps, [statistics.median(each.between) for each in base], 1e3, 1),
        f"{1e3 * p99(waves, 'between'):.1f}",
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--waves", type=int, default=3, help="waves per contestant and row")
    parser.add_argument("--threads", type=int, default=1, help="threads of each server")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.clients, chosen.waves = [8], 1
    missing = [name for name in ("fastapi", "accelerate") if find_spec(name) is None]
    if missing:
        print(f"skipped: {', '.join(missing)} not installed; pip install 'transformers[serving]'")
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Path(folder) / "model"
        n_parameters = save_model(model)
        prompts = Prompts(build_tiny_tokenizer())
        heading(
            "Serving over HTTP",
            clock="wall",
            transformers=transformers.__version__,
            model=f"llama, {n_parameters:,} parameters, float32, {chosen.threads} threads a server",
            prompts=f"{SHARED} tokens, shared or not, and {OWN} own; {OUTPUT} computed, greedy",
            waves=chosen.waves,
        )
        servers = [
            stack.enter_context(
                running(name, command, chosen.threads, Path(folder) / f"{number}.log")
            )
            for number, (name, command) in enumerate(commands(model, chosen.threads).items())
        ]
        names = {
            server.url: httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
            if server.name.startswith("kvgraft")
            else str(model)
            for server in servers
        }
        for server in servers:
            asyncio.run(play(server, names[server.url], prompts.wave(2, shared=False)))
        for n_clients, shared in itertools.product(chosen.clients, (True, False)):
            waves: dict[str, list[Wave]] = {server.name: [] for server in servers}
            for number in range(chosen.waves):
                wave = prompts.wave(n_clients, shared=shared)
                for at in range(len(servers)):
                    server = servers[(at + number) % len(servers)]
                    found = asyncio.run(play(server, names[server.url], wave))
                    waves[server.name].append(found)
            base = waves[servers[0].name]
            title = f"{n_clients} clients, {'shared' if shared else 'own'} prompts"
            head = ["tokens/s", "first token, ms", "p99", "between tokens, ms", "p99"]
            grid([title, *head], [row(name, found, base) for name, found in waves.items()])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
