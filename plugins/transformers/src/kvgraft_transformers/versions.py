"""The versions of transformers that this package was verified with."""

from __future__ import annotations

import importlib_metadata

from kvgraft import ConfigError

__all__ = ["VERIFIED", "check_transformers"]

VERIFIED = ((5, 23), (5, 24))
"""Oldest and newest minor version whose cache layers and models the tests compared."""


def check_transformers(version: str | None = None) -> None:
    """Refuse a version of transformers whose cache interface was not verified.

    Args:
        version: the installed one by default.

    Raises:
        ConfigError: another minor version.
    """
    installed = importlib_metadata.version("transformers") if version is None else version
    oldest, newest = VERIFIED
    if not oldest <= tuple(int(part) for part in installed.split(".")[:2]) <= newest:
        first, last = (".".join(str(part) for part in version) for version in VERIFIED)
        raise ConfigError(
            f"transformers {installed} is installed, kvgraft-transformers was verified with "
            f"{first} to {last}; run pip install 'transformers~={last}.0'"
        )
