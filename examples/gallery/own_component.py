"""A component of one's own: attention sinks, the first tokens beside a window.

kvgraft-full. A package publishes the plugin as an entry point; here it is given as an object.
"""

from kvgraft import (
    HOST_MIRROR,
    AttentionOptions,
    BuildContext,
    Cache,
    CacheConfig,
    Component,
    ComponentDeclaration,
    Kind,
    Leading,
    Reach,
    TokenKey,
    Trailing,
    hookimpl,
)
from kvgraft.packages.registry import load_plugin


class Sinks:
    """Its reach says all that the cache must know; pins, budgets and evictions follow from it."""

    @hookimpl
    def declare_component(self) -> ComponentDeclaration:
        return ComponentDeclaration(
            name="sinks",
            api_version="1.1",
            kind=Kind.PAGED,
            summary="the first 64 tokens and the last 512",
            options=AttentionOptions,
            capabilities=frozenset({HOST_MIRROR}),
        )

    @hookimpl
    def create_component(self, options: AttentionOptions, context: BuildContext) -> Component:
        from kvgraft.pools import attention_planes, paged_pools

        device, host = paged_pools(options, context, attention_planes(options, context.page_size))
        return Component(Reach(Leading(64), Trailing(512)), device, host)


config = CacheConfig(components={"full": {}, "sinks": {}}, page_size=16, device_tokens=8192)
with Cache(config, plugins=[load_plugin("sinks", Sinks())]) as cache:
    request = cache.begin(TokenKey(range(4096)))
    assert cache.admit(request).admitted
    cache.allocate(request, 4096)
    cache.computed(request, 4096)
    cache.finish(request)
    again = cache.begin(TokenKey(range(5000)))
    print("reused:", again.anchor_tokens)  # reused: 4096
    cache.abort(again)
