"""Which component serves which layer, and which models are refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoModelForSeq2SeqLM, DynamicCache, T5Config
from transformers.cache_utils import DummyLayer, DynamicLayer

from kvgraft import ConfigError
from kvgraft_transformers import UnsupportedModelError, architecture, read_architecture
from kvgraft_transformers.probing import Probe, cache_argument, probe_model
from kvgraft_transformers.tiny import FAMILIES, build_tiny_model
from kvgraft_transformers.versions import check_transformers

COMPONENTS = {
    "llama": {"full": [0, 1, 2, 3]},
    "qwen3": {"full": [0, 1, 2, 3]},
    "gemma3_text": {"swa": [0, 2], "full": [1, 3]},
    "gemma4_text": {"swa": [0, 2], "full": [1, 3]},
    "gpt_oss": {"swa": [0, 2], "full": [1, 3]},
    "mimo_v2_flash": {"full": [0, 2], "swa": [1, 3]},
    "llama4_text": {"swa": [0, 1, 2], "full": [3]},
    "deepseek_v3": {"full": [0, 1, 2, 3]},
    "deepseek_v32": {"full@1x16": [0, 1, 2, 3], "full@indexer-16": [0, 1, 2, 3]},
    "bamba": {"full": [1, 3], "mamba": [0, 2]},
    "falcon_h1": {"full": [0, 1, 2, 3], "mamba": [0, 1, 2, 3]},
    "nemotron_h": {"full": [1], "mamba": [0, 2]},
    "mamba2": {"mamba": [0, 1]},
    "qwen3_next": {"full": [1, 3], "mamba": [0, 2]},
    "kimi_linear": {"full": [1, 3], "mamba": [0, 2]},
    "minimax": {"full": [1, 3], "mamba": [0, 2]},
    "lfm2": {"full": [1, 3], "mamba": [0, 2]},
    "lfm3": {"full": [1], "swa": [3], "mamba": [0, 2]},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_gets_the_component_of_its_kind(family: str, tiny: Any) -> None:
    components = read_architecture(tiny(family), sparse_on_host=False).components
    layers = {name: options["layers"] for name, options in components.items()}
    assert layers == COMPONENTS[family]


def test_a_latent_is_kept_as_one_row(tiny: Any) -> None:
    (options,) = read_architecture(tiny("deepseek_v3"), sparse_on_host=False).components.values()
    assert (options["kind"], options["latent_dim"], options["rope_dim"]) == ("mla", 16, 8)


def test_a_window_keeps_the_tokens_that_the_next_one_sees(tiny: Any) -> None:
    for family, window in (("gemma3_text", 48), ("llama4_text", 48), ("gpt_oss", 40)):
        components = read_architecture(tiny(family), sparse_on_host=False).components
        assert components["swa"]["window"] == window - 1


def test_layers_with_other_heads_get_a_pool_of_their_own() -> None:
    model = build_tiny_model(
        "gemma4_text",
        num_kv_shared_layers=0,
        layer_types=["full_attention", "sliding_attention"] * 3,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
    )
    components = read_architecture(model, sparse_on_host=False).components
    assert components["full"]["head_dim"] == 32
    assert components["swa"]["head_dim"] == 16


def test_two_windows_get_two_components(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probe_model

    def with_another_window(model: Any) -> Any:
        probed = probe(model)
        probed.layers[2].sliding_window = 32
        return probed

    monkeypatch.setattr(architecture, "probe_model", with_another_window)
    components = read_architecture(tiny("gemma3_text"), sparse_on_host=False).components
    assert {name: options["layers"] for name, options in components.items()} == {
        "swa@w48-2x16": [0],
        "swa@w32-2x16": [2],
        "full": [1, 3],
    }
    assert components["swa@w32-2x16"]["window"] == 31


def test_sparse_layers_go_to_the_host_when_asked(tiny: Any) -> None:
    found = read_architecture(tiny("deepseek_v32"), sparse_on_host=True)
    assert list(found.components) == ["hisparse"]
    assert all(plan.sparse for plan in found.layers)
    assert found.components["hisparse"]["index_dim"] == 16


MAMBA1: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "num_key_value_heads": None, "head_dim": None},
    "falcon_mamba": {"state_size": 8, "num_key_value_heads": None, "head_dim": None},
    "jamba": {
        "head_dim": None,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
}


@pytest.mark.parametrize("family", MAMBA1)
def test_a_mamba1_scan_is_refused_by_name(family: str) -> None:
    model = build_tiny_model(family, **MAMBA1[family])
    with pytest.raises(UnsupportedModelError, match=rf"\({family}\): layer 0 .* Mamba1 scan"):
        read_architecture(model, sparse_on_host=False)


def test_a_model_that_insists_on_another_cache_of_its_own_is_refused_by_name() -> None:
    class OwnCache(DynamicCache):  # type: ignore[misc]
        pass

    def insist(_: Any, args: Any, kwargs: Any) -> Any:
        cache = kwargs[argument]
        if cache is None:
            kwargs[argument] = OwnCache()
        elif not isinstance(cache, OwnCache):
            raise ValueError(f"Llama has a cache of its own and does not take {type(cache)}")
        return args, kwargs

    model = build_tiny_model("llama")
    argument = cache_argument(model)
    model.register_forward_pre_hook(insist, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM \(llama\): .* of its own"):
        read_architecture(model, sparse_on_host=False)


def test_lightning_attention_alone_is_refused_by_name() -> None:
    model = build_tiny_model("minimax", layer_types=["linear_attention"] * 4)
    with pytest.raises(
        UnsupportedModelError, match=r"MiniMaxForCausalLM \(minimax\): does not run"
    ):
        read_architecture(model, sparse_on_host=False)


def test_block_sparse_layers_are_refused_by_their_type() -> None:
    model = build_tiny_model(
        "minimax_m3_vl_text",
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention", "minimax_m3_sparse"] * 2,
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=16,
        index_topk_blocks=2,
    )
    with pytest.raises(UnsupportedModelError, match=r"layer 1 .* a MiniMaxM3VLSparseCacheLayer"):
        read_architecture(model, sparse_on_host=False)


def test_a_state_outside_the_cache_is_refused() -> None:
    model = build_tiny_model(
        "recurrent_gemma",
        lru_width=64,
        attention_window_size=32,
        block_types=["recurrent", "attention"],
        conv1d_width=4,
    )
    with pytest.raises(UnsupportedModelError, match="keeps a state outside its cache"):
        read_architecture(model, sparse_on_host=False)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_follow_the_prompts_length_are_refused(kind: Any) -> None:
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        rope["original_max_position_embeddings"] = 4096
    model = build_tiny_model("llama", rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match=f"'{kind}' frequencies, which follow"):
        read_architecture(model, sparse_on_host=False)


def test_a_model_that_keeps_nothing_is_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "probe_model", lambda _: Probe([DummyLayer()] * 4, None))
    with pytest.raises(UnsupportedModelError, match="keeps nothing that a later request"):
        read_architecture(tiny("llama"), sparse_on_host=False)


def test_sparse_on_host_needs_an_indexer(tiny: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="no layer with an indexer"):
        read_architecture(tiny("llama"), sparse_on_host=True)


def test_an_encoder_decoder_is_refused_by_name() -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=r"\(t5\): is an encoder-decoder"):
        read_architecture(model, sparse_on_host=False)


def test_a_layer_that_keeps_something_more_is_refused_by_its_type(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:

    class CompressedLayer(DynamicLayer):  # type: ignore[misc]
        pass

    probe = probe_model

    def with_another_layer(model: Any) -> Any:
        probed = probe(model)
        probed.layers[2].__class__ = CompressedLayer
        return probed

    monkeypatch.setattr(architecture, "probe_model", with_another_layer)
    with pytest.raises(UnsupportedModelError, match=r"layer 2 .* keeps a CompressedLayer"):
        read_architecture(tiny("llama"), sparse_on_host=False)


@pytest.mark.parametrize("version", ["5.22.1", "5.25.0", "4.57.0", "6.0.0"])
def test_another_transformers_is_refused_with_both_versions(version: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"transformers {version} is installed, .* 5\.23 to 5\.24"
    ):
        check_transformers(version)


def test_the_installed_transformers_is_a_verified_one() -> None:
    check_transformers()
    check_transformers("5.23.7")
    check_transformers("5.24.0.dev0")
