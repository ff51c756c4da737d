"""The accelerator that torch has here, and whether a test marked `gpu` can run on it."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["accelerator", "why_not"]


def _found() -> str | None:
    module = getattr(torch, "accelerator", None)
    if module is None or not module.is_available():
        return None
    return str(module.current_accelerator().type)


def accelerator() -> str:
    """Its name for torch; without one, a name for tests that are collected and skipped."""
    return _found() or "cuda"


@cache
def why_not(needs: str | None = None, way: str | None = None) -> str | None:
    """Why a test marked `gpu(needs, way=...)` cannot run here; None if it can.

    Args:
        needs: the kind of accelerator; any by default.
        way: a way of copying that not every one has, such as `"kernel"`.
    """
    found = _found()
    if found is None:
        return "torch finds no accelerator here"
    if needs is not None and needs != found:
        return f"torch finds no {needs} accelerator here, but {found}"
    if way is None:
        return None
    from kvgraft_accelerator import Accelerator
    from kvgraft_accelerator.protocol import CopySizes

    has_it = getattr(Accelerator(found, CopySizes()).ways, way) is not None
    return None if has_it else f"this accelerator has no {way} copies"
