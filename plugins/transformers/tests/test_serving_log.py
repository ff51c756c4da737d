"""The lines that a server writes: how memory was divided, each request, the end."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvgraft_transformers.engine import Engine, GenerationRequest
from kvgraft_transformers.serving.split import memory_split
from kvgraft_transformers.serving.worker import EngineWorker
from kvgraft_transformers.tiny import build_tiny_model

from .serving_inside import Inside, serve_inside

SECONDS = r"first after \d+\.\d{3} s; all after \d+\.\d{3} s"


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with serve_inside(build_tiny_model("llama")) as served:
        yield served


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvgraft.serve")


def test_a_request_is_a_line_with_its_tokens_times_and_end(
    inside: Inside, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = list(range(5, 45))
    for _ in range(2):
        inside.post("/v1/completions", {"prompt": prompt}, headers={"X-Request-Id": "mine"})
    first, second = caplog.messages
    form = (
        r"POST /v1/completions 200 cmpl-[0-9a-f]{32} x-request-id 'mine' from 127.0.0.1: "
        r"40 prompt tokens \(CACHED cached\); 8 new \(length\); " + SECONDS
    )
    assert re.fullmatch(form.replace("CACHED", "0"), first)
    assert re.fullmatch(form.replace("CACHED", "32"), second)


def test_a_stream_of_several_answers_is_one_line_at_its_end(
    inside: Inside, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [{"role": "user", "content": "x = 1"}]
    body = {"messages": messages, "n": 2, "stream": True, "ignore_eos": True}
    inside.post("/v1/chat/completions", body)
    (line,) = caplog.messages
    assert re.search(r"chatcmpl-\S+ .*; 16 new \(length, length\); " + SECONDS, line)


def test_a_refused_request_is_a_line_with_the_reason(
    inside: Inside, caplog: pytest.LogCaptureFixture
) -> None:
    inside.post("/v1/completions", {"prompt": "x", "model": "other"})
    inside.post("/v1/completions", {"prompt": "x " * 4000})
    inside.post("/v1/nowhere", {})
    wrong_model, too_long, nowhere = caplog.messages
    assert wrong_model.startswith("POST /v1/completions 404 from 127.0.0.1: model 'other' is not ")
    assert "the request does not fit this server's memory" in too_long
    assert nowhere.startswith("POST /v1/nowhere 404 ")


def test_reading_is_not_logged(inside: Inside, caplog: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/metrics", "/v1/models"):
        inside.get(path)
    assert caplog.messages == []


def test_the_split_of_memory_adds_up() -> None:
    model = build_tiny_model("gemma3_text")
    sizes: dict[str, Any] = {"device_tokens": "4MB", "host_tokens": 4096, "probe_tokens": 0}
    engine = Engine.open(model, **sizes)
    whole, *parts = memory_split(engine.memory)
    assert re.fullmatch(
        r"gemma3_text, 4 layers: pools of [34]\.\d MB on cpu, 4\.2 MB on the host", whole
    )
    assert [part.partition(";")[0] for part in parts] == [
        "  full: layers 1, 3",
        "  swa: layers 0, 2",
    ]
    for component, part in zip(engine.memory.cache.mounted, parts):
        tokens = int(re.findall(r"cpu ([\d,]+) tokens", part)[0].replace(",", ""))
        assert tokens == component.component.device.capacity * 16
        assert "; 512 B a token; " in part
    for tier in ("cpu", "host"):
        shares = [re.findall(tier + r" [^;]*, ([\d.]+)%", part)[0] for part in parts]
        assert sum(map(float, shares)) == pytest.approx(100, abs=0.11)
    engine.close()


class Stuck:
    """A layer's hook that does not come back until it is let."""

    def __init__(self) -> None:
        self.reached, self.let = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        self.reached.set()
        self.let.wait()


def test_a_pass_that_does_not_end_holds_no_shutdown_up() -> None:
    model, stuck = build_tiny_model("llama"), Stuck()
    engine = Engine.open(model, device_tokens=512, page_size=16, probe_tokens=0)
    model.model.layers[1].register_forward_hook(stuck)
    engine.submit(GenerationRequest([5, 6, 7]))
    worker = EngineWorker(engine)
    worker.start()
    assert stuck.reached.wait(60)
    worker.stop_by = 0.0
    worker.stop()
    assert worker.runs, "it was waited for"
    stuck.let.set()
    worker.stop_by = None
    worker.stop()
    assert not worker.runs
