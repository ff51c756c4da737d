"""Types of command line options for sizes; see `kvgraft.sizes`."""

from __future__ import annotations

from typing import Any

import click

from kvgraft.sizes import PLAIN, is_nbytes, parse_nbytes, parse_pool_tokens, parse_tokens

__all__ = ["ByteCount", "PoolSize", "TokenCount", "WholeNumber"]


class WholeNumber(click.IntRange):
    """A whole number without a unit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number.

        Raises:
            click.BadParameter: it is none, or out of range.
        """
        if isinstance(value, str) and not PLAIN.fullmatch(value):
            self.fail(f"{value!r} is no whole number", param, ctx)
        return super().convert(value, param, ctx)


class TokenCount(click.IntRange):
    """A number of tokens such as `4M` or `4096`."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number.

        Raises:
            click.BadParameter: it is none, or out of range.
        """
        return super().convert(self._plain(value, param, ctx), param, ctx)

    def _plain(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or value.lstrip("+-").isdecimal():
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def _parse(self, text: str) -> int:
        return parse_tokens(text)


class PoolSize(TokenCount):
    """A pool's size in tokens, or in bytes such as `40GB`, which the cache parses."""

    name = "tokens|bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number of tokens, or the size in bytes as it was given.

        Raises:
            click.BadParameter: it is neither, or out of range.
        """
        return value if is_nbytes(value) else super().convert(value, param, ctx)

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """An example, for an option that must be given."""
        return f"give for example {param.opts[0]} 4M, or bytes such as {param.opts[0]} 40GB"

    def _parse(self, text: str) -> int:
        return parse_pool_tokens(text)


class ByteCount(TokenCount):
    """A number of bytes such as `256MiB`; `4M` is refused, since it means tokens elsewhere."""

    name = "size"

    def _parse(self, text: str) -> int:
        nbytes = parse_nbytes(text)
        if not is_nbytes(text):
            raise ValueError(f"{text!r} has no unit of bytes; write {text.strip()}B")
        return nbytes
