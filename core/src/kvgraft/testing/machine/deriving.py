"""The model of a component, from what it declares and nothing else.

Of a reach only the names of its terms and their token counts are read; what they mean is written
down a second time, in `brute_force`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.contract import COPY_ON_WRITE
from kvgraft.dispatch import Mounted
from kvgraft.testing.machine.brute_force import ModelComponent, Part
from kvgraft.types import Tier

__all__ = ["KINDS", "model_component", "model_components"]

KINDS = {
    "Everything": "all",
    "Trailing": "last",
    "Leading": "first",
    "Chunk": "chunk",
    "StateAt": "state",
}
"""Kinds of `Part` by the class name of the term."""


def model_component(mounted: Mounted) -> ModelComponent:
    """What a component declares, as the model knows it."""
    declaration, component = mounted.plugin.declaration, mounted.component
    parts = tuple(
        Part(KINDS[type(term).__name__], getattr(term, "tokens", 0))
        for term in component.reach.terms
    )
    return ModelComponent(
        name=mounted.name,
        parts=parts,
        home_is_host=declaration.home is Tier.HOST,
        mirrored=component.host is not None,
        slots_per_page=1 if parts[0].kind == "state" else component.slots_per_page,
        can_copy=COPY_ON_WRITE in declaration.capabilities,
        own_copies=mounted.build_hicache_transfers is not None,
    )


def model_components(mounted: Sequence[Mounted]) -> tuple[ModelComponent, ...]:
    """The components of a cache, in its order."""
    return tuple(model_component(each) for each in mounted)
