"""Component sets the state machine drives here: the built-in ones, and some of a third party."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvgraft import Chunk, ChunkedLocal, Everything, Leading, Reach, Trailing
from kvgraft.packages.registry import Plugin
from kvgraft_testing.machine import (
    Options,
    Setup,
    Sizes,
    paged_plugin,
    references,
    setup_for,
    state_plugin,
)

from .patterns import BlockSparse, Strided

__all__ = ["OPTIONS", "SETUPS", "WINDOW"]

WINDOW = 5


def _swa(sizes: Sizes) -> Mapping[str, Any]:
    """A pool smaller than the others', so that it is short on its own."""
    window = -(-WINDOW // sizes.page_size)
    return {
        "n_layers": 1,
        "window": WINDOW,
        "device_tokens": (sizes.device // 2 + window) * sizes.page_size,
        "host_tokens": sizes.host * 2 // 3 * sizes.page_size,
    }


def _hisparse(sizes: Sizes) -> Mapping[str, Any]:
    return {"n_layers": 1, "hot_tokens": 2 * sizes.page_size, "max_running": 3}


OPTIONS: dict[str, Options] = {
    "full": {"n_layers": 1},
    "swa": _swa,
    "mamba": {
        "n_layers": 1,
        "states": 7,
        "host_states": 6,
        "conv_dim": 8,
        "checkpoint_interval_tokens": 4,
    },
    "hisparse": _hisparse,
}

SINKS = paged_plugin("sinks", Reach(Leading(3), Trailing(4)))
CHUNKED = paged_plugin("chunked", Reach(Chunk(6)))
LOCAL = paged_plugin("local", Reach(ChunkedLocal(6)))
HEAD = paged_plugin("head", Reach(Leading(3)))
STRIDED = paged_plugin("strided", Reach(Strided(6, 2)))
# contains the window and the state at every boundary, and does not say so
WIDE = paged_plugin("wide", Reach(Strided(128, 8)))
BLOCKS = paged_plugin("blocks", Reach(BlockSparse(4, 2)))
QUARTERED = paged_plugin("quartered", Reach(Trailing(7)), slots_per_page=4)
BROAD = paged_plugin("broad", Reach(Everything()), width=48)
NEAR = paged_plugin("near", Reach(Trailing(2)))
FAR = paged_plugin("far", Reach(Trailing(7)))
LEAN = state_plugin("lean")
UNMIRRORED = paged_plugin("unmirrored", Reach(Trailing(3)), mirrored=False)
UNCOPIED = state_plugin("uncopied", can_copy=False)


def shared(*components: str | Plugin) -> Setup:
    """A set whose pools share one budget a tier."""
    setup = setup_for(components, OPTIONS)
    return replace(setup, name=f"{setup.name} share", shared=True)


def with_tenants(*components: str | Plugin) -> Setup:
    """A set whose pools two tenants share, one of them for a weight."""
    tenants: dict[str, dict[str, Any]] = {
        "a": {"namespaces": ["tenant"], "guarantee": 0.35, "weight": 2},
        "default": {"guarantee": 0.2},
    }
    return replace(setup_for(components, OPTIONS), tenants=tenants)


def swept_in_steps(*components: str | Plugin) -> Setup:
    """A set whose cleared data is freed a node or two at a time."""
    return replace(setup_for(components, OPTIONS), sweep_steps=3)


SETUPS: dict[str, Setup] = {
    setup.name: setup
    for setup in (
        *(
            setup_for(names.split("+"), OPTIONS)
            for names in (
                "full",
                "swa",
                "mamba",
                "hisparse",
                "full+swa",
                "full+mamba",
                "swa+mamba",
                "full+swa+mamba",
                "full+swa+mamba+hisparse",
            )
        ),
        setup_for([SINKS]),
        swept_in_steps("mamba", CHUNKED),
        with_tenants("full", QUARTERED, SINKS),
        setup_for(["full", UNMIRRORED, CHUNKED], OPTIONS),
        swept_in_steps("full", LOCAL),
        setup_for(["swa", LOCAL, HEAD], OPTIONS),
        swept_in_steps("full", HEAD, "mamba"),
        setup_for([BROAD, NEAR, FAR]),
        setup_for([BROAD, NEAR, FAR, LEAN]),
        setup_for([BROAD, LOCAL, LEAN]),
        setup_for([STRIDED]),
        setup_for(["swa", "mamba", WIDE], OPTIONS),
        setup_for(["full", STRIDED, BLOCKS], OPTIONS),
        setup_for(["mamba", BLOCKS], OPTIONS),
        setup_for([UNCOPIED], beside=references()),
        shared("full", "mamba"),
        shared("full", "swa", "mamba"),
        shared("full", QUARTERED, LEAN),
        shared("hisparse", "swa", "mamba"),
    )
}
