"""The components of a model, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvgraft import ConfigError
from kvgraft_transformers import components_of_config, read_architecture
from kvgraft_transformers.tiny import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_has_the_components_of_the_model(
    family: str, tiny: Any, tmp_path: Path
) -> None:
    model = tiny(family)
    path = tmp_path / "config.json"
    path.write_text(model.config.to_json_string(use_diff=False))
    expected = read_architecture(model, sparse_on_host=False).components
    assert components_of_config(path) == expected
    assert components_of_config(tmp_path) == expected


def test_a_model_with_images_is_described_by_its_decoder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 512}
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "dtype": "bfloat16"}))
    components = components_of_config(path)
    assert components["swa"]["layers"] == [0, 1, 2, 3, 4]
    assert components["full"]["layers"] == [5]
    assert components["full"]["dtype"] == "bfloat16"


REFUSED: dict[str, tuple[str | None, str]] = {
    "no file": (None, "No such file or directory; give a model's config.json"),
    "not JSON": ("{", "not JSON"),
    "no object": ("[1]", "no 'model_type'"),
    "no model type": ('{"hidden_size": 8}', "no 'model_type'"),
    "another library's": ('{"model_type": "poem"}', "model_type 'poem' is none that"),
    "impossible field": ('{"model_type": "llama", "hidden_size": "wide"}', "'hidden_size'"),
    "dimensions at odds": (
        '{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3}',
        "hidden size",
    ),
    "encoder and decoder": ('{"model_type": "t5"}', "is an encoder-decoder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_describes_no_model_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    text, words = REFUSED[case]
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        components_of_config(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
