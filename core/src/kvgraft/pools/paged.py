"""Pools of paged components: one slot per page, sized in tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.config import ComponentOptions
from kvgraft.errors import ConfigError
from kvgraft.pools.component import BuildContext
from kvgraft.pools.device import DevicePool
from kvgraft.pools.host import HostMirror
from kvgraft.pools.planes import PlaneSpec

__all__ = ["paged_pools"]


def paged_pools(
    options: ComponentOptions,
    context: BuildContext,
    planes: Sequence[PlaneSpec],
    host_planes: Sequence[PlaneSpec] | None = None,
) -> tuple[DevicePool, HostMirror | None]:
    """A device pool and its host mirror, one slot per page.

    Args:
        options: its `device_tokens` and `host_tokens` win over the context's.
        context: page size, device and default sizes.
        planes: the planes of one page on the device.
        host_planes: those of the mirror; `planes` by default.

    Returns:
        Both pools; no mirror where the host size is 0.

    Raises:
        ConfigError: a size below one page.
    """
    device_tokens = options.device_tokens or context.device_tokens
    host_tokens = context.host_tokens if options.host_tokens is None else options.host_tokens
    n_device = _whole_pages("device_tokens", device_tokens, context)
    device = DevicePool(planes, n_device, context.device)
    if host_tokens == 0:
        return device, None
    n_host = _whole_pages("host_tokens", host_tokens, context)
    mirrored = planes if host_planes is None else host_planes
    return device, HostMirror(mirrored, n_host, pin=context.pin_host)


def _whole_pages(option: str, tokens: int, context: BuildContext) -> int:
    n_pages = context.pages(tokens)
    if n_pages < 1:
        raise ConfigError(
            f"option {option}: {tokens} tokens make no page of {context.page_size}; "
            f"give {context.page_size} or more"
        )
    return n_pages
