"""Advice on packages of this project that are not installed.

They are on no package index; where that changes, this is the place to say so.
"""

from __future__ import annotations

import shlex

__all__ = ["how_to_install"]


def how_to_install(*paths: str) -> str:
    """The next action where a package is missing.

    Args:
        paths: of the package in a clone, such as `plugins/file`, and before it those of others of
            this project that it needs, as pip would not find them; or of a file of requirements
            (.txt).
    """
    if paths[0].endswith(".txt"):
        return f"in a clone of kvgraft, pip install -r {shlex.quote(paths[0])}"
    return f"in a clone of kvgraft, pip install {shlex.join(f'./{path}' for path in paths)}"
