"""The model of a component, from its declaration alone.

Of a reach of the core's own terms only their names and token counts are read; their meaning is
written down a second time, in `brute_force`. Of any other term its definition in tokens is read,
`needs`, and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvgraft import terms
from kvgraft.contract import COPY_ON_WRITE
from kvgraft.packages.dispatch import Mounted
from kvgraft.reach import Reach
from kvgraft.terms import Term
from kvgraft.types import Tier
from kvgraft_testing.machine.brute_force import ModelComponent, ModelTerm

__all__ = ["KINDS", "model_component", "model_components", "numbers_of"]

KINDS = {
    "Everything": "all",
    "Trailing": "last",
    "Leading": "first",
    "Chunk": "chunk",
    "ChunkedLocal": "local",
    "StateAt": "state",
}
"""Kinds of `ModelTerm` by the class name of the core's terms."""


def numbers_of(term: object) -> list[int]:
    """The numbers in a term, near which its answers may change."""
    if not dataclasses.is_dataclass(term) or isinstance(term, type):
        return []
    return [value for value in dataclasses.astuple(term) if type(value) is int and value > 0]


def _is_own(term: Term) -> bool:
    """Whether a term is one of the core's, whose containment the model works out itself."""
    return type(term).__module__ == terms.__name__


def _is_foreign(reach: Reach) -> bool:
    return not all(map(_is_own, reach.terms))


def _part(term: Term) -> ModelTerm:
    """A term in the model's form."""
    if not _is_own(term):
        return ModelTerm("term", max(numbers_of(term), default=0), term.needs)
    return ModelTerm(KINDS[type(term).__name__], getattr(term, "tokens", 0))


def model_component(mounted: Mounted) -> ModelComponent:
    """A component's declaration, as the model records it."""
    declaration, component = mounted.plugin.declaration, mounted.component
    parts = tuple(_part(term) for term in component.reach.terms)
    return ModelComponent(
        name=mounted.name,
        parts=parts,
        home_is_host=declaration.home is Tier.HOST,
        mirrored=component.host is not None,
        slots_per_page=1 if parts[0].kind == "state" else component.slots_per_page,
        can_copy=COPY_ON_WRITE in declaration.capabilities,
        stored_tokens=component.reach.stored_tokens,
        own_copies=mounted.transfer_hooks is not None,
    )


def model_components(mounted: Sequence[Mounted]) -> tuple[ModelComponent, ...]:
    """The components of a cache, in its order."""
    reaches = {each.name: each.component.reach for each in mounted}
    foreign = {name for name, reach in reaches.items() if _is_foreign(reach)}
    return tuple(
        dataclasses.replace(
            model_component(each),
            said_to_contain=frozenset(
                name
                for name, other in reaches.items()
                if {each.name, name} & foreign and reaches[each.name].contains(other)
            ),
        )
        for each in mounted
    )
