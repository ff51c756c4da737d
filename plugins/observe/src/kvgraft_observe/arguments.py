"""Refusals of wrong arguments, in one line each: `CacheMetrics: cache=3; give a kvgraft.Cache`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvgraft import Cache, ConfigError
from kvgraft.refusals import shown

__all__ = [
    "expect_attributes",
    "expect_cache",
    "expect_callable",
    "expect_count",
    "expect_names",
    "expect_type",
]


def expect_type(subject: str, value: object, kind: type, wanted: str) -> None:
    """Refuse a value of another type.

    Args:
        subject: of the message: the call and its argument.
        value: the argument.
        kind: the type that is accepted.
        wanted: the value to give instead.

    Raises:
        ConfigError: it is of another type.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{subject}={shown(value)}; give {wanted}")


def expect_cache(subject: str, value: object) -> None:
    """Refuse anything but a cache.

    Raises:
        ConfigError: it is none.
    """
    expect_type(f"{subject}: cache", value, Cache, "a kvgraft.Cache")


def expect_callable(subject: str, value: object, wanted: str) -> None:
    """Refuse a value that cannot be called.

    Raises:
        ConfigError: it cannot.
    """
    if not callable(value):
        raise ConfigError(f"{subject}={shown(value)}; give {wanted}")


def expect_count(
    subject: str, value: object, least: int, most: int | None = None, zero: str = ""
) -> None:
    """Refuse anything but a whole number between two bounds.

    Args:
        subject: of the message: the call and its argument.
        value: the argument.
        least: the smallest accepted value.
        most: the largest accepted value; None for any.
        zero: the meaning of 0, if it has one of its own.

    Raises:
        ConfigError: it is no whole number, or out of bounds.
    """
    number = value if isinstance(value, int) and not isinstance(value, bool) else least - 1
    if number < least or (most is not None and number > most):
        bounds = f"{least} or more" if most is None else f"{least} to {most}"
        wanted = f"{zero}, or more" if zero else f"a whole number, {bounds}"
        raise ConfigError(f"{subject}={shown(value)}; give {wanted}")


def expect_names(subject: str, value: object, example: str) -> None:
    """Refuse anything but a collection of strings; a single string is refused.

    Raises:
        ConfigError: it is none.
    """
    if (
        isinstance(value, (str, bytes))
        or not isinstance(value, Collection)
        or not all(isinstance(each, str) for each in value)
    ):
        raise ConfigError(f"{subject}={shown(value)}; give a list of names, such as [{example!r}]")


def expect_attributes(subject: str, value: object) -> None:
    """Refuse anything but attributes of OpenTelemetry: strings and numbers by name.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(each, (str, int, float, bool))
        for name, each in value.items()
    ):
        raise ConfigError(
            f"{subject}: attributes={shown(value)}; give texts and numbers by name, such as "
            "{'cache': 'large'}"
        )
