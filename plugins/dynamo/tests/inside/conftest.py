from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid model in double precision, so that batches round nothing away."""
    from kvgraft_transformers.tiny import build_tiny_model
    from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

    directory = tmp_path_factory.mktemp("models") / "tiny"
    build_tiny_model("lfm3", dtype=torch.float64).save_pretrained(directory)
    build_tiny_tokenizer().save_pretrained(directory)
    return directory
