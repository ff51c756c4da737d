"""The server as its clients see it: a real process, OpenAI's own client."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from time import sleep
from typing import Any

import click
import httpx
import openai
import pytest
import torch

from kvgraft import ConfigError
from kvgraft.config import CacheConfig
from kvgraft_transformers.engine import Engine
from kvgraft_transformers.serving.command import load_served_model, serve
from kvgraft_transformers.tiny import build_tiny_model
from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

from .serving_process import Server

SYSTEM = {"role": "system", "content": "You answer in the language of the question. " * 4}


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--device-tokens", "2048", "--host-tokens", "4096", "--guard", "on")
    with Server(checkpoint, *options, "--chunk-tokens", "64", log=log) as running:
        yield running
    assert running.process.returncode == 0, log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def locked(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key and small pools."""
    options = ("--api-key", "secret", "--name", "mine", "--device-tokens", "256")
    log = tmp_path_factory.mktemp("locked") / "log"
    with Server(checkpoint, *options, "--chunk-tokens", "64", log=log) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as each:
        yield each


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Any:
    """The answer of transformers itself: text of `n` greedy tokens behind a prompt."""
    model = build_tiny_model("gemma3_text", dtype=torch.float64)
    tokenizer = build_tiny_tokenizer()

    def answer(prompt: str, n: int) -> str:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        answer = model.generate(ids, max_new_tokens=n, do_sample=False)
        said: str = tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
        return said

    return answer


def test_the_model_is_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-gemma"]
    assert client.models.retrieve("tiny-gemma").owned_by == "kvgraft"


def test_a_completion_equals_that_of_transformers(client: Any, expected: Any) -> None:
    prompt = "def parse(text):\n    return"
    reply = client.completions.create(
        model="tiny-gemma", prompt=prompt, max_tokens=20, temperature=0
    )
    assert reply.choices[0].text == expected(prompt, 20)
    assert reply.object == "text_completion"


def test_a_second_turn_is_served_from_the_cache_and_says_so(client: Any) -> None:
    messages = [SYSTEM, {"role": "user", "content": "What is a page?"}]
    first = client.chat.completions.create(
        model="tiny-gemma", messages=messages, max_tokens=24, temperature=0
    )
    assert first.choices[0].message.role == "assistant"
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And a slot?"},
    ]
    second = client.chat.completions.create(
        model="tiny-gemma", messages=messages, max_tokens=8, temperature=0
    )
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens // 16 * 16
    assert second.usage.total_tokens == second.usage.prompt_tokens + 8


def test_a_stream_gives_the_same_text_as_the_whole_answer(client: Any) -> None:
    asked = {
        "model": "tiny-gemma",
        "messages": [SYSTEM, {"role": "user", "content": "Größe? 大小?"}],
        "max_tokens": 30,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    *said, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in said)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in said] == [None] * (len(said) - 1) + [
        whole.choices[0].finish_reason
    ]
    assert said[0].choices[0].delta.role == "assistant"
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_stream_too(client: Any, expected: Any) -> None:
    prompt = "class Tree:"
    chunks = client.completions.create(
        model="tiny-gemma", prompt=prompt, max_tokens=16, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected(prompt, 16)


def test_several_prompts_and_answers_come_back_in_order(client: Any, expected: Any) -> None:
    prompts = ["import os", "for x in range(", "while True:"]
    reply = client.completions.create(
        model="tiny-gemma", prompt=prompts, n=2, max_tokens=6, temperature=0
    )
    assert [choice.index for choice in reply.choices] == list(range(6))
    texts = [choice.text for choice in reply.choices]
    assert texts == [expected(prompt, 6) for prompt in prompts for _ in range(2)]
    tokens = build_tiny_tokenizer()
    assert reply.usage.prompt_tokens == sum(len(tokens(each)["input_ids"]) for each in prompts)


def test_a_prompt_may_be_token_ids(client: Any, expected: Any) -> None:
    ids = build_tiny_tokenizer()("return None")["input_ids"]
    reply = client.completions.create(model="tiny-gemma", prompt=ids, max_tokens=5, temperature=0)
    assert reply.choices[0].text == expected("return None", 5)


def test_an_answer_ends_before_a_stop_string(client: Any, expected: Any) -> None:
    prompt = "def stop(self):"
    text = expected(prompt, 24)
    stop = text[9:13]
    reply = client.completions.create(
        model="tiny-gemma", prompt=prompt, max_tokens=24, temperature=0, stop=["never", stop]
    )
    assert reply.choices[0].text == text[: text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens < 24


def test_the_client_library_reads_log_probabilities(client: Any) -> None:
    asked = {"model": "tiny-gemma", "max_tokens": 4, "temperature": 0}
    hi = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(**asked, messages=hi, logprobs=True, top_logprobs=2)
    for each in chat.choices[0].logprobs.content:
        assert each.logprob == each.top_logprobs[0].logprob >= each.top_logprobs[1].logprob
        assert bytes(each.bytes).decode() == each.token
    plain = client.completions.create(**asked, prompt="x = ", logprobs=1)
    given = plain.choices[0].logprobs
    assert given.token_logprobs == [max(top.values()) for top in given.top_logprobs]


def test_a_seed_repeats_a_sampled_answer(client: Any) -> None:
    def answer(seed: int) -> str:
        reply = client.completions.create(
            model="tiny-gemma", prompt="x = ", max_tokens=12, temperature=1.2, top_p=0.9, seed=seed
        )
        text: str = reply.choices[0].text
        return text

    assert answer(3) == answer(3) != answer(4)


def test_many_clients_at_once_each_get_their_answer(server: Any, expected: Any) -> None:
    prompts = [f"def f{i}(argument, other):\n    " for i in range(8)]

    def ask(prompt: str) -> str:
        with server.client() as each:
            reply = each.completions.create(
                model="tiny-gemma", prompt=prompt, max_tokens=20, temperature=0
            )
        text: str = reply.choices[0].text
        return text

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [expected(prompt, 20) for prompt in prompts]
    metrics = server.wait_until_nothing_is_held()
    assert metrics["kvgraft_failed_total"] == 0


GOOD = {"model": "tiny-gemma", "prompt": "x", "max_tokens": 1}


@pytest.mark.parametrize(
    ("change", "status", "param", "message"),
    [
        ({"model": "other"}, 404, "model", "model 'other' is not served here; 'tiny-gemma' is"),
        ({"model": None}, 400, "model", "model=None: give text"),
        ({"prompt": ""}, 400, None, "the prompt has no token"),
        ({"prompt": []}, 400, None, "no prompt"),
        ({"prompt": [[]]}, 400, None, "the prompt has no token"),
        ({"prompt": "x \ud83d"}, 400, None, "character 2 is half a surrogate pair"),
        ({"prompt": [99999]}, 400, None, "token ids 99999..99999 of a vocabulary of 512"),
        ({"max_tokens": 0}, 400, None, "max_tokens=0 without echo, or with min_tokens: give 1"),
        ({"temperature": -1}, 400, "temperature", "temperature=-1: give 0 or more"),
        ({"n": 100}, 400, "n", "n=100: give 16 or less"),
        ({"stop": list("abcde")}, 400, "stop", ": give 4 or fewer"),
        ({"suffix": "x"}, 400, "suffix", "suffix='x' is not served here; leave it out"),
        ({"tempreature": 1}, 400, "tempreature", "unrecognized request argument: tempreature"),
        ({"max_tokens": 9000}, 400, None, "> 8192, the model's context"),
        ({"prompt": "x " * 2100}, 400, None, "component 'full' device pool: needs"),
    ],
)
def test_a_bad_request_gets_the_apis_error(
    server: Any, change: Any, status: Any, param: Any, message: Any
) -> None:
    body = json.dumps({**GOOD, **change})
    reply = httpx.post(f"{server.url}/v1/completions", content=body)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


def test_fields_that_ask_for_nothing_are_accepted(server: Any) -> None:
    extra = {
        "user": "me",
        "logprobs": None,
        "n": None,
        "presence_penalty": 0,
        "metadata": {"a": "b"},
    }
    reply = httpx.post(f"{server.url}/v1/completions", json={**GOOD, **extra})
    assert reply.status_code == 200


def test_the_client_library_raises_its_own_errors(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="unrecognized request argument: colour"):
        client.completions.create(model="tiny-gemma", prompt="x", extra_body={"colour": "red"})


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/v1/completions", b"{", 400, "the body is no JSON"),
        ("POST", "/v1/completions", b"[1]", 400, "the body is no JSON object"),
        ("GET", "/v1/completions", b"", 405, "GET /v1/completions: method not allowed"),
        ("GET", "/v2/anything", b"", 404, "GET /v2/anything: not found"),
    ],
)
def test_an_invalid_http_request_gets_the_apis_error(
    server: Any, method: Any, path: Any, body: Any, status: Any, message: Any
) -> None:
    reply = httpx.request(method, f"{server.url}{path}", content=body)
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]


def test_an_answer_that_ends_at_a_stop_sequence_is_finished_not_aborted(server: Any) -> None:
    body = {"model": "tiny-gemma", "prompt": "once", "max_tokens": 30, "temperature": 0}
    url, before = f"{server.url}/v1/completions", server.metrics()
    said = httpx.post(url, json=body, timeout=60).json()["choices"][0]["text"]
    body |= {"stop": said[len(said) // 2 :][:4]}
    ended = httpx.post(url, json=body, timeout=60).json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    after = server.wait_until_nothing_is_held()
    assert after["kvgraft_aborted_total"] == before["kvgraft_aborted_total"]
    assert after["kvgraft_finished_total"] == before["kvgraft_finished_total"] + 2


def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_everything(server: Any) -> None:
    before = server.metrics()["kvgraft_aborted_total"]
    body = {"model": "tiny-gemma", "prompt": "go on", "max_tokens": 1500, "stream": True}
    body |= {"temperature": 0}  # a sampled answer may end before its reader leaves
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        for line, _ in zip(reply.iter_lines(), range(6)):
            assert line == "" or line.startswith("data: ")
    assert server.wait_until_nothing_is_held()["kvgraft_aborted_total"] == before + 1


def test_a_client_that_gives_up_waiting_frees_everything(server: Any) -> None:
    before = server.metrics()["kvgraft_aborted_total"]
    body = {"model": "tiny-gemma", "prompt": "go on", "max_tokens": 1500, "temperature": 0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.5)
    assert server.wait_until_nothing_is_held()["kvgraft_aborted_total"] == before + 1


def test_a_body_larger_than_any_prompt_is_refused_at_once(server: Any) -> None:
    reply = httpx.post(f"{server.url}/v1/completions", content=b"[" * 2_000_000)
    assert reply.status_code == 413
    error = reply.json()["error"]
    assert error["code"] == "request_too_large"
    assert error["message"].endswith("; send several prompts one by one, or shorter ones")
    assert "larger than" in reply.json()["error"]["message"]
    deep = httpx.post(f"{server.url}/v1/completions", content=b"[" * 100_000)
    assert deep.status_code == 400


def test_health_names_the_served_model(server: Any) -> None:
    reply = httpx.get(f"{server.url}/health")
    assert reply.json() == {"status": "ok", "model": "tiny-gemma"}


def test_events_come_as_they_happen_and_their_reader_may_leave(server: Any) -> None:
    with httpx.stream("GET", f"{server.url}/events", timeout=30) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        assert next(lines) == "event: cleared"
        body = {"model": "tiny-gemma", "prompt": "an event" * 30, "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        assert "event: hit" in lines
    state = httpx.get(f"{server.url}/cache").json()
    assert state["components"]["full"]["tiers"]["device"]["capacity"] == 128


def test_a_key_is_asked_for_where_one_is_set(locked: Any) -> None:
    with locked.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with locked.client("secret") as client:
        assert [model.id for model in client.models.list()] == ["mine"]
    assert httpx.get(f"{locked.url}/health").status_code == 200


def test_an_empty_key_is_one_line(checkpoint: Any) -> None:
    assert refused(checkpoint, "--port", "0", "--api-key", "").startswith("--api-key is empty")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("secret", 401),
        ("Basic secret", 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        ("Bearersecret", 401),
        ("secret Bearer", 401),
        ("Bearer secret", 200),
        ("bearer secret", 200),
    ],
)
def test_a_key_comes_as_a_bearer_or_not_at_all(locked: Any, header: Any, status: Any) -> None:
    headers = {} if header is None else {"Authorization": header}
    reply = httpx.get(f"{locked.url}/v1/models", headers=headers)
    assert reply.status_code == status
    if status == 401:
        assert reply.headers["www-authenticate"] == "Bearer"
        assert "Authorization: Bearer KEY" in reply.json()["error"]["message"]


def test_a_server_of_small_pools_offers_no_more_than_they_hold(locked: Any) -> None:
    headers = {"Authorization": "Bearer secret"}
    (model,) = httpx.get(f"{locked.url}/v1/models", headers=headers).json()["data"]
    assert 200 <= model["max_model_len"] <= 256
    body = {"model": "mine", "prompt": [5] * 100, "temperature": 0}
    for most, status in ((model["max_model_len"], 200), (257, 400)):
        asked = {**body, "max_tokens": most - 100}
        reply = httpx.post(f"{locked.url}/v1/completions", json=asked, headers=headers, timeout=60)
        assert reply.status_code == status, reply.text


def test_the_default_length_of_a_chat_fits_the_pools(locked: Any) -> None:
    with locked.client("secret") as client:
        reply = client.chat.completions.create(
            model="mine", messages=[{"role": "user", "content": "hello"}]
        )
    assert reply.usage.total_tokens <= 256


@pytest.mark.long
def test_sigterm_under_load_refuses_waits_and_tells(checkpoint: Any, tmp_path: Path) -> None:
    options = ("--max-running", "2", "--grace", "2")
    body = {"model": "tiny-gemma", "prompt": "go", "max_tokens": 8000, "temperature": 0}
    with Server(checkpoint, *options, log=tmp_path / "log") as each, ThreadPoolExecutor(6) as pool:
        url, begun = f"{each.url}/v1/completions", Barrier(3)

        def stream() -> list[str]:
            asked = {**body, "stream": True}
            with httpx.stream("POST", url, json=asked, timeout=60) as reply:
                lines = reply.iter_lines()
                first = next(lines)
                begun.wait(60)
                return [first, *lines]

        streams = [pool.submit(stream) for _ in range(2)]
        begun.wait(60)
        queued = [pool.submit(httpx.post, url, json=body, timeout=60) for _ in range(3)]
        queued.append(pool.submit(httpx.post, url, json={**body, "stream": True}, timeout=60))
        while each.metrics()["kvgraft_requests_total"] < 6:
            sleep(0.05)
        each.process.send_signal(signal.SIGTERM)
        late = httpx.post(url, json=body, timeout=60)
        health = httpx.get(f"{each.url}/health")
        said = [[line for line in future.result() if line] for future in streams]
        replies = [future.result() for future in queued]
        assert each.process.wait(30) == 0
    for lines in said:
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert error["code"] == "server_shutting_down"
        assert error["type"] == "server_error"
        assert len(lines) > 2
    for reply in [late, *replies]:
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["code"] == "server_shutting_down"
    assert health.status_code == 503
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.long
def test_a_request_that_ends_within_the_grace_is_answered(checkpoint: Any, tmp_path: Path) -> None:
    body = {"model": "tiny-gemma", "prompt": "go", "max_tokens": 100, "temperature": 0}
    with Server(checkpoint, "--grace", "60", log=tmp_path / "log") as each:
        with ThreadPoolExecutor(1) as pool:
            url = f"{each.url}/v1/completions"
            asked = pool.submit(httpx.post, url, json=body, timeout=60)
            while each.metrics()["kvgraft_requests_total"] < 1:
                sleep(0.02)
            each.process.send_signal(signal.SIGTERM)
            assert asked.result().json()["usage"]["completion_tokens"] == 100
        assert each.process.wait(30) == 0


@pytest.mark.long
def test_ctrl_c_ends_a_server_whose_stream_would_go_on(checkpoint: Any, tmp_path: Path) -> None:
    with Server(checkpoint, log=tmp_path / "log") as each:
        body = {"model": "tiny-gemma", "prompt": "go", "max_tokens": 8000, "stream": True}
        body |= {"temperature": 0}
        with httpx.stream("POST", f"{each.url}/v1/completions", json=body, timeout=60) as reply:
            next(reply.iter_lines())
            assert each.stop() == 0


def refused(*arguments: str | Path) -> str:
    """The command's error for bad input, in this process: it loads torch each time."""
    with pytest.raises(ConfigError) as refusal:
        serve.main([str(each) for each in arguments], standalone_mode=False)
    line = str(refusal.value)
    assert "\n" not in line
    return line


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert refused(tmp_path / "nothing", "--port", "0") == (
        f"model '{tmp_path / 'nothing'}': no config.json there; give a checkpoint's directory"
    )


def test_a_checkpoint_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    build_tiny_model("llama").save_pretrained(tmp_path)
    assert refused(tmp_path, "--port", "0").startswith(
        f"model '{tmp_path}' has no tokenizer that can be loaded; save the model's own beside its "
    )


@pytest.mark.parametrize("family", ["gemma3_text", "mamba2", "qwen3"])
def test_a_tokenizer_that_transformers_makes_of_nothing_is_refused(
    tmp_path: Path, family: str
) -> None:
    build_tiny_model(family).save_pretrained(tmp_path)
    assert refused(tmp_path, "--port", "0") == (
        f"model '{tmp_path}' has no tokenizer: it has only special tokens; save the "
        "model's own beside its weights (tokenizer.save_pretrained)"
    )


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.no_gpu), "cuda:9", "gpu", "meta", ""]
)
def test_a_device_that_is_not_there_is_one_line_before_anything_is_loaded(
    checkpoint: Any, device: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(checkpoint, "--port", "0", "--device", device)
    assert line.startswith(f"--device {device!r}")
    assert "; give cpu" in line
    assert "loading" not in capsys.readouterr().err


def test_an_unknown_element_type_is_refused_with_the_known_ones(checkpoint: Any) -> None:
    with pytest.raises(click.BadParameter, match="'foo' is not one of 'auto', 'bfloat16', 'float"):
        serve.main([str(checkpoint), "--dtype", "foo"], standalone_mode=False)


def test_a_model_no_component_serves_is_refused_by_name(tmp_path: Path) -> None:
    model = build_tiny_model(
        "jamba",
        head_dim=None,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=8,
        mamba_dt_rank=8,
    )
    model.save_pretrained(tmp_path)
    build_tiny_tokenizer().save_pretrained(tmp_path)
    line = refused(tmp_path, "--port", "0")
    assert "model JambaForCausalLM (jamba): layer 0 (linear_attention) is a Mamba1 scan" in line


def test_a_port_in_use_is_one_line(checkpoint: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(checkpoint, "--port", str(port))
    assert said == f"cannot listen on 127.0.0.1:{port}: Address already in use"


def test_impossible_sizes_are_one_line(checkpoint: Any) -> None:
    line = refused(checkpoint, "--port", "0", "--chunk-tokens", "100", "--page-size", "64")
    assert line == "chunk_tokens 100 is not a multiple of page_size 64; use 64"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "newest"), "newest"),
        (
            ("--tenant", "chat:0.5"),
            "--tenant 'chat:0.5': '0.5' is not OPTION=VALUE; write for exam",
        ),
        (("--tenant", "a:guarantee=2"), "setting tenants.a.guarantee='2': give 1 or less"),
        (
            ("--tenant", "a", "--device-memory", "4MB"),
            "--tenant and --device-memory: tenants have shares of pools of a fixed size",
        ),
        (("--device-memory", "4M"), "'4M' has no unit of bytes; write 4MB"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_before_the_model_is_loaded(
    checkpoint: Any, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    with pytest.raises((ConfigError, click.BadParameter)) as refusal:
        serve.main([str(checkpoint), "--port", "0", *arguments], standalone_mode=False)
    line = str(refusal.value)
    assert said in line
    assert "\n" not in line
    assert "loading" not in capsys.readouterr().err


def test_options_of_a_replay_become_settings_of_the_cache_that_serves(checkpoint: Any) -> None:
    arguments = ("--policy", "lru", "--write-policy", "write-back", "--cut-tokens", "64")
    tenant = ("--tenant", "chat:guarantee=0.5", "--device-tokens", "1024", "--host-tokens", "2k")
    config = opened(checkpoint, *arguments, *tenant)
    assert (config.policy, config.write_policy.value, config.cut_tokens) == (
        "lru",
        "write-back",
        64,
    )
    assert config.tenants["chat"].namespaces == ("chat",)
    assert config.tenants["chat"].guarantee == 0.5
    assert (config.device_tokens, config.host_tokens) == (1024, 2000)
    assert config.max_drafts == 0
    memory = ("--device-memory", "4MB", "--host-memory", "8MB")
    engine = opened_engine(checkpoint, *memory, "--max-drafts", "4")
    config = engine.memory.cache.config
    assert (config.max_drafts, engine.settings.max_drafts) == (4, 4)
    assert (config.device_memory, config.host_memory) == (4_000_000, 8_000_000)
    assert config.cut_tokens == 128


def opened(checkpoint: Path, *arguments: str) -> CacheConfig:
    """Settings of the cache that the command opens with these arguments."""
    return opened_engine(checkpoint, *arguments).memory.cache.config


def opened_engine(checkpoint: Path, *arguments: str) -> Engine:
    """The engine of the command with these arguments."""
    with serve.make_context("serve", [str(checkpoint), *arguments]) as context:
        options = dict(context.params)
        for name in ("model", "host", "port", "grace_s", "log_requests"):
            del options[name]
        served = load_served_model(str(checkpoint), options, local=True)
        served.worker.stop()
        return served.worker.engine


def test_the_help_names_the_unit_of_each_option() -> None:
    said = serve.get_help(click.Context(serve, info_name="serve", max_content_width=200))
    metavars = dict(re.findall(r"--([a-z-]+) ([A-Z|]+)", said))
    in_tokens = {option for option, metavar in metavars.items() if metavar == "TOKENS"}
    tokens = {"page-size", "chunk-tokens", "step-tokens", "working-tokens", "cut-tokens"}
    assert in_tokens == tokens
    assert metavars["device-tokens"] == metavars["host-tokens"] == "TOKENS|BYTES"
    assert (metavars["max-running"], metavars["threads"]) == ("INTEGER", "INTEGER")
