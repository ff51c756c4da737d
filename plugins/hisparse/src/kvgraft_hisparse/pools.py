"""The pools of the `hisparse` component; loaded when a cache is built.

    HOST     k v | latent, index    canonical, every token
    DEVICE   index                  every token a request resumes from: what selects
    DEVICE   k v | latent           hot rows of running requests: what was selected

Copies between the tiers pair planes by layer and name. Pool and mirror share only the indexer
keys, so a load-back moves nothing else (H5); keys and values move when they are selected.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgraft import ConfigError, Everything, Reach
from kvgraft.pools import (
    BuildContext,
    Component,
    DevicePool,
    PlaneSpec,
    PrivatePool,
    SlotAllocator,
    attention_planes,
    paged_pools,
    torch_dtype,
)
from kvgraft_hisparse.hot_pool import HotPool, hot_rows
from kvgraft_hisparse.options import HisparseOptions

__all__ = ["SparseComponent", "build", "index_planes"]


@dataclass(slots=True, kw_only=True)
class SparseComponent(Component):
    """The component with what its hook and the engine need.

    Attributes:
        hot: the rows hot buffers are cut from.
        hot_slots: slots of the private pool each running request takes.
    """

    hot: HotPool
    hot_slots: int


def index_planes(options: HisparseOptions, page_size: int) -> list[PlaneSpec]:
    """The indexer keys of one page: per layer `"index"` `(page_size, index_dim)`."""
    dtype = torch_dtype(options.index_dtype)
    shape = (page_size, options.index_dim)
    return [PlaneSpec(layer, "index", shape, dtype) for layer in options.layer_numbers]


def build(options: HisparseOptions, context: BuildContext) -> SparseComponent:
    """The three pools, one slot per page in each.

    Raises:
        ConfigError: no host pool, or a pool smaller than one page.
    """
    rows = attention_planes(options, context.page_size)
    index = index_planes(options, context.page_size)
    canonical = sorted(rows + index, key=lambda spec: spec.layer)
    device, host = paged_pools(options, context, index, canonical)
    if host is None:
        raise ConfigError(
            "option host_tokens: 0, but keys and values live on HOST; give a page or more"
        )
    hot_slots = context.pages(hot_rows(options.hot_tokens, context.page_size))
    hot = DevicePool(rows, hot_slots * options.max_running, context.device)
    return SparseComponent(
        reach=Reach(Everything()),
        device=device,
        host=host,
        private=(PrivatePool("hot", SlotAllocator(hot.capacity)),),
        hot=HotPool(hot, host),
        hot_slots=hot_slots,
    )
