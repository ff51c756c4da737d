"""Finding storage backends by entry point and opening one from a line of text.

    file:/var/cache/kvgraft?capacity=10GiB

names the backend (the entry point of the group `kvgraft.storage`), where its store is, and its
options. A broken package is reported and left out; a URL that names it raises the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any
from urllib.parse import parse_qsl

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from kvgraft.contract import ApiVersion
from kvgraft.errors import ConfigError, KvgraftError
from kvgraft.optional import Published, how_to_install, import_failure, published
from kvgraft.refusals import SettingsModel, first_refusal
from kvgraft_storage.backend import StorageBackend

__all__ = [
    "STORAGE_API",
    "STORAGE_GROUP",
    "FoundDriver",
    "StorageDriver",
    "StorageOptions",
    "discover_storage",
    "open_existing_storage",
    "open_storage",
]

STORAGE_GROUP = "kvgraft.storage"
"""Entry points of this group are storage drivers."""

PACKAGES = {name: f"plugins/{name}" for name in ("file", "mooncake", "s3", "valkey")}
"""Folders of this project's own backends."""

SPOKEN_BY = {"redis": "valkey", "minio": "s3"}
"""Backends by the names of other servers they speak to."""

STORAGE_API = "1.2"
"""The version of the backend interface; it is counted apart from the components' contract."""


class StorageOptions(SettingsModel):
    """Options of a backend; extend it. Values come as text; unknown options are refused by name."""


@dataclass(frozen=True)
class StorageDriver:
    """A storage driver: the object of an entry point in the group `kvgraft.storage`.

    Attributes:
        api: the backend interface it was written for, a literal such as `"1.0"`.
        summary: one line for people.
        options: its typed options, a `StorageOptions`.
        open: opens a store from its location, the text between `name:` and `?`, percent escapes
            unchanged; raises `ConfigError` if it cannot.
        open_existing: the same for inspection: creates nothing, and raises
            `ConfigError` where there is no store; None where `open` is such a call.
    """

    api: str
    summary: str
    options: type[StorageOptions]
    open: Callable[[str, Any], StorageBackend]
    open_existing: Callable[[str, Any], StorageBackend] | None = None

    def defaults(self) -> dict[str, str]:
        """Every option with its default, as written in a URL; "" where it has none."""
        told = {}
        for name, field in self.options.model_fields.items():
            value = getattr(field.default, "value", field.default)  # of an enum
            text = str(value).lower() if isinstance(value, bool) else str(value)
            told[name] = "" if value is None or value is PydanticUndefined else text
        return told


@dataclass(frozen=True, slots=True)
class FoundDriver:
    """An entry point and its outcome: a driver, or the reason for refusing it."""

    name: str
    distribution: str
    version: str
    driver: StorageDriver | None
    problem: str | None


def discover_storage() -> list[FoundDriver]:
    """Every installed backend, by name; problems are reported, not raised (P5)."""
    return [_find(each) for each in published(STORAGE_GROUP)]


def open_storage(url: str, drivers: Mapping[str, StorageDriver] | None = None) -> StorageBackend:
    """Open a store.

    Args:
        url: `NAME:LOCATION?OPTION=VALUE&...`.
        drivers: backends to choose from instead of the installed ones.

    Raises:
        ConfigError: no such backend, one that cannot be used, an option that is unknown, given
            twice or impossible, or a location that cannot be opened.
    """
    return _open(url, drivers, lambda driver: driver.open)


def open_existing_storage(url: str) -> StorageBackend:
    """Open a store to inspect it, with an installed backend; a store is not created.

    Raises:
        ConfigError: as for `open_storage`, or there is no store.
    """
    return _open(url, None, lambda driver: driver.open_existing or driver.open)


def _open(
    url: str,
    drivers: Mapping[str, StorageDriver] | None,
    opener: Callable[[StorageDriver], Callable[[str, Any], StorageBackend]],
) -> StorageBackend:
    name, colon, rest = url.partition(":")
    if not colon or not name:
        raise ConfigError(f"storage {url!r} is not NAME:LOCATION, such as file:/var/cache/kvgraft")
    driver = _select(name) if drivers is None else drivers.get(name)
    if driver is None:
        raise ConfigError(f"storage {name!r} is none of {', '.join(sorted(drivers or {}))}")
    location, _, query = rest.partition("?")
    options = _options(name, driver.options, query)
    try:
        store = opener(driver)(location, options)
    except KvgraftError:
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"storage {name!r}: cannot be opened: {said}") from error
    if not isinstance(store, StorageBackend):
        raise ConfigError(
            f"storage {name!r}: opened a {type(store).__name__}, not a StorageBackend; "
            "report it to its authors"
        )
    return store


def _options(name: str, model: type[StorageOptions], query: str) -> StorageOptions:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"storage {name!r}: {error}; write OPTION=VALUE&OPTION=VALUE") from None
    given: dict[str, str] = {}
    for field, value in pairs:
        if field in given:
            raise ConfigError(f"storage {name!r}: option {field!r} is given twice; keep one")
        given[field] = value
    try:
        return model.model_validate(given)
    except ValidationError as error:
        said = first_refusal(error, model, "option")
        raise ConfigError(f"storage {name!r}: {said}") from error


def _select(name: str) -> StorageDriver:
    found = {entry.name: entry for entry in discover_storage()}
    entry = found.get(name)
    if entry is None:
        close = get_close_matches(name, found, n=1)
        known = ", ".join(found) or "none"
        advice = f"did you mean {close[0]}?" if close else "install a package that brings it"
        if name in PACKAGES:
            advice = how_to_install(PACKAGES[name])
        if name in SPOKEN_BY:
            advice = f"give {SPOKEN_BY[name]}:, which speaks to {name} servers"
        raise ConfigError(f"storage {name!r} is not installed; installed: {known}; {advice}")
    if entry.driver is None:
        raise ConfigError(f"storage {name!r}: {entry.problem}")
    return entry.driver


def _find(each: Published) -> FoundDriver:
    driver, problem = None, each.contested
    if problem is None:
        try:
            loaded = each.load()
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - raised by a plugin, reported (P5)
            problem = import_failure(raised)
        else:
            problem = _problem(loaded)
            driver = loaded if isinstance(loaded, StorageDriver) and problem is None else None
    return FoundDriver(each.name, each.distribution, each.version, driver, problem)


def _problem(loaded: object) -> str | None:
    """Why the object an entry point names cannot be used; None if it can."""
    if not isinstance(loaded, StorageDriver):
        return f"its entry point names a {type(loaded).__name__}, not a StorageDriver"
    try:
        written_for, kept = ApiVersion.parse(loaded.api), ApiVersion.parse(STORAGE_API)
    except ValueError as error:
        return f"storage API {error}; write a literal such as '{STORAGE_API}'"
    if written_for.major != kept.major or written_for > kept:
        return (
            f"written for storage API {loaded.api}, this core has {STORAGE_API}; "
            f"install a kvgraft with storage API {loaded.api} or a matching package"
        )
    options: object = loaded.options
    if not (isinstance(options, type) and issubclass(options, StorageOptions)):
        return f"its options are {options!r}, not a StorageOptions"
    if options.model_config.get("extra") != "forbid":
        return f"{options.__name__} must forbid unknown fields: extra='forbid'"
    return None
