"""Dynamo's own KV indexer, in a process of its own, knows where a cache's pages are."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serving import life

pytest.importorskip("dynamo.indexer", reason="Dynamo is not at hand: make test-engine-files")

from kvgraft import Cache, TokenKey
from kvgraft_observe.kv_events import KvEventPublisher, Report

PAGE = 16
WAIT_S = 20.0
"""Longest wait for the indexer, and for what it is to learn."""

PROMPTS = [[user] * 200 + list(range(1000 * user, 1000 * user + 100)) for user in range(1, 7)]


class Indexer:
    """The indexer's HTTP interface."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **about: Any) -> Any:
        data = json.dumps(about).encode() if about else None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers)
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return json.loads(answer.read() or b"null")

    def found(self, tokens: list[int]) -> tuple[int, int]:
        """Tokens of a prompt that worker 7 has on DEVICE, and on any tier."""
        instances = self.ask("/query", model_name="m", token_ids=tokens)["instances"]
        worker = instances.get("7", {"gpu": 0, "longest_matched": 0})
        return worker["gpu"], worker["longest_matched"]


@contextmanager
def indexer_on(port: int, log: Path) -> Iterator[Indexer]:
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port)]
    with log.open("w") as lines, subprocess.Popen(command, stdout=lines, stderr=lines) as process:
        try:
            indexer, deadline = Indexer(port), time.monotonic() + WAIT_S
            while True:
                try:
                    indexer.ask("/health")
                    break
                except OSError:
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield indexer
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serve(cache: Cache, tokens: list[int]) -> None:
    life.serve(cache, tokens)
    cache.drain()
    cache.poll()


SIZES: dict[str, Any] = {"page_size": PAGE, "device_tokens": 1024, "host_tokens": 2048}


def held(cache: Cache, tokens: list[int]) -> tuple[int, int]:
    """Tokens of a prompt that full attention has on DEVICE, and on any tier."""
    (full,) = (
        each for each in cache.explain(TokenKey(tokens)).components if each.component == "full"
    )
    return full.device_accepts, full.accepts


def resumable(cache: Cache, tokens: list[int]) -> tuple[int, int]:
    """Tokens of a prompt behind which a request resumes, from DEVICE alone and from any tier."""
    said = cache.explain(TokenKey(tokens))
    return said.device_anchor, said.anchor


@pytest.mark.parametrize("replay_batches", [10_000, 1])
def test_dynamos_indexer_that_comes_late_knows_what_a_cache_holds(
    tmp_path: Path, replay_batches: int
) -> None:
    components: dict[str, dict[str, Any]] = {"full": {}, "swa": {"window": 64}, "mamba": {}}
    with (
        Cache.open(components, write_policy="write-through", **SIZES) as cache,
        KvEventPublisher(
            cache,
            bind="tcp://127.0.0.1:*",
            replay="tcp://127.0.0.1:*",
            topic="kv@pod@m",
            replay_batches=replay_batches,
        ) as publisher,
        indexer_on(free_port(), tmp_path / "indexer.log") as indexer,
    ):
        for prompt in PROMPTS[:4]:
            serve(cache, prompt)
        indexer.ask(
            "/register",
            instance_id=7,
            endpoint=publisher.endpoint,
            replay_endpoint=publisher.replay_endpoint,
            model_name="m",
            block_size=PAGE,
        )

        def expect_agreement() -> list[tuple[int, int]]:
            """It knows the same, at the latest after some more polls."""
            deadline = time.monotonic() + WAIT_S
            while True:
                cache.poll()
                expected = [held(cache, prompt) for prompt in PROMPTS]
                found = [indexer.found(prompt) for prompt in PROMPTS]
                if found == expected:
                    return expected
                assert time.monotonic() < deadline, (found, expected, publisher.lost)
                time.sleep(0.05)

        first = 20_000
        while indexer.found(PROMPTS[0]) == (0, 0):  # it asks for what it missed once it hears more
            serve(cache, list(range(first, first + 40)))
            first += 100
            time.sleep(0.05)
        serve(cache, PROMPTS[4])
        assert max(expect_agreement()) == (288, 288)
        cache.evict("full", 40)
        serve(cache, PROMPTS[5])
        after = expect_agreement()
        assert (0, 288) in after
        assert (288, 288) in after
        cache.clear()
        assert expect_agreement() == [(0, 0)] * 6


@pytest.mark.parametrize(
    ("components", "report", "known"),
    [
        ({"full": {}, "swa": {"window": 64}, "mamba": {}}, "resumable", True),
        ({"swa": {"window": 64}, "mamba": {}}, "resumable", True),
        ({"swa": {"window": 64}, "mamba": {}}, "components", False),
    ],
    ids=["full+swa+mamba", "swa+mamba", "swa+mamba by component"],
)
def test_dynamos_indexer_knows_where_hybrid_models_resume(
    tmp_path: Path, components: dict[str, dict[str, Any]], report: Report, *, known: bool
) -> None:
    with (
        Cache.open(components, write_policy="write-through", **SIZES) as cache,
        KvEventPublisher(
            cache, bind="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", report=report
        ) as publisher,
        indexer_on(free_port(), tmp_path / "indexer.log") as indexer,
    ):
        indexer.ask(
            "/register",
            instance_id=7,
            endpoint=publisher.endpoint,
            replay_endpoint=publisher.replay_endpoint,
            model_name="m",
            block_size=PAGE,
        )

        def expect_agreement() -> list[tuple[int, int]]:
            deadline = time.monotonic() + WAIT_S
            while True:
                cache.poll()
                expected = [resumable(cache, prompt) for prompt in PROMPTS]
                found = [indexer.found(prompt) for prompt in PROMPTS]
                if found == (expected if known else [(0, 0)] * len(PROMPTS)):
                    return expected
                assert time.monotonic() < deadline, (found, expected, publisher.lost)
                time.sleep(0.05)

        for prompt in PROMPTS[:3]:
            serve(cache, prompt)
        assert max(expect_agreement()) == (288, 288)
        cache.evict("mamba", 2)  # states on DEVICE go, oldest first; HOST has them
        after = expect_agreement()
        assert (0, 288) in after
        assert (288, 288) in after
        serve(cache, PROMPTS[5])
        expect_agreement()
        cache.clear()
        assert expect_agreement() == [(0, 0)] * 6
