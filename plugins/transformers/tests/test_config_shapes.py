"""Configurations of every model that transformers ships: planned, or refused for a true reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from kvgraft import ConfigError
from kvgraft_transformers import components_of_config

KINDS = list(CONFIG_MAPPING.keys())

SOME = ["albert", "clip", "encoder-decoder", "gemma3", "resnet", "vit", "xlnet"]

REASONS = (
    r"is an encoder: its tokens attend to later ones, so no prompt can reuse a prefix of another",
    r"is an encoder-decoder, whose layers also attend to an encoder's output",
    r"takes no cache \(no argument cache or past_key_values\): it is no decoder of text, "
    "or keeps what it read in an argument of its own",
    r"keeps nothing that a later request could reuse",
    r"keeps a \w+, which is not served yet",
    r"keeps its indexer's positions",
    r"transformers has no model of this configuration alone, it is a part of others",
    r"; (check the configuration's|correct the) fields?$",
)
"""True whatever the release: what a model is, or what its file says."""

NOT_READ = "its layers could not be found by a run without memory: "


def described(fields: dict[str, Any], tmp_path: Path) -> dict[str, dict[str, Any]]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return components_of_config(path)


STEP = {
    "num_hidden_layers": 4,
    "sliding_window": 512,
    "layer_types": ["full_attention", *["sliding_attention"] * 3],
}

PLANNED: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "experts that look at values": (
        {"model_type": "longcat_flash", "num_layers": 2},
        {"full": {"kind": "mla", "latent_dim": 512, "rope_dim": 64, "layers": [0, 1, 2, 3]}},
    ),
    "experts of attention": (
        {"model_type": "jetmoe", "num_hidden_layers": 2, "num_key_value_heads": 16},
        {"full": {"n_kv_heads": 16, "head_dim": 128, "layers": [0, 1]}},
    ),
    "positions that look at values": (
        {"model_type": "roformer", "num_hidden_layers": 2, "is_decoder": True},
        {"full": {"n_kv_heads": 12, "head_dim": 64, "layers": [0, 1]}},
    ),
    "a mask that looks at values": (
        {"model_type": "rembert", "num_hidden_layers": 2, "is_decoder": True},
        {"full": {"n_kv_heads": 18, "head_dim": 64, "layers": [0, 1]}},
    ),
    "a text model of no mapping": (
        {"model_type": "step3p5", **STEP},
        {"full": {"layers": [0]}, "swa": {"window": 511, "layers": [1, 2, 3]}},
    ),
    "a model with images of no mapping": (
        {"model_type": "step3p7", "text_config": STEP},
        {"full": {"layers": [0]}, "swa": {"window": 511, "layers": [1, 2, 3]}},
    ),
    "a scan that transformers restarts": (
        {"model_type": "falcon_mamba", "num_hidden_layers": 2, "hidden_size": 4096},
        {"mamba": {"conv_dim": 8192, "n_heads": 1, "head_dim": 8192, "state_dim": 16}},
    ),
    "such a scan beside attention": (
        {"model_type": "jamba", "num_hidden_layers": 8},
        {"full": {"n_kv_heads": 8, "layers": [4]}, "mamba": {"layers": [0, 1, 2, 3, 5, 6, 7]}},
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", PLANNED)
def test_a_model_that_does_not_run_here_is_planned_all_the_same(case: str, tmp_path: Path) -> None:
    fields, expected = PLANNED[case]
    if fields["model_type"] not in KINDS:
        pytest.skip(f"this transformers has no {fields['model_type']}")
    found = described(fields, tmp_path)
    assert found.keys() == expected.keys()
    for name, options in expected.items():
        assert options.items() <= found[name].items()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "bert"}, "model BertLMHeadModel (bert): is an encoder: its tokens attend"),
        ({"model_type": "xlm"}, "model XLMWithLMHeadModel (xlm): is an encoder: its tokens attend"),
        ({"model_type": "flaubert"}, "model FlaubertModel (flaubert): is an encoder: its tokens"),
        ({"model_type": "whisper"}, "model_type 'whisper': is an encoder-decoder, whose layers"),
        (
            {"model_type": "llama", "num_hidden_layers": 100_000},
            "model_type 'llama': num_hidden_layers is 100,000, expected 1 to 2,000; correct",
        ),
        (
            {"model_type": "gpt2", "n_layer": 0},
            "model_type 'gpt2': num_hidden_layers is 0, expected 1 to 2,000; correct the field",
        ),
        (
            {"model_type": "llama", "num_key_value_heads": 7, "num_hidden_layers": 1},
            "model_type 'llama': num_attention_heads is 32, no multiple of num_key_value_heads, 7",
        ),
    ],
)
def test_a_model_that_keeps_no_prefix_or_cannot_be_is_refused_by_name(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        described(fields, tmp_path)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        (
            {"num_key_value_head": 8},
            ["'num_key_value_head', so its default counts; did you mean 'num_"],
        ),
        (
            {"hidden_sizes": 64, "torch_dtype": "float16", "rope_theta": 1e6},
            ["'hidden_sizes', so its"],
        ),
        ({"num_key_value_heads": 8, "num_key_value_head": 8, "mine": 1}, []),
    ],
)
def test_a_field_that_is_nearly_one_that_is_known_is_noted(
    fields: dict[str, Any], meant: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    described({"model_type": "llama", "num_hidden_layers": 1, **fields}, tmp_path)
    assert len(caplog.messages) == len(meant)
    for said, part in zip(caplog.messages, meant, strict=True):
        assert part in said


def outcome(kind: str, tmp_path: Path) -> str:
    """Why the default configuration of a kind is refused; empty where it is planned."""
    try:
        fields = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    except Exception as error:  # noqa: BLE001 - it has no default of its own
        return f"no default: {' '.join(str(error).split())}; correct the fields"
    try:
        found = described(fields, tmp_path)
    except ConfigError as error:
        return str(error)
    assert found
    assert all(options["n_layers"] == len(options["layers"]) for options in found.values())
    return ""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", SOME)
def test_some_kinds_are_planned_or_refused_for_a_true_reason(kind: str, tmp_path: Path) -> None:
    said = outcome(kind, tmp_path)
    assert not said or any(re.search(reason, said) for reason in REASONS), said


def test_a_model_that_transformers_maps_to_a_name_it_lacks_is_found_beside_its_configuration(
    tmp_path: Path,
) -> None:
    if "voxtral_realtime" not in KINDS:
        pytest.skip("this transformers has no voxtral_realtime")
    said = outcome("voxtral_realtime", tmp_path)
    assert not said or said.startswith("model VoxtralRealtimeTextModel (voxtral_realtime_text): ")


GROUPS = 4
"""Parts of a minute."""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", range(GROUPS))
def test_every_kind_is_planned_or_refused_for_a_true_reason(group: int, tmp_path: Path) -> None:
    kinds = KINDS[group::GROUPS]
    said = {kind: outcome(kind, tmp_path) for kind in kinds}
    unknown = {
        kind: why
        for kind, why in said.items()
        if why and NOT_READ not in why and not any(re.search(each, why) for each in REASONS)
    }
    assert not unknown
    assert all("\n" not in why for why in said.values())
    not_read = [kind for kind, why in said.items() if NOT_READ in why]
    assert len(not_read) <= len(kinds) // 12, not_read
    causal = [kind for kind in kinds if CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING]
    assert any(not said[kind] for kind in causal)
