"""Families that a test runs over: one of each kind of cache by default, all in the long tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kvgraft_transformers.tiny import FAMILIES

__all__ = ["CASES", "one_of_each_kind"]

CASES = [*FAMILIES, "deepseek_v32+hisparse"]
"""Every tiny family, and one whose latent pages stay on HOST."""

QUICK = frozenset(
    {
        "gemma3_text",  # windows beside full attention
        "llama4_text",  # chunks
        "deepseek_v32+hisparse",  # latent pages, read through a hot buffer
        "bamba",  # states of a scan
        "qwen3_next",  # states of a delta rule
        "minimax",  # states of linear attention
        "lfm3",  # states of convolutions, beside windows
    }
)


def one_of_each_kind(cases: Iterable[str] = CASES) -> list[Any]:
    """Parameters of which all but one of each kind are left to the long tests."""
    return [pytest.param(case, marks=() if case in QUICK else pytest.mark.long) for case in cases]
