"""Parts of a cache that a test puts a defect into, without a change for any other cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvgraft.assembly import Made, PartsFactory, parts_of
from kvgraft.config import CacheConfig, GuardMode
from kvgraft_guard import GuardedPartsFactory

__all__ = ["clocked_parts", "given_parts", "override", "own_parts"]


class GivenParts(PartsFactory):
    """Makes parts of the classes that it is given, the others as they are."""

    def __init__(self, config: CacheConfig, *given: type[Any]) -> None:
        super().__init__(config)
        self._given = given

    def kind(self, plain: type[Made]) -> type[Made]:
        return next((each for each in self._given if issubclass(each, plain)), plain)


def given_parts(*given: type[Any]) -> Callable[[CacheConfig], PartsFactory]:
    """A factory of parts for caches without a guard, by their settings.

    Args:
        given: subclasses of parts, such as of `Evictor`.
    """
    return lambda config: GivenParts(config, *given)


class OwnParts(PartsFactory):
    """Makes every part of a subclass that no other cache has; a guarded part is around it."""

    def kind(self, plain: type[Made]) -> type[Made]:
        guarded, own = super().kind(plain), _own(plain)
        return own if guarded is plain else type(plain.__name__, (guarded, own), {})

    def ready(self, cache: Any) -> Any:
        cache.__class__ = _own(type(cache))
        return super().ready(cache)


class GuardedOwnParts(OwnParts, GuardedPartsFactory):
    """The same around a cache with a guard."""


def clocked_parts(clock: Callable[[], float]) -> Callable[[CacheConfig], PartsFactory]:
    """A factory of the parts that settings ask for, with another clock for the storage tier."""

    def make(config: CacheConfig) -> PartsFactory:
        parts = parts_of(config)
        parts.clock = clock
        return parts

    return make


class Own:
    """Marks a subclass that one cache has for itself."""

    __slots__ = ()


def _own(plain: type[Made]) -> type[Made]:
    return type(plain.__name__, (plain, Own), {})


def own_parts(config: CacheConfig) -> PartsFactory:
    """The parts of a cache with these settings, for `override`."""
    return (OwnParts if config.guard is GuardMode.OFF else GuardedOwnParts)(config)


def override(part: object, **methods: object) -> None:
    """Replace methods of a part that `own_parts` made; a guard sees the new ones as the part's.

    Args:
        part: the cache itself, or its tree, journal, evictor, budget, slots and so on.
        methods: by name; each takes the part first.
    """
    (own,) = (each for each in type(part).__mro__ if Own in each.__bases__)
    for name, method in methods.items():
        assert callable(getattr(own, name)), name
        setattr(own, name, method)
