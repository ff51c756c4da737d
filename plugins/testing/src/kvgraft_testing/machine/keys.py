"""Keys with which conversations go on: they remember where they were found before."""

from __future__ import annotations

from copy import copy

from kvgraft.tree.keys import TokenKey
from kvgraft_testing.machine.brute_force import Prefix
from kvgraft_testing.machine.live import Live

__all__ = ["Keys"]

MOST = 12
"""Keys kept."""


class Keys:
    """The keys of recently ended requests."""

    def __init__(self) -> None:
        self._kept: dict[Prefix, TokenKey] = {}

    def note(self, live: Live) -> None:
        """A request ended."""
        self._kept[live.sequence] = live.request.key
        if len(self._kept) > MOST:
            del self._kept[next(iter(self._kept))]

    def known(self, namespace: object, tokens: tuple[int, ...]) -> TokenKey:
        """A fork of the first key whose tokens these begin with; a new key if there is none."""
        for (space, start), key in self._kept.items():
            if space == namespace and tokens[: len(start)] == start:
                fork = copy(key)
                fork.extend(tokens[len(start) :])
                return fork
        return TokenKey(tokens, namespace)
