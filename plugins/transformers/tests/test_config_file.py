"""The components of a model, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvgraft import ConfigError
from kvgraft_transformers import components_of_config, read_architecture
from kvgraft_transformers.tiny import FAMILIES


@pytest.mark.one_in(6)
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


OTHER_INPUTS: dict[str, dict[str, Any]] = {
    "mllama_text_model": {"num_hidden_layers": 6, "cross_attention_layers": [1, 4]},
    "trocr": {"decoder_layers": 2},
}


@pytest.mark.parametrize("model_type", OTHER_INPUTS)
def test_layers_that_attend_to_an_image_or_an_encoder_are_noted(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **OTHER_INPUTS[model_type]}))
    components_of_config(path)
    assert f"model_type {model_type!r}: 2 layers attend to other inputs as well" in caplog.text
    caplog.clear()
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 2}))
    components_of_config(path)
    assert not caplog.text


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
