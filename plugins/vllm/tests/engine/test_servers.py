"""vLLM's HTTP server with the openai client: killed with -9, started again, two on one store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines")
pytest.importorskip("vllm._custom_ops", reason="this vLLM has no kernels: make test-engines")

from openai import OpenAI
from plugins.vllm.tests.engine.lives import ENVIRONMENT, prompts, transfer_config
from plugins.vllm.tests.engine.models import write_model
from plugins.vllm.tests.engine.value_server import value_server

ROOT = Path(__file__).parents[4]
START_S = 600
"""Longest start of a server; a minute where little else runs."""

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(4 * START_S)]
Answer = tuple[str, list[float]]


class Server:
    """A running server.

    Attributes:
        process: it, the leader of its process group.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self._url = f"http://127.0.0.1:{port}"
        self._client = OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0)

    def ask(self, prompt: list[int]) -> tuple[Answer, int]:
        """An answer with its log-probabilities, and the tokens that were not computed."""
        said = self._client.completions.create(
            model="tiny", prompt=prompt, max_tokens=8, temperature=0, logprobs=1
        )
        choice, usage = said.choices[0], said.usage
        assert choice.logprobs is not None
        assert usage is not None
        details = usage.prompt_tokens_details
        hit = 0 if details is None else details.cached_tokens or 0
        return (choice.text, [each or 0.0 for each in choice.logprobs.token_logprobs or ()]), hit

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line for line in lines if re.match(rf"{name}(_total)?[{{ ]", line)]
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in found if all(each in line for each in wanted)
        )

    def wait_for(self, number: float, name: str, **labels: str) -> None:
        """Ask short questions until a metric is this large; numbers come with steps."""
        for _ in range(60):
            if self.metric(name, **labels) >= number:
                return
            self.ask([5, 6, 7])
            time.sleep(0.5)
        raise AssertionError(f"{name} {labels} is {self.metric(name, **labels)}, not {number}")

    def kill(self) -> None:
        """`kill -9`, the engine's process too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving(model: Path, tier: dict[str, Any] | None, log: Path) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = transfer_config(tier)
    offloading = [] if config is None else ["--kv-transfer-config", json.dumps(config)]
    given = (
        f"--model {model} --host 127.0.0.1 --port {port} "
        "--served-model-name tiny --dtype float32 --enforce-eager --block-size 32 "
        "--max-model-len 4096 --num-gpu-blocks-override 160 --enable-prompt-tokens-details"
    ).split()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given, *offloading],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, port)
    try:
        end = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                yield server
                return
            time.sleep(1)
        raise AssertionError(f"the server did not start: {log.read_text()[-3000:]}")
    finally:
        server.kill()


def equal(mine: list[Answer], yours: list[Answer]) -> bool:
    return all(a[0] == b[0] and a[1] == pytest.approx(b[1], abs=1e-4) for a, b in zip(mine, yours))


@pytest.fixture(params=["file", "valkey"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The tier's settings, over each kind of store that several servers share."""
    given = {"type": "KvgraftTier", "module_path": "kvgraft_vllm.tier"}
    if request.param == "valkey":
        with value_server(tmp_path) as (place, _):
            yield {**given, "backend": "valkey", "path": place}
        return
    store = tmp_path / "store"
    store.mkdir()
    yield {**given, "path": str(store), "capacity": "64MB"}


def test_a_server_killed_and_started_again_and_a_second_one_answer_from_the_store(
    tier: dict[str, Any], tmp_path: Path
) -> None:
    model = write_model("llama", tmp_path)
    asked = prompts()
    with serving(model, None, tmp_path / "alone.log") as alone:
        expected = [alone.ask(prompt)[0] for prompt in asked]
    with serving(model, tier, tmp_path / "first.log") as first:
        said = [first.ask(prompt) for prompt in asked]
        assert equal([answer for answer, _ in said], expected)
        assert [hit for _, hit in said] == [0, 0, 0]
        first.wait_for(27, "kvgraft:chunks", verb="set", status="ok")
        first.kill()
    with (
        serving(model, tier, tmp_path / "again.log") as again,
        serving(model, tier, tmp_path / "second.log") as second,
    ):
        for server, log in ((again, "again.log"), (second, "second.log")):
            said = [server.ask(prompt) for prompt in asked]
            assert equal([answer for answer, _ in said], expected)
            assert min(hit for _, hit in said) > 200
            server.wait_for(27, "kvgraft:chunks", verb="get", status="ok")
            server.wait_for(3, "kvgraft:hits_ended")
            assert server.metric("kvgraft:store_up", access="read") == 1
            assert "chunks from the store" in (tmp_path / log).read_text()
        fresh = prompts(1, seed=9)[0]
        answer, hit = again.ask(fresh)
        assert hit == 0
        again.wait_for(9, "kvgraft:chunks", verb="set", status="ok")
        shared, hit = second.ask(fresh)
        assert hit > 200, "what one server stored is not seen by the other"
        assert equal([shared], [answer])
