"""Advice on packages of this project that are not installed.

They are on no package index; where that changes, this is the place to say so.
"""

from __future__ import annotations

import shlex

__all__ = ["how_to_install"]


def how_to_install(path: str) -> str:
    """The next action where a package is missing.

    Args:
        path: of the package in a clone, such as `plugins/file` or `core[testing]`; or of a file of
            requirements (.txt) where it needs others of this project, which pip would not find.
    """
    if path.endswith(".txt"):
        return f"in a clone of kvgraft, pip install -r {shlex.quote(path)}"
    return f"in a clone of kvgraft, pip install {shlex.quote(f'./{path}')}"
