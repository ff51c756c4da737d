"""The pools of the `hisparse` component; loaded when a cache is built.

    HOST     k v | latent, index    canonical, every token
    DEVICE   index                  every token a request resumes from: they select
    DEVICE   k v | latent           hot rows of running requests: selected tokens

Copies between the tiers pair planes by layer and name. Pool and mirror share only the indexer
keys, so a load-back moves nothing else (H5); keys and values move when they are selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft import ConfigError, Everything, Reach
from kvgraft.pools import (
    BuildContext,
    Component,
    DevicePool,
    PlaneSpec,
    PrivatePool,
    attention_planes,
    paged_pools,
    torch_dtype,
)
from kvgraft_hisparse.hot_buffer import HotBuffer
from kvgraft_hisparse.hot_pool import HotPool, hot_rows
from kvgraft_hisparse.options import HisparseOptions

if TYPE_CHECKING:
    from kvgraft import Cache, Request

__all__ = ["SparseComponent", "build", "index_planes"]


@dataclass(slots=True, kw_only=True)
class SparseComponent(Component):
    """The component with data for its hook and the engine.

    Attributes:
        hot: the rows for hot buffers.
        hot_tokens: tokens a running request can select at once per layer.
        hot_slots: slots of the private pool that each running request takes.
    """

    hot: HotPool
    hot_tokens: int
    hot_slots: int

    @classmethod
    def of(cls, cache: Cache) -> SparseComponent:
        """The component of a cache.

        Raises:
            ConfigError: the cache was opened without it.
        """
        for each in cache.mounted:
            if isinstance(each.component, cls):
                return each.component
        names = ", ".join(each.name for each in cache.mounted)
        raise ConfigError(f"component 'hisparse' is not among the cache's: {names}; name it there")

    def open_buffer(self, cache: Cache, request: Request) -> HotBuffer:
        """The hot buffer of an admitted request, in the slots that the cache took for it.

        It starts with the computed tokens: the prefix that was hit, or more if it is opened later,
        such as before the first decode. It moves no row (H5) and waits for no load-back. Close it
        before the request is finished, aborted, retracted or restarted.

        Args:
            cache: the component's cache.
            request: admitted by it; one buffer at a time.

        Raises:
            LeaseError: the request is not admitted, or has ended.
        """
        name = next(each.name for each in cache.mounted if each.component is self)
        (slots,) = cache.private_slots(request, name)
        buffer = HotBuffer(self.hot, slots, self.hot_tokens)
        buffer.adopt_prefix(cache.host_table(request, name).tobytes(), request.computed)
        return buffer


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
        raise ConfigError("host_tokens is 0, but keys and values live on HOST; give a page or more")
    hot_slots = context.pages(hot_rows(options.hot_tokens, context.page_size))
    hot = DevicePool(rows, hot_slots * options.max_running, context.device)
    return SparseComponent(
        reach=Reach(Everything()),
        device=device,
        host=host,
        private=(PrivatePool("hot", hot.allocator),),
        hot=HotPool(hot, host),
        hot_tokens=options.hot_tokens,
        hot_slots=hot_slots,
    )
