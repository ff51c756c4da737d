"""The contract's version and what a component may be capable of."""

from __future__ import annotations

from kvgraft.errors import PluginError

__all__ = [
    "API_VERSION",
    "CAPABILITIES",
    "COPY_ON_WRITE",
    "ENTRY_POINT_GROUP",
    "HOST_MIRROR",
    "PROJECT",
    "check_api_version",
]

PROJECT = "kvgraft"
"""The pluggy project name."""

ENTRY_POINT_GROUP = "kvgraft.components"
"""Entry points of this group are component packages."""

API_VERSION = "1.0"
"""The contract version this core implements. A component written for the same major version and
an equal or older minor version works."""

HOST_MIRROR = "host_mirror"
COPY_ON_WRITE = "copy_on_write"
CAPABILITIES = frozenset({HOST_MIRROR, COPY_ON_WRITE})
"""What a component may declare it can do (P8)."""


def check_api_version(plugin: str, version: str) -> None:
    """Refuse a component written for a contract this core does not keep (P3).

    Raises:
        PluginError: with both versions.
    """
    try:
        major, minor = (int(part) for part in version.split("."))
    except (ValueError, AttributeError):
        raise PluginError(
            plugin, f"API version {version!r} is not MAJOR.MINOR; write a literal such as '1.0'"
        ) from None
    core_major, core_minor = (int(part) for part in API_VERSION.split("."))
    if major != core_major or minor > core_minor:
        raise PluginError(
            plugin,
            f"written for API {version}, this core has API {API_VERSION}; "
            f"install a kvgraft with API {version} or a matching component",
        )
