"""A mirror takes the rows of its pool as they are; another is refused when the cache opens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgraft import (
    BuildContext,
    Cache,
    CacheConfig,
    Component,
    ConfigError,
    Everything,
    HostMirror,
    PlaneSpec,
    PluginError,
    Reach,
    Span,
    Trailing,
    hookimpl,
)
from kvgraft.packages.registry import load_plugin

from ..serving.components import PagedPackage


class Narrow(PagedPackage):
    """A component whose mirror has planes of another kind."""

    mirrored: tuple[PlaneSpec, ...] = ()

    @hookimpl
    def create_component(self, options: Any, context: BuildContext) -> Component:
        found = super().create_component(options, context)
        found.host = HostMirror(self.mirrored, 8)
        return found


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [((4,), torch.int8, "int8"), ((8,), None, "(8,)"), ((4,), torch.float64, "float64")],
)
def test_a_mirror_of_another_kind_is_named(shape: Any, dtype: Any, said: str) -> None:
    package = Narrow("narrow", Reach(Everything()))
    config = CacheConfig(components={"narrow": {}}, page_size=4, device_tokens=64, host_tokens=64)
    with Cache(config, plugins=[load_plugin("narrow", PagedPackage("narrow", package.reach))]) as c:
        (spec, *rest) = c.mounted[0].component.device.specs
    Narrow.mirrored = (spec._replace(shape=shape, dtype=dtype or spec.dtype), *rest)
    with pytest.raises(PluginError) as refused:
        Cache(config, plugins=[load_plugin("narrow", package)])
    told = str(refused.value)
    assert f"plane {spec.name!r} of layer {spec.layer} is {spec.shape}" in told
    assert said in told.partition("on DEVICE")[2]
    assert "\n" not in told


def test_a_reach_says_its_pages() -> None:
    assert Reach(Trailing(6)).pages(5, 4) == (Span(3, 5),)
    assert Reach(Trailing(6)).pages(1, 4) == (Span(0, 1),)
    assert Reach(Everything()).pages(5, 4) == (Span(0, 5),)
    assert Reach(Everything()).pages(0, 4) == ()
    for boundary, page_size, said in (
        (3, 0, "Reach.pages: page_size 0; give a whole number, 1 or more"),
        (-1, 4, "Reach.pages: boundary -1; give a whole number, 0 or more"),
        (2.5, 4, "Reach.pages: boundary 2.5; give"),
    ):
        with pytest.raises(ConfigError, match=said):
            Reach(Trailing(6)).pages(boundary, page_size)  # type: ignore[arg-type]
