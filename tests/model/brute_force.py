"""Matching and reach by brute force.

Sequences are tuples of tokens, a page is named by all tokens up to its end, and what a component
needs at a boundary is found by asking every token. No tree, no spans, no shortcut; nothing here
imports kvgraft.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["BruteForce", "ModelComponent", "Part", "Prefix", "needed_tokens"]

Prefix = tuple[object, tuple[int, ...]]
"""A namespace and all tokens up to a page's end: the identity of a page, or of a state."""

COMPARED_BOUNDARIES = 70
"""Boundaries at which two reaches are compared; beyond every size the tests use."""


class Part(NamedTuple):
    """One term of a reach: `all`, `last` n, `first` n, `chunk` of n, or the `state`."""

    kind: str
    tokens: int = 0


@dataclass(frozen=True)
class ModelComponent:
    """What the model knows of a component.

    Attributes:
        name: its name in the cache.
        parts: its reach.
        home_is_host: its canonical copy is on HOST.
        mirrored: whether it has host slots at all.
        slots_per_page: slots a page takes.
    """

    name: str
    parts: tuple[Part, ...]
    home_is_host: bool = False
    mirrored: bool = True
    slots_per_page: int = 1

    @property
    def is_state(self) -> bool:
        return self.parts[0].kind == "state"

    @property
    def is_everything(self) -> bool:
        return any(part.kind == "all" for part in self.parts)


def needed_tokens(parts: tuple[Part, ...], boundary: int) -> set[int]:
    """Positions of the tokens whose data is needed to compute the token at `boundary`.

    A state at the boundary is a function of the token before it, so that one stands for it.
    """
    needed = set()
    for kind, size in parts:
        for token in range(boundary):
            if (
                kind == "all"
                or (kind == "last" and token >= boundary - size)
                or (kind == "first" and token < size)
                or (kind == "chunk" and token // size == (boundary - 1) // size)
                or (kind == "state" and token == boundary - 1)
            ):
                needed.add(token)
    return needed


@dataclass
class BruteForce:
    """The components of one cache and its page size."""

    page_size: int
    components: tuple[ModelComponent, ...]
    _pages: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)
    _contains: dict[tuple[str, str], bool] = field(default_factory=dict)

    def pages(self, component: ModelComponent, boundary: int) -> frozenset[int]:
        """Pages that hold a token the component needs at a boundary; pages count from 0.

        For a state the page that ends at the boundary.
        """
        key = (component.name, boundary)
        if key not in self._pages:
            tokens = needed_tokens(component.parts, boundary * self.page_size)
            self._pages[key] = frozenset(token // self.page_size for token in tokens)
        return self._pages[key]

    def contains(self, outer: ModelComponent, inner: ModelComponent) -> bool:
        """Whether at every boundary `outer` needs all that `inner` needs."""
        key = (outer.name, inner.name)
        if key not in self._contains:
            self._contains[key] = (inner.is_state or not outer.is_state) and all(
                needed_tokens(inner.parts, boundary) <= needed_tokens(outer.parts, boundary)
                for boundary in range(COMPARED_BOUNDARIES)
            )
        return self._contains[key]

    def strictly_wider(self, component: ModelComponent) -> list[ModelComponent]:
        """Components whose reach contains this one's and is not contained in it."""
        return [
            other
            for other in self.components
            if self.contains(other, component) and not self.contains(component, other)
        ]

    def prefix(self, namespace: object, tokens: tuple[int, ...], page: int) -> Prefix:
        """The identity of page number `page` of a sequence."""
        return (namespace, tokens[: (page + 1) * self.page_size])

    def page_of(self, prefix: Prefix) -> int:
        """The number of a page."""
        return len(prefix[1]) // self.page_size - 1

    def prefixes(
        self, component: ModelComponent, namespace: object, tokens: tuple[int, ...], boundary: int
    ) -> list[Prefix]:
        """The pages of a sequence that the component needs at a boundary (in pages)."""
        return [
            self.prefix(namespace, tokens, page) for page in sorted(self.pages(component, boundary))
        ]

    def accepts(
        self,
        component: ModelComponent,
        present: set[Prefix],
        namespace: object,
        tokens: tuple[int, ...],
        boundary: int,
    ) -> bool:
        """Whether all the component needs at a boundary is among the pages `present`."""
        return all(
            prefix in present for prefix in self.prefixes(component, namespace, tokens, boundary)
        )

    def deepest(
        self,
        present: dict[str, set[Prefix]],
        namespace: object,
        tokens: tuple[int, ...],
        limit: int,
    ) -> int:
        """The deepest boundary, in pages and at most `limit`, that every component accepts."""
        for boundary in range(min(limit, len(tokens) // self.page_size), 0, -1):
            if all(
                self.accepts(component, present[component.name], namespace, tokens, boundary)
                for component in self.components
            ):
                return boundary
        return 0
