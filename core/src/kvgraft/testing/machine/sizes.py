"""What varies from one example to the next: page size, policy and pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvgraft.config import LoadModel, WritePolicy

__all__ = ["Options", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """What varies within a setup.

    Attributes:
        page_size: tokens per page.
        policy: when data goes to HOST.
        load: when a load is skipped; None for never.
        device, host: pools, in pages.
    """

    page_size: int = 2
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    load: LoadModel | None = None
    device: int = 14
    host: int = 16

    def __str__(self) -> str:
        load = "always loads" if self.load is None else "loads where that is faster"
        return (
            f"pages of {self.page_size}, {self.device} pages on DEVICE, {self.host} on HOST, "
            f"{self.policy.value}, {load}"
        )


Options = Mapping[str, Any] | Callable[[Sizes], Mapping[str, Any]]
"""A component's options, or what gives them for some sizes."""
