"""The page that shows what the cache holds, in a real browser where there is one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kvgraft_transformers.tiny import build_tiny_model
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

from .browser import CHROMIUM, Browser
from .serving_inside import serve_inside
from .serving_process import Server


def test_the_page_is_one_file_that_asks_nobody_else() -> None:
    with serve_inside(build_tiny_model("llama")) as inside:
        reply = inside.get("/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not re.search(r"https?:|//[a-z]|@import|innerHTML", reply.text)
    assert len(reply.content) < 2**15


needs_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-gemma"
    build_tiny_model("gemma3_text").save_pretrained(directory)
    build_tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as each:
        yield each


def complete(url: str, prompt: object, **fields: Any) -> None:
    body = {"model": "tiny-gemma", "prompt": prompt, "max_tokens": 1, **fields}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


ROWS = "[...document.querySelectorAll('#%s tr')].map(r => [...r.cells].map(c => c.innerText))"


@pytest.mark.long
@needs_a_browser
def test_a_browser_shows_hits_as_they_happen(
    checkpoint: Path, browser: Browser, tmp_path: Path
) -> None:
    options = ("--device-tokens", "1024", "--host-tokens", "2048")
    with Server(checkpoint, *options, log=tmp_path / "log") as server:
        browser.open(f"{server.url}/")
        pools = browser.wait_for(ROWS % "pools", lambda rows: len(rows) == 4)
        assert [row[:2] for row in pools] == [
            ["full", "device"],
            ["full", "host"],
            ["swa", "device"],
            ["swa", "host"],
        ]
        assert pools[0][3:6] == ["64", "0", "0"]
        assert browser.run("document.getElementById('model').innerText") == "tiny-gemma"
        assert browser.run(ROWS % "hits") == [["none yet", "", "", "", ""]]
        prompt = list(range(3, 203))
        complete(server.url, prompt)
        complete(server.url, [*prompt, 250, 251])
        hits = browser.wait_for(ROWS % "hits", lambda rows: len(rows) == 2)
        assert [row[:3] for row in hits] == [["2", "202", "192"], ["1", "200", "0"]]
        assert re.match(r"full: 192, .+\nswa: 192, .+", hits[0][4])
        assert (
            browser.run("document.querySelector('#hits .bar').title") == "device 192, computed 10"
        )
        pools = browser.wait_for(ROWS % "pools", lambda rows: rows[1][4] != "0")
        assert pools[0][3:6] == ["64", "12", "12"]
        browser.run("document.getElementById('prompt').value = 'a new prompt'")
        browser.run("document.querySelector('form button').click()")
        why = browser.wait_for("document.getElementById('why').innerText")
        assert "anchor 0, device anchor 0" in why
        assert browser.complaints == []
        assert {urlsplit(each).netloc for each in browser.requested if each[:5] != "data:"} == {
            urlsplit(server.url).netloc
        }
        server.stop()
        trouble = "document.getElementById('trouble').innerText"
        browser.wait_for(trouble, lambda said: said == "the server does not answer")


@pytest.mark.long
@needs_a_browser
def test_a_browser_asks_for_the_key(checkpoint: Path, browser: Browser, tmp_path: Path) -> None:
    options = ("--api-key", "secret", "--device-tokens", "256")
    with Server(checkpoint, *options, log=tmp_path / "log") as server:
        browser.open(f"{server.url}/")
        browser.wait_for("document.getElementById('trouble').innerText.includes('no API key')")
        assert not browser.run("document.getElementById('locked').hidden")
        browser.run("document.getElementById('key').value = 'secret'")
        browser.wait_for(ROWS % "pools", bool)
        assert browser.run("document.getElementById('trouble').innerText") == ""
