"""A memory resumes, to the bit, from data that another one with equal weights stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgraft import ConfigError
from kvgraft_storage import PrefetchPolicy, StorageSettings, StorePolicy
from kvgraft_storage.tier import StorageTier
from kvgraft_transformers import ModelMemory
from kvgraft_transformers.identity import digest_weights, name_model, name_numerics
from kvgraft_transformers.tiny import build_tiny_model

from .cases import one_of_each_kind

PROMPT = 130
CUTS = (32, 64, 96, 128, 129, 130)
BOUNDARY = 128

LIVE_RECORD = b"KVGRec\x01\x93"
BLOCK = 4096

Opener = Callable[..., ModelMemory]


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    """Memories over one store, as processes of their own would open them."""

    def build(model: Any, storage: dict[str, Any] | None = None, **settings: Any) -> ModelMemory:
        url = f"file:{tmp_path}?capacity=64MiB&segment=4MiB"
        policies = {"store": "write-through", "prefetch": "wait-complete", "threshold_tokens": 16}
        return ModelMemory.open(
            model,
            page_size=16,
            chunk_tokens=32,
            device_tokens=512,
            host_tokens=512,
            load=None,
            probe_tokens=0,
            storage={"url": url, **policies, **(storage or {})},
            **{"guard": "on", **settings},
        )

    return build


def tier_of(memory: ModelMemory) -> StorageTier:
    assert isinstance(memory.cache.storage, StorageTier)
    return memory.cache.storage


def damage_payloads(directory: Path) -> int:
    """Flip a bit of every payload; how many there are."""
    n_damaged = 0
    for path in directory.iterdir():
        data = bytearray(path.read_bytes())
        for start in range(0, len(data) - BLOCK, BLOCK):
            if data[start : start + len(LIVE_RECORD)] == LIVE_RECORD:
                data[start + BLOCK] ^= 1
                n_damaged += 1
        path.write_bytes(data)
    return n_damaged


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", one_of_each_kind())
def test_a_cold_memory_resumes_from_stored_data_with_the_same_bits(
    case: Any,
    tiny: Any,
    opened: Any,
    run: Any,
    tokens: Callable[..., list[int]],
    poison: Any,
    tmp_path: Path,
) -> None:
    family, _, sparse = case.partition("+")
    model, prompt = tiny(family), tokens(PROMPT)
    expected = run(model, prompt, cuts=CUTS)
    with opened(model, sparse_on_host=bool(sparse)) as memory:
        with memory.session(prompt, chunk_tokens=32) as session:
            assert torch.equal(run(model, prompt, session, cuts=CUTS), expected)
        assert memory.cache.drain()
    with opened(model, sparse_on_host=bool(sparse)) as memory:
        poison(memory)
        with memory.session(prompt, chunk_tokens=32) as session:
            assert session.cached_tokens == session.storage_tokens == BOUNDARY
            poison(memory)
            again = run(model, prompt, session, cuts=CUTS, after=lambda: poison(memory))
        assert torch.equal(again, expected[BOUNDARY:])
        assert memory.cache.drain()
        memory.cache.check_integrity()
    # the negative control: without it, the tokens compared above could have been computed again
    assert damage_payloads(tmp_path)
    with opened(model, sparse_on_host=bool(sparse)) as memory:
        with memory.session(prompt, chunk_tokens=32) as session:
            assert session.cached_tokens == 0
            assert torch.equal(run(model, prompt, session, cuts=CUTS), expected)
        assert tier_of(memory).counts()["get.corrupt"] > 0
        assert memory.cache.drain()
        memory.cache.check_integrity()


def test_data_used_twice_is_stored_and_the_rest_is_not(
    tiny: Any, opened: Any, run: Any, tokens: Callable[..., list[int]]
) -> None:
    model, prompt = tiny("gemma3_text"), tokens(PROMPT)
    for session_number in range(2):
        with opened(model, {"store": StorePolicy.SECOND_TOUCH}) as memory:
            for _ in range(2):
                with memory.session(prompt) as session:
                    run(model, prompt, session)
            once = tokens(PROMPT, seed=7 + session_number)
            with memory.session(once) as session:
                run(model, once, session)
    with opened(model) as memory:
        with memory.session(prompt) as session:
            assert session.storage_tokens == BOUNDARY
        with memory.session(once) as session:
            assert session.storage_tokens == 0


def test_different_models_share_no_data(
    tiny: Any, opened: Any, run: Any, tokens: Callable[..., list[int]]
) -> None:
    prompt = tokens(PROMPT)
    with opened(tiny("llama")) as memory, memory.session(prompt, namespace="a") as session:
        run(memory.model, prompt, session)
    eager = build_tiny_model("llama")
    eager.config._attn_implementation = "eager"
    strangers = [
        (eager, {}),
        (build_tiny_model("llama", seed=1), {}),
        (
            build_tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            {},
        ),
        (build_tiny_model("llama", rms_norm_eps=1e-5), {}),
        (build_tiny_model("llama", dtype=torch.float64), {}),
        (build_tiny_model("qwen3"), {}),
        (tiny("llama"), {"salt": "another"}),
        (tiny("llama"), {"weights": "mine"}),
        (tiny("llama"), {"model": "mine"}),
    ]
    for model, options in strangers:
        with opened(model, options) as memory, memory.session(prompt, namespace="a") as session:
            assert session.cached_tokens == 0
            session.abort()
    with opened(build_tiny_model("llama")) as memory:
        with memory.session(prompt, namespace="b") as session:
            assert session.cached_tokens == 0
            session.abort()
        with memory.session(prompt, namespace="a") as session:
            assert session.storage_tokens == BOUNDARY


def test_weights_are_told_apart_by_every_byte_and_by_nothing_else(tmp_path: Path) -> None:
    model = build_tiny_model("gemma3_text")
    digest, name = digest_weights(model), name_model(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert (digest_weights(loaded), name_model(loaded)) == (digest, name)
    assert name_numerics(loaded) == name_numerics(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            flat = tensor.view(-1)
            before = flat[-1].item()
            flat[-1] = before + 1
            assert digest_weights(model) != digest
            flat[-1] = before
    assert digest_weights(model) == digest
    assert digest_weights(model.to(torch.float64)) != digest


def test_weights_are_hashed_piece_by_piece_wherever_they_are_cut() -> None:
    model = build_tiny_model("llama")
    assert digest_weights(model, piece_nbytes=1000) == digest_weights(model)


def test_the_numerics_are_part_of_the_fingerprint() -> None:
    model = build_tiny_model("llama")
    said = {name_numerics(model)}
    model.config._attn_implementation = "eager"
    said.add(name_numerics(model))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    said.add(name_numerics(model))
    torch.set_float32_matmul_precision(before)
    said.add(name_numerics(model, version=lambda distribution: "0.0"))
    assert len(said) == 4


def test_weights_that_cannot_be_hashed_are_one_line_with_the_setting_to_give(opened: Any) -> None:
    with torch.device("meta"):
        model = build_tiny_model("llama")
    with pytest.raises(ConfigError, match=r"weight 'lm_head.weight' cannot be hashed .* 'weights'"):
        digest_weights(model)


@pytest.mark.parametrize(
    ("storage", "line"),
    [
        ("nowhere", "storage 'nowhere' is not NAME:LOCATION"),
        ("fil:/tmp", "did you mean file?"),
        (7, "storage=7: give a URL"),
        ({"store": "never"}, "setting storage.store='never'"),
        ({"stroe": "second-touch"}, "no setting 'storage.stroe'; did you mean 'store'? sett"),
    ],
)
def test_storage_that_cannot_work_is_one_line(tiny: Any, storage: Any, line: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        ModelMemory.open(tiny("llama"), device_tokens=256, host_tokens=256, storage=storage)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_storage_without_a_host_is_refused(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set host_tokens"):
        ModelMemory.open(tiny("llama"), device_tokens=256, storage=f"file:{tmp_path}?capacity=1MiB")


def test_settings_of_the_tier_and_a_bare_url_mean_the_same(tiny: Any, tmp_path: Path) -> None:
    url = f"file:{tmp_path}?capacity=1MiB"
    model = tiny("llama")
    whole = StorageSettings(
        url=url,
        model=name_model(model),
        weights=digest_weights(model),
        prefetch=PrefetchPolicy.BEST_EFFORT,
    )
    digests = []
    for storage in (url, whole):
        with ModelMemory.open(model, device_tokens=64, host_tokens=64, storage=storage) as memory:
            digests.append(tier_of(memory).fingerprint.digest)
    assert digests[0] == digests[1]
    assert tier_of(memory).settings.prefetch is PrefetchPolicy.BEST_EFFORT
