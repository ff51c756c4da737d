"""Small models stay small: a large one is refused before it takes memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from kvgraft import ConfigError
from kvgraft_transformers.tiny import MOST_PARAMETERS, build_tiny_model

LITTLE_MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
from kvgraft_transformers.tiny import MOST_PARAMETERS, build_tiny_model
build_tiny_model("gemma4")
"""


@pytest.mark.long
def test_a_family_whose_inner_models_are_large_is_refused_with_little_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY], capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvgraft.errors.ConfigError: family 'gemma4': 5,0"), done.stderr
    assert last.endswith(
        f" a tiny model has at most {MOST_PARAMETERS:,}: give smaller text_config={{...}} or "
        "vision_config={...} or audio_config={...}, or take 'gemma4_text'"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fields_that_make_a_model_large_are_refused_with_its_size(dtype: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        build_tiny_model("llama", dtype=dtype, vocab_size=2_000_000)
    nbytes = {torch.float32: "1.0 GB", torch.bfloat16: "0.5 GB"}[dtype]
    assert str(refused.value) == (
        f"family 'llama': 256,148,032 parameters, {nbytes}; a tiny model has at most 100,000,000: "
        "give smaller fields"
    )


def test_looking_at_the_size_changes_no_random_number() -> None:
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    build_tiny_model("llama")
    assert torch.equal(torch.rand(3), wanted)
