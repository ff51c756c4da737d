"""Facts read from SGLang's objects: the fingerprint's parts, and where pages lie."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import pytest
import torch

from kvgraft import ConfigError
from kvgraft_sglang import BackendSettings, Engine
from kvgraft_sglang.engine import describe_engine, describe_pool, page_parts, tensor_memory
from kvgraft_sglang.interface import INTERFACE
from kvgraft_sglang.settings import SGLANGS_OWN
from kvgraft_storage import discover_storage

ROOT = Path(__file__).parents[3]
CONFIG = Record(
    model_name="tiny",
    is_mla_model=False,
    tp_rank=1,
    tp_size=2,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    dcp_rank=0,
    dcp_size=1,
)


def pool(n_pages: int = 4) -> Record:
    """Keys and values of pages of 2 tokens of 4 elements, page by page."""
    buffer = torch.arange(2 * n_pages * 8, dtype=torch.int16)

    def meta(indices: torch.Tensor) -> tuple[list[int], list[int]]:
        starts = [buffer.data_ptr() + 8 * int(index) for index in indices[::2]]
        return [place for start in starts for place in (start, start + 2 * n_pages * 8)], [16] * (
            2 * len(starts)
        )

    return Record(
        layout="page_first",
        page_size=2,
        dtype=torch.int16,
        layer_num=1,
        get_page_buffer_meta=meta,
        get_dummy_flat_data_page=lambda: torch.zeros(16, dtype=torch.int16),
        buffer=buffer,
    )


def describe(server: Record | None, **settings: Any) -> Engine:
    given = BackendSettings.of({"path": "/tmp", **settings})
    return describe_engine(CONFIG, server, given, version="0.5.23")


def server(model: Path, **changes: Any) -> Record:
    return Record(model_path=str(model), revision=None, **{"quantization": None, **changes})


def test_ranks_and_weights_are_reported() -> None:
    engine = describe(None, weights="abc")
    assert engine.ranks["tp"] == (1, 2)
    assert engine.weights == "abc"


def test_without_weights_the_backend_is_refused(tmp_path: Path) -> None:
    for given in (None, server(tmp_path), server(tmp_path / "missing")):
        with pytest.raises(ConfigError, match='set "weights"') as refused:
            describe(given)
        assert "\n" not in str(refused.value)


def test_weights_configuration_and_arguments_are_read(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(5000))
    (tmp_path / "config.json").write_text('{"rope": 1}')
    first = describe(server(tmp_path))
    assert first == describe(server(tmp_path))
    assert first != describe(server(tmp_path, quantization="fp8"))
    (tmp_path / "config.json").write_text('{"rope": 2}')
    assert first.computes != describe(server(tmp_path)).computes
    assert first.weights == describe(server(tmp_path)).weights


def test_buffers_of_a_page_are_its_flat_page() -> None:
    host = pool()
    (parts,) = page_parts(host, torch.tensor([2, 3]), 1)
    assert [bytes(part) for part in parts] == [
        bytes(host.buffer[8:16].numpy()),
        bytes(host.buffer[40:48].numpy()),
    ]
    assert describe_pool("kv", host, parts=True).parts
    host.layout = "layer_first"
    assert not describe_pool("kv", host, parts=True).parts


def test_states_of_equal_size_and_another_type_are_another_pool() -> None:
    def states(dtype: torch.dtype) -> Record:
        return Record(
            layout="page_first",
            page_size=1,
            get_dummy_flat_data_page=lambda: torch.zeros(64, dtype=torch.uint8),
            dtype=torch.bfloat16,
            conv_dtype=torch.bfloat16,
            temporal_dtype=dtype,
            conv_state_shapes=[torch.Size([4, 2])],
            temporal_state_shape=torch.Size([2, 8]),
        )

    first, second = (
        describe_pool("mamba", states(dtype), parts=False).facts
        for dtype in (torch.bfloat16, torch.float16)
    )
    assert first != second


def test_an_odd_number_of_buffers_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 buffers of 3 pages"):
        page_parts(pool(), torch.tensor([0, 1, 2, 3]), 3)


def test_a_tensor_that_has_gaps_has_no_memory() -> None:
    tensor = torch.arange(8, dtype=torch.bfloat16)
    assert tensor_memory(tensor[::2]) is None
    view = tensor_memory(tensor[2:4])
    assert view is not None
    assert bytes(view) == bytes(tensor[2:4].view(torch.uint8).numpy())


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.0", "dev"])
def test_other_versions_are_refused_in_a_line(version: str) -> None:
    INTERFACE.require_supported("0.5.23")
    INTERFACE.require_supported("0.5.23.post1")
    with pytest.raises(ConfigError, match=r"is not >=0\.5\.23,<0\.5\.24; pip install") as refused:
        INTERFACE.require_supported(version)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("page", ["docs/sglang.md", "plugins/sglang/README.md"])
def test_the_entries_in_the_documents_are_accepted(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    drivers = {found.name: found.driver for found in discover_storage()}
    entries = re.findall(r'\{"backend_name": "kvgraft".*?\}', text, re.DOTALL)
    assert entries
    for entry in map(json.loads, entries):
        assert entry["module_path"] == "kvgraft_sglang.backend"
        settings = BackendSettings.of(entry, SGLANGS_OWN)
        driver = drivers[settings.backend]
        assert driver is not None
        driver.options.model_validate(settings.options)


def test_every_setting_is_documented() -> None:
    text = (ROOT / "plugins/sglang/README.md").read_text(encoding="utf-8")
    names = {"path" if name == "location" else name for name in BackendSettings.model_fields}
    assert {name for name in names - {"options"} if f"| `{name}` |" not in text} == set()
