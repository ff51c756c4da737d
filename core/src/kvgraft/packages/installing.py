"""Advice on packages of this project that are not installed.

They are on no package index; where that changes, this is the place to say so.
"""

from __future__ import annotations

import shlex

__all__ = ["how_to_install"]

COMPONENTS = ("full", "swa", "mamba", "hisparse")

BESIDE = {
    "plugins/transformers[serve]": (
        "torch==2.13.0",
        "./core",
        *(f"./plugins/{name}" for name in COMPONENTS),
    ),
}
"""Requirements to name beside a package: pip would look for its siblings on the index."""


def how_to_install(path: str) -> str:
    """The next action where a package is missing.

    Args:
        path: of the package in a clone, such as `plugins/file` or `core[testing]`.
    """
    named = shlex.join((*BESIDE.get(path, ()), f"./{path}"))
    return f"in a clone of kvgraft, pip install {named}"
