"""Names on the hub, when the hub is not there or does not know them: one line, and soon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvgraft import ConfigError
from kvgraft_transformers.serving.command import serve
from kvgraft_transformers.tiny import build_tiny_model
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

from .serving_process import Server, kvgraft


class Nothing(BaseHTTPRequestHandler):
    """A hub without models."""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def unreachable() -> Iterator[str]:
    """An address that refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture(scope="module")
def empty() -> Iterator[str]:
    """The address of a hub without models."""
    with HTTPServer(("127.0.0.1", 0), Nothing) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{hub.server_port}"
        hub.shutdown()
        thread.join()


def refusal(model: str, home: Path, **environment: str) -> str:
    """All that `kvgraft serve` says of a model, on standard error."""
    done = subprocess.run(
        kvgraft("serve", model, "--port", "0"),
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_a_hub_that_cannot_be_reached_is_asked_once_and_told_in_one_line(
    unreachable: Any, tmp_path: Path
) -> None:
    assert refusal("some/model", tmp_path, HF_ENDPOINT=unreachable) == (
        "kvgraft: model 'some/model' is no directory here and not in Hugging Face's "
        "download cache, and "
        f"{unreachable} cannot be reached ([Errno 111] Connection refused); give a checkpoint's "
        "directory, or another name\n"
    )


def test_a_hub_that_has_no_such_model_is_reported_in_one_line(empty: Any, tmp_path: Path) -> None:
    assert refusal("some/model", tmp_path, HF_ENDPOINT=empty) == (
        "kvgraft: model 'some/model' is no directory here and not in Hugging Face's "
        "download cache, and "
        f"{empty} answers 404 (it has no such model, or wants you to log in: hf auth login); give "
        "a checkpoint's directory, or another name\n"
    )


def test_a_hub_that_must_not_be_asked_is_reported_in_one_line(tmp_path: Path) -> None:
    said = refusal("some/model", tmp_path, HF_HUB_OFFLINE="1")
    assert said.startswith("kvgraft: model 'some/model' is no directory here and not in ")
    assert " is not asked, as HF_HUB_OFFLINE is set; " in said
    assert said.count("\n") == 1


def test_an_impossible_name_is_refused_in_one_line(tmp_path: Path) -> None:
    said = refusal("some/model/deeper", tmp_path)
    assert said.startswith("kvgraft: model 'some/model/deeper' is no directory here and cannot be ")
    assert said.count("\n") == 1


@pytest.mark.long
def test_a_model_in_the_cache_is_served_while_the_hub_cannot_be_reached(
    unreachable: Any, tmp_path: Path
) -> None:
    kept = tmp_path / "hub" / "models--some--model"
    snapshot = kept / "snapshots" / ("0" * 40)
    build_tiny_model("llama").save_pretrained(snapshot)
    build_tiny_tokenizer().save_pretrained(snapshot)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": unreachable}
    log = tmp_path / "log"
    with Server("some/model", "--device-tokens", "1k", log=log, environment=environment) as server:
        with server.client() as client:
            assert [model.id for model in client.models.list()] == ["model"]
        assert server.stop() == 0
    said = log.read_text()
    assert f"{unreachable} cannot be reached" in said.splitlines()[0]
    assert "taking some/model from the cache" in said.splitlines()[0]
    assert "Retry" not in said


@pytest.mark.parametrize("absent", ["uvicorn", "kvgraft_observe"])
def test_a_package_of_the_extra_that_is_absent_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, absent, None)
    monkeypatch.delitem(sys.modules, f"{absent}.prometheus", raising=False)
    with pytest.raises(ConfigError, match=f"there is no {absent}.*; in a clone of kvgraft, pip"):
        CliRunner().invoke(serve, [str(tmp_path)], catch_exceptions=False)
