"""A store's place in a bucket, and the names of its objects.

    PREFIX/ab/cd/abcd…          a key in hex, behind its first two bytes

The directories are for stores that keep objects as files. Objects of other names belong to others.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from kvgraft import ConfigError

__all__ = ["Location", "key_of", "path_of"]

BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
PART = re.compile(r"[A-Za-z0-9!_.*'()=+@,-]+")
"""Names that every store takes without escapes."""

NAME = re.compile(r"([0-9a-f]{2})/([0-9a-f]{2})/(\1\2[0-9a-f]{60})")


class Location(NamedTuple):
    """A bucket and the prefix of a store's object names, which may be empty."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, text: str) -> Location:
        """A location from a URL: `BUCKET` or `BUCKET/PREFIX`, `%` escapes decoded.

        Raises:
            ConfigError: no bucket, or a name that cannot be one.
        """
        bucket, _, prefix = text.partition("/")
        bucket, prefix = unquote(bucket), unquote(prefix).removesuffix("/")
        if not bucket:
            raise ConfigError("storage 's3': no bucket; write s3:BUCKET/PREFIX")
        if not BUCKET.fullmatch(bucket):
            raise ConfigError(
                f"storage 's3': {bucket!r} is no bucket; "
                "names have 3 to 63 letters, digits, dots, dashes or underscores"
            )
        parts = prefix.split("/") if prefix else []
        for part in parts:
            if part in (".", "..") or not PART.fullmatch(part):
                raise ConfigError(
                    f"storage 's3': prefix {prefix!r} has a part {part!r}; write names of letters, "
                    "digits and !_.*'()=+@,- with a slash between them"
                )
        return cls(bucket, prefix)

    def __str__(self) -> str:
        return f"s3:{self.bucket}/{self.prefix}" if self.prefix else f"s3:{self.bucket}"


def path_of(key: bytes) -> str:
    """The path of a key's object below the prefix."""
    name = key.hex()
    return f"{name[:2]}/{name[2:4]}/{name}"


def key_of(path: str) -> bytes | None:
    """The key of an object by its name below the prefix; None if it is not the store's."""
    found = NAME.fullmatch(path)
    return bytes.fromhex(found[3]) if found else None
