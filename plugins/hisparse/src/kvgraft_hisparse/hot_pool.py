"""The hot rows that all running requests share, paired with the host rows that they copy.

One slot of the pool is `page_size` token rows in *every* layer. The cache takes a request's slots
once, at admission, and each layer arranges its own tokens in them. So the rows of these slots are
all rows of the request in all layers: the budget counts slots, and releasing them releases
everything (H7, H8). Only the cache's books say who owns a slot.

This module imports no torch, so that a budget can be computed without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kvgraft import ConfigError

if TYPE_CHECKING:
    import torch

    from kvgraft.pools import DevicePool, HostMirror

__all__ = ["COMPONENT", "HotPool", "PlanePair", "hot_rows"]

COMPONENT = "hisparse"
"""The component's name, for messages and for finding its slots in a cache."""


def hot_rows(hot_tokens: int, page_size: int) -> int:
    """Rows per layer of a request's hot buffer: `hot_tokens` in whole pages, plus one page.

    The additional page holds the newest token, which is never evicted. The number is the same in
    prefill and decode. Contract: H7.

    Raises:
        ConfigError: a size below one.
    """
    if hot_tokens < 1 or page_size < 1:
        raise ConfigError(
            f"component 'hisparse': hot_tokens {hot_tokens} and page_size {page_size} must be "
            "at least 1"
        )
    return (-(-hot_tokens // page_size) + 1) * page_size


class PlanePair(NamedTuple):
    """One plane of one layer, on both tiers.

    Attributes:
        hot: on the device, `[n_hot_slots * page_size, *row_shape]`.
        host: the canonical copy, `[n_host_slots, page_size, *row_shape]`; may be strided.
    """

    hot: torch.Tensor
    host: torch.Tensor


class HotPool:
    """A device pool of token rows over the host mirror it caches.

    Args:
        device: the hot rows; every plane spec has shape `(page_size, *row_shape)`.
        host: the canonical rows; holds at least the planes of `device`, other planes are ignored.

    Attributes:
        page_size: tokens per slot.
        torch_device: where the hot rows are.

    Raises:
        ConfigError: planes differ between the tiers or in their page size.
    """

    def __init__(self, device: DevicePool, host: HostMirror) -> None:
        if not device.specs:
            raise ConfigError("component 'hisparse': hot pool: no planes; give at least one layer")
        self.page_size = device.specs[0].shape[0]
        self.torch_device = device.device
        for spec in device.specs:
            if spec not in host.specs:
                raise ConfigError(
                    f"component 'hisparse': hot pool: layer {spec.layer} plane {spec.name!r} "
                    f"{spec.shape} {spec.dtype} is not on the host; build both from the same specs"
                )
            if spec.shape[0] != self.page_size:
                raise ConfigError(
                    f"component 'hisparse': hot pool: layer {spec.layer} plane {spec.name!r} has "
                    f"{spec.shape[0]} tokens per slot, others {self.page_size}; use one page_size"
                )
        self._device, self._host = device, host

    @cached_property
    def layers(self) -> dict[int, tuple[PlanePair, ...]]:
        """The planes of every layer in the order of the device's specs, by model layer."""
        layers: dict[int, list[PlanePair]] = {}
        for spec, plane in zip(self._device.specs, self._device.planes, strict=True):
            pair = PlanePair(plane.flatten(0, 1), self._host.plane(spec.layer, spec.name))
            layers.setdefault(spec.layer, []).append(pair)
        return {layer: tuple(pairs) for layer, pairs in layers.items()}

    def check_rows(self, layer: int, rows: Sequence[torch.Tensor]) -> int:
        """The number of tokens of `rows`: one tensor `[n_new, *row_shape]` per plane of the layer.

        Raises:
            ConfigError: another shape or dtype than the planes, or no token.
        """
        pairs = self.layers[layer]
        want = [(tuple(pair.host.shape[2:]), pair.host.dtype) for pair in pairs]
        given = [(tuple(new.shape[1:]), new.dtype) for new in rows]
        n_new = {len(new) for new in rows if new.dim()}
        if given != want or len(n_new) != 1 or 0 in n_new:
            shapes = ", ".join(f"{tuple(new.shape)} {new.dtype}" for new in rows)
            expected = ", ".join(f"(n, {str(shape)[1:-1]}) {dtype}" for shape, dtype in want)
            raise ConfigError(
                f"component 'hisparse': layer {layer}: append of [{shapes}] to planes "
                f"[{expected}]; give one tensor per plane, one row per new token"
            )
        return n_new.pop()
