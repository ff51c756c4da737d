"""A server publishes the events of its cache for routers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("msgspec", reason="the extra kv-events of kvgraft-observe is missing")
pytest.importorskip("zmq", reason="the extra kv-events of kvgraft-observe is missing")

import msgspec
import zmq

from kvgraft import ConfigError
from kvgraft_transformers.serving.command import serve

from .serving_process import Server

END = b"\xff" * 8
WAIT_S = 60.0
PROMPT = "def page(slot, size):\n    return slot // size\n" * 6


@pytest.fixture(name="place")
def made_place() -> Iterator[str]:
    """A place for sockets; their paths must be short."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        yield f"ipc://{directory}"


def replayed(address: str) -> list[dict[str, Any]]:
    """All events that a publisher has sent."""
    context = zmq.Context()
    asking = context.socket(zmq.DEALER)
    asking.setsockopt(zmq.RCVTIMEO, int(1000 * WAIT_S))
    asking.connect(address)
    asking.send_multipart((b"", (0).to_bytes(8, "big")))
    told: list[dict[str, Any]] = []
    while True:
        _, topic, number, payload = asking.recv_multipart()
        if number == END:
            break
        assert topic == b"kv@pod@tiny"
        told += msgspec.msgpack.decode(payload)[1]
    context.destroy(linger=0)
    return told


def test_a_router_follows_a_server(checkpoint: Any, place: str, tmp_path: Path) -> None:
    options = ("--device-tokens", "2048", "--host-tokens", "0", "--chunk-tokens", "64")
    events = (
        *("--kv-events", f"{place}/live", "--kv-events-replay", f"{place}/replay"),
        *("--kv-events-topic", "kv@pod@tiny", "--kv-events-report", "resumable"),
    )
    with Server(checkpoint, *options, *events, log=tmp_path / "log") as server:
        body = {"model": "tiny-gemma", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S).json()[
            "usage"
        ]
        deadline = time.monotonic() + WAIT_S
        while len(told := replayed(f"{place}/replay")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert f"KV events: {place}/live" in (tmp_path / "log").read_text()
        assert server.stop() == 0
    assert told[0] == {"type": "AllBlocksCleared"}
    stored = [each for each in told[1:] if each["type"] == "BlockStored"]
    assert {each["kv_cache_spec_kind"] for each in stored} == {"full_attention"}
    blocks = [name for each in stored for name in each["block_hashes"]]
    assert len(blocks) == len(set(blocks)) >= usage["prompt_tokens"] // 16
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("option", ["replay", "topic", "report"])
def test_options_of_kv_events_without_an_address_are_one_line(
    checkpoint: Any, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    value = "resumable" if option == "report" else "tcp://*:5558"
    with pytest.raises(ConfigError) as refusal:
        serve.main(
            [str(checkpoint), "--port", "0", f"--kv-events-{option}", value],
            "kvgraft",
            standalone_mode=False,
        )
    assert str(refusal.value) == (
        f"--kv-events-{option} without --kv-events; give --kv-events tcp://*:5557"
    )
    assert "loading" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["nowhere"], ["tcp://127.0.0.1:*", "--kv-events-replay", "nowhere"]]
)
def test_an_address_that_cannot_be_used_is_one_line_before_a_model_is_loaded(
    checkpoint: Any, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        serve.main([str(checkpoint), "--port", "0", "--kv-events", *options], standalone_mode=False)
    assert str(refusal.value).startswith("KV events: cannot listen on 'nowhere'")
    assert "loading" not in capsys.readouterr().err
