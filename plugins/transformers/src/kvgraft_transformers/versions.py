"""The versions of transformers that this package was verified with."""

from __future__ import annotations

import importlib_metadata

from kvgraft import ConfigError

__all__ = ["VERIFIED", "check_transformers"]

VERIFIED = (5, 23)
"""Major and minor version whose cache layers and models the tests compared."""


def check_transformers(version: str | None = None) -> None:
    """Refuse a transformers whose cache interface nobody has compared.

    Args:
        version: the installed one by default.

    Raises:
        ConfigError: another minor version.
    """
    installed = importlib_metadata.version("transformers") if version is None else version
    if tuple(installed.split(".")[:2]) != tuple(str(part) for part in VERIFIED):
        wanted = ".".join(str(part) for part in VERIFIED)
        raise ConfigError(
            f"transformers {installed} is installed, kvgraft-transformers was verified with "
            f"{wanted}; run pip install 'transformers~={wanted}.0'"
        )
