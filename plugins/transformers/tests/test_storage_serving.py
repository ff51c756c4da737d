"""A server's prompts outlive it: real processes over one store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvgraft import ConfigError
from kvgraft_transformers.serving.command import serve

from .serving_process import Server

PROMPT = "def page(slot, size):\n    return slot // size\n" * 12 + "# and then"
OPTIONS = ("--device-tokens", "2048", "--host-tokens", "4096", "--chunk-tokens", "64")


def answer(server: Server) -> tuple[str, int, int]:
    """Greedy text, cached tokens and prompt tokens."""
    with server.client() as client:
        reply = client.completions.create(
            model="tiny-gemma", prompt=PROMPT, max_tokens=20, temperature=0
        )
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    cached = reply.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    return reply.choices[0].text, cached, reply.usage.prompt_tokens


@pytest.mark.long
def test_a_second_server_answers_from_data_that_the_first_one_stored(
    checkpoint: Any, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    storage = ("--storage", f"file:{store}?capacity=64MiB", "--guard", "on")
    policy = ("--prefetch-policy", "wait-complete")
    with Server(checkpoint, *OPTIONS, *storage, *policy, log=tmp_path / "log1") as server:
        text, cached, n_prompt = answer(server)
        assert (cached, answer(server)[0]) == (0, text)
        assert server.stop() == 0
    with Server(checkpoint, *OPTIONS, *storage, *policy, log=tmp_path / "log2") as server:
        again, cached, _ = answer(server)
        assert again == text
        assert cached == (n_prompt - 1) // 16 * 16 > 256
        metrics = server.wait_until_nothing_is_held()
        assert metrics["kvgraft_storage_tokens_total"] == cached
        assert metrics['kvgraft_prefetches_total{event="delivered"}'] == 1
        assert metrics['kvgraft_storage_keys_total{status="ok",verb="get"}'] > 0
        assert metrics['kvgraft_storage_breaker{state="closed"}'] == 1
        assert metrics['kvgraft_storage_breaker{state="open"}'] == 0
        assert server.stop() == 0
    for log in ("log1", "log2"):
        assert "Traceback" not in (tmp_path / log).read_text()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--storage", "nowhere"), "storage 'nowhere' is not NAME:LOCATION, such as file:/var/"),
        (("--storage", "file:{there}?size=1"), "storage 'file': no option 'size'; options: "),
        (("--storage", "file:{there}/none"), "storage 'file': {there}/none does not exist"),
        (("--store-policy", "second-touch"), "--store-policy without --storage; give --storage"),
        (("--prefetch-policy", "timeout"), "--prefetch-policy without --storage; give --storage"),
        (("--storage", "file:{there}", "--host-tokens", "0"), "--storage with --host-tokens 0: "),
    ],
)
def test_storage_that_cannot_be_used_is_one_line_before_anything_is_loaded(
    checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: Any, line: Any
) -> None:
    options = [each.format(there=tmp_path) for each in options]
    with pytest.raises(ConfigError) as refusal:
        serve.main([str(checkpoint), "--port", "0", *options], standalone_mode=False)
    assert str(refusal.value).startswith(line.format(there=tmp_path))
    assert "\n" not in str(refusal.value)
    assert "loading" not in capsys.readouterr().err
