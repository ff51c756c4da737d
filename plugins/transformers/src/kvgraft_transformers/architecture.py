"""The data that a model keeps per layer, found by running the model.

Configurations name heads, ranks and kernels in many ways, but a layer's entry in its cache has one
form. So the model runs over a few tokens with transformers' own cache. The resulting shapes decide
which component serves which layer, with which geometry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvgraft_transformers.errors import UnsupportedModelError
from kvgraft_transformers.geometry import (
    Geometry,
    Index,
    Pages,
    State,
    index_of,
    pages_of,
    state_of,
)
from kvgraft_transformers.probing import Probe, check_layer, describe_failure, probe_model

__all__ = ["Architecture", "LayerPlan", "describe_layers", "read_architecture"]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The components that keep one layer's data.

    Attributes:
        index: the layer's number in the model.
        paged: component of its keys and values; None if it has none.
        window: most recent tokens that its attention sees, the new one included; None for all.
        latent: whether keys and values are one row of the component's `"latent"` plane.
        key_dim: elements of a key; the position at which a latent row is split.
        indexer: component of its indexer keys; None if it has none.
        sparse: whether its keys and values are on the host, from which selected rows are fetched.
        state: component of its recurrent state; None if it has none.
        n_convs: convolution states.
        has_recurrent: whether it has a recurrent state as well.
    """

    index: int
    paged: str | None = None
    window: int | None = None
    latent: bool = False
    key_dim: int = 0
    indexer: str | None = None
    sparse: bool = False
    state: str | None = None
    n_convs: int = 0
    has_recurrent: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model's layers and the components that they need.

    Attributes:
        layers: the layers in order, including those that keep nothing.
        components: options by component name, without sizes.
        own_cache: the class of cache that the model requires; None if it accepts others.
    """

    layers: tuple[LayerPlan, ...]
    components: dict[str, dict[str, Any]]
    own_cache: type[Cache] | None = None

    def of_package(self, package: str) -> list[str]:
        """The components that are instances of a package."""
        return [name for name in self.components if name.partition("@")[0] == package]


def read_architecture(model: PreTrainedModel, *, sparse_on_host: bool) -> Architecture:
    """The components that a model needs, from one run over two tokens.

    Args:
        model: a decoder with a language-model head, on any device.
        sparse_on_host: whether layers with an indexer keep keys and values on the host.

    Raises:
        UnsupportedModelError: a layer or the model keeps something else; it is named.
    """
    try:
        return describe_layers(model, probe_model(model), sparse_on_host=sparse_on_host)
    except UnsupportedModelError:
        raise
    except Exception as error:
        reason = describe_failure(model, error)
        raise UnsupportedModelError(model, f"cannot be understood: {reason}") from error


def describe_layers(
    model: PreTrainedModel,
    probe: Probe,
    *,
    sparse_on_host: bool,
    check: Callable[[PreTrainedModel, int, Any], None] = check_layer,
) -> Architecture:
    """The components for the layers of a model's cache.

    Args:
        model: the model.
        probe: its cache.
        sparse_on_host: whether layers with an indexer keep keys and values on the host.
        check: refuses a layer; by default also one that transformers cannot resume.

    Raises:
        UnsupportedModelError: a layer keeps something else; it is named.
    """
    layers, own_cache = probe
    pages: list[Pages | None] = []
    indexes: list[Index | None] = []
    states: list[State | None] = []
    for index, layer in enumerate(layers):
        check(model, index, layer)
        pages.append(pages_of(model, layer, sparse_on_host=sparse_on_host))
        indexes.append(None if sparse_on_host else index_of(layer))
        states.append(state_of(layer))
    if not any([*pages, *indexes, *states]):
        raise UnsupportedModelError(model, "keeps nothing that a later request could reuse")
    if sparse_on_host and not any(kv is not None and kv.package == "hisparse" for kv in pages):
        raise UnsupportedModelError(
            model, "has no layer with an indexer to keep on the host; leave sparse_on_host off"
        )
    names = _name([*pages, *indexes, *states])
    components: dict[str, dict[str, Any]] = {}
    for group in (pages, indexes, states):
        for index, geometry in enumerate(group):
            if geometry is not None:
                options = components.setdefault(
                    names[geometry], {**geometry.options(), "layers": []}
                )
                options["layers"].append(index)
    for options in components.values():
        options["n_layers"] = len(options["layers"])
    plans = [
        LayerPlan(
            index=index,
            paged=None if kv is None else names[kv],
            window=None if kv is None else kv.window,
            latent=kv is not None and kv.latent,
            key_dim=0 if kv is None else kv.key_dim,
            indexer=_indexer(kv, key, names),
            sparse=kv is not None and kv.package == "hisparse",
            state=None if state is None else names[state],
            n_convs=0 if state is None else state.n_convs,
            has_recurrent=state is not None and bool(state.recurrent),
        )
        for index, (kv, key, state) in enumerate(zip(pages, indexes, states, strict=True))
    ]
    return Architecture(tuple(plans), components, own_cache)


def _indexer(kv: Pages | None, key: Index | None, names: dict[Geometry, str]) -> str | None:
    if kv is not None and kv.package == "hisparse":
        return names[kv]
    return None if key is None else names[key]


def _name(
    geometries: Sequence[Geometry | None],
) -> dict[Geometry, str]:
    """A component name for each geometry: the package's, with a label if it has several."""
    distinct = list(dict.fromkeys(each for each in geometries if each is not None))
    names: dict[Geometry, str] = {}
    for geometry in distinct:
        same = [each for each in distinct if each.package == geometry.package]
        name = geometry.package if len(same) == 1 else f"{geometry.package}@{geometry.label}"
        if name in names.values():
            name = f"{name}-{len(names)}"
        names[geometry] = name
    return names
