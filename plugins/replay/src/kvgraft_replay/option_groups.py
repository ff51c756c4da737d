"""Options that several commands share, added as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["OptionGroup"]

F = TypeVar("F", bound=Callable[..., None])


class OptionGroup:
    """A decorator that adds options to a command; its help lists them in their order here.

    Args:
        options: decorators of `click`.
    """

    def __init__(self, *options: Callable[[Any], Any]) -> None:
        self._options = options

    def __call__(self, command: F) -> F:
        for option in reversed(self._options):
            command = option(command)
        return command
