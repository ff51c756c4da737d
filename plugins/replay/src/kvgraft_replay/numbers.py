"""Parses numbers of the command line and of CSV files."""

from __future__ import annotations

from math import isfinite
from typing import Any

import click

__all__ = ["Number", "number_of"]


def number_of(text: str) -> float:
    """Parse a number; `nan`, and `5_0`, which Python reads as 50, are refused.

    Raises:
        ValueError: it is no number.
    """
    if "_" in text or not isfinite(number := float(text)):
        raise ValueError(f"{text!r} is no number")
    return number


class Number(click.FloatRange):
    """A number with a fraction."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number.

        Raises:
            click.BadParameter: it is none, or out of range.
        """
        try:
            value = number_of(value) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is no number", param, ctx)
        return super().convert(value, param, ctx)
