"""The fingerprint covers whatever decides a chunk's bytes in the engine and its files."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import pytest

from kvgraft import ConfigError
from kvgraft_storage import discover_storage, weights_of
from kvgraft_vllm import TierSettings
from kvgraft_vllm.engine import describe_engine

SIZE = 9000
ROOT = Path(__file__).parents[3]


def write_weights(directory: Path, *tensors: bytes) -> Path:
    """A safetensors file as a writer without the library would make it."""
    header, start = {}, 0
    for number, tensor in enumerate(tensors):
        span = [start, start + len(tensor)]
        header[f"t{number}"] = {"dtype": "U8", "shape": [len(tensor)], "data_offsets": span}
        start += len(tensor)
    text = json.dumps(header).encode()
    directory.mkdir(exist_ok=True)
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors))
    return directory


def test_equal_files_are_equal_weights_wherever_they_are(tmp_path: Path) -> None:
    one = write_weights(tmp_path / "one", bytes(SIZE), bytes(SIZE))
    two = write_weights(tmp_path / "two", bytes(SIZE), bytes(SIZE))
    assert weights_of(one) == weights_of(two) is not None


def test_a_change_of_the_last_tensor_is_seen(tmp_path: Path) -> None:
    one = write_weights(tmp_path / "one", bytes(SIZE), bytes(SIZE))
    two = write_weights(tmp_path / "two", bytes(SIZE), b"\1" * SIZE)
    assert weights_of(one) != weights_of(two)


def test_files_of_another_kind_are_sampled_and_none_are_none(tmp_path: Path) -> None:
    assert weights_of(tmp_path) is None
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(3_000_000))
    before = weights_of(tmp_path)
    path.write_bytes(bytes(1_500_000) + b"\1" * 1_500_000)
    assert weights_of(tmp_path) != before is not None
    assert weights_of(path) == weights_of(tmp_path)


def engine_config(model: str) -> Record:
    return Record(
        groups=(Record(layer_names=("a",), tokens_per_block=16),),
        model=Record(name=model, dtype="bfloat16"),
        cache=Record(tokens_per_hash=16, blocks_per_chunk=2),
        parallel=Record(rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        kv_cache_layout="NHD",
        canonical_layout=False,
        replicated_layout=False,
        worker_kv_bytes_per_block=4096,
    )


def whole_config(model: str, **changes: Any) -> Record:
    rope = changes.pop("rope", None)
    return Record(
        model_config=Record(
            model=model,
            revision=None,
            dtype="bfloat16",
            quantization=changes.get("quantization"),
            max_model_len=changes.get("max_model_len", 4096),
            hf_text_config=Record(to_dict=lambda: {"rope": rope, "_name_or_path": model}),
        ),
        cache_config=Record(
            prefix_caching_hash_algo=changes.get("algorithm", "sha256"),
            cache_dtype=changes.get("cache_dtype", "auto"),
        ),
        device_config=Record(device_type=changes.get("device", "cuda")),
        speculative_config=None,
    )


def digest(model: Path, settings: TierSettings | None = None, **changes: Any) -> bytes:
    engine = describe_engine(
        engine_config(str(model)),
        whole_config(str(model), **changes),
        settings or TierSettings.of({"path": "/x"}),
        chunk_nbytes=8192,
        version="0.32.1",
    )
    return engine.fingerprint.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization": "fp8"},
        {"rope": {"factor": 2}},
        {"cache_dtype": "fp8"},
        {"max_model_len": 8192},
        {"algorithm": "sha256_cbor"},
        {"device": "cpu"},
    ],
    ids=str,
)
def test_a_fact_that_changes_the_bytes_changes_the_fingerprint(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = write_weights(tmp_path / "m", bytes(SIZE))
    assert digest(model) == digest(model)
    assert digest(model, **changes) != digest(model)


def test_where_a_model_lies_does_not(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        write_weights(tmp_path / place / "m", bytes(SIZE))
    assert digest(tmp_path / "a" / "m") == digest(tmp_path / "b" / "m")


def test_weights_that_are_not_here_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='set "weights" to their revision'):
        digest(tmp_path)
    named = TierSettings.of({"path": "/x", "weights": "rev-7"})
    assert digest(tmp_path, named) == digest(tmp_path, named)


def test_hashes_that_differ_in_every_process_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_weights(tmp_path / "m", bytes(SIZE))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    digest(model, algorithm="xxhash")
    assert "set PYTHONHASHSEED" in caplog.text
    caplog.clear()
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    digest(model, algorithm="xxhash")
    assert caplog.text == ""


@pytest.mark.parametrize("page", ["docs/vllm.md", "plugins/vllm/README.md"])
def test_the_tiers_in_the_documents_are_accepted(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    drivers = {found.name: found.driver for found in discover_storage()}
    tiers = re.findall(r'\{"type": "KvgraftTier".*?\}', text, re.DOTALL)
    assert tiers
    for tier in map(json.loads, tiers):
        assert (tier.pop("type"), tier.pop("module_path")) == ("KvgraftTier", "kvgraft_vllm.tier")
        settings = TierSettings.of(tier)
        driver = drivers[settings.backend]
        assert driver is not None
        driver.options.model_validate(settings.options)


def test_every_setting_is_documented() -> None:
    text = (ROOT / "plugins/vllm/README.md").read_text(encoding="utf-8")
    names = {"path" if name == "location" else name for name in TierSettings.model_fields}
    assert {name for name in names - {"options"} if f"| `{name}` |" not in text} == set()
