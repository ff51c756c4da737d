"""A kernel of torch's reads a cache's pools by its page tables: `examples/paged_attention.py`."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from ..commands import ROOT
from ..gpu import accelerator


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of settings, seldom the same
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.long),  # without torch's compiler
        pytest.param(accelerator(), marks=pytest.mark.gpu),
    ],
)
def test_the_kernel_gives_what_attention_over_whole_sequences_gives(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_from_file_location("paged_attention", ROOT / "examples/paged_attention.py")
    assert spec is not None
    assert spec.loader is not None
    example = sys.modules["paged_attention"] = module_from_spec(spec)  # torch's compiler asks there
    spec.loader.exec_module(example)
    status = example.main(device)
    said = capsys.readouterr().out
    assert status == 0, said
    rows = [line.split() for line in said.splitlines()[1:]]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert [int(row[3]) > 0 for row in rows] == [False, False, True]
