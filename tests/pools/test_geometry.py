"""Options that shape payloads refuse impossible values, with the field named."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvgraft import AttentionOptions, LayerOptions


def refused_field(model: type[LayerOptions], options: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(options)
    first = caught.value.errors()[0]
    return str(first["loc"][0]), first["msg"]


def test_layers_are_numbered_from_zero_unless_the_model_mixes_kinds() -> None:
    assert LayerOptions(n_layers=3).layer_numbers == (0, 1, 2)
    assert LayerOptions(n_layers=3, layers=(4, 12, 20)).layer_numbers == (4, 12, 20)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"layers": [4]}, "1 layers named, n_layers is 2"),
        ({"layers": [4, 4]}, "each layer once"),
        ({"layers": [12, 4]}, "ascending"),
        ({"layers": []}, "0 layers named"),
    ],
)
def test_layers_that_are_not_n_layers_numbers_in_order_are_refused(
    options: dict[str, Any], problem: str
) -> None:
    field, message = refused_field(LayerOptions, options)
    assert field == "layers"
    assert problem in message


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kind": "mla", "rope_dim": 64}, "latent_dim"),
        ({"kind": "mla", "latent_dim": 512}, "rope_dim"),
        ({"kind": "mla", "latent_dim": 512, "rope_dim": 0, "n_kv_heads": 8}, "n_kv_heads"),
        ({"kind": "mla", "latent_dim": 512, "rope_dim": 0, "head_dim": 8}, "head_dim"),
        ({"kind": "mla", "latent_dim": 512, "rope_dim": 0, "v_head_dim": 8}, "v_head_dim"),
        ({"latent_dim": 512}, "latent_dim"),
        ({"rope_dim": 0}, "rope_dim"),
        ({"kind": "mqa"}, "kind"),
        ({"dtype": "int8"}, "dtype"),
        ({"n_kv_heads": 0}, "n_kv_heads"),
        ({"heads": 2}, "heads"),
    ],
)
def test_dimensions_of_the_other_kind_or_missing_ones_are_refused(
    options: dict[str, Any], field: str
) -> None:
    assert refused_field(AttentionOptions, options)[0] == field
