"""Token ids of a list as int32 bytes, in a loop that is compiled.

The compiled build alone has it: `struct`, which needs four times as long, does it elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librt.strings import BytesWriter, write_i32_le

if TYPE_CHECKING:
    from mypy_extensions import i32


def int32_bytes(tokens: list[int]) -> bytes | None:
    """The ids as int32; None if one is negative, does not fit, or is no integer of Python's."""
    packed = BytesWriter()
    signs: i32 = 0
    try:
        for token in tokens:
            write_i32_le(packed, token)
            signs |= token
    except (TypeError, ValueError):
        return None
    return packed.getvalue() if signs >= 0 else None
