"""A component written for contract API 1.1: its reach is a pattern of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft_terms.reach import Strided
from pydantic import PositiveInt

from kvgraft import (
    HOST_MIRROR,
    AttentionOptions,
    ChunkedLocal,
    ComponentDeclaration,
    Kind,
    Reach,
    hookimpl,
)

if TYPE_CHECKING:
    from kvgraft.pools import BuildContext, Component


class TermsOptions(AttentionOptions):
    """Options of `frozen_terms`."""

    block: PositiveInt = 8
    summary: PositiveInt = 2
    tokens_per_slot: PositiveInt = 2


@hookimpl
def declare_component() -> ComponentDeclaration:
    return ComponentDeclaration(
        "frozen_terms",
        "1.1",
        Kind.PAGED,
        "fixed strided attention as of API 1.1",
        TermsOptions,
        capabilities=frozenset({HOST_MIRROR}),
    )


@hookimpl
def create_component(options: TermsOptions, context: BuildContext) -> Component:
    from kvgraft.pools import Component, DevicePool, HostMirror, attention_planes

    planes = attention_planes(options, options.tokens_per_slot)
    per_page = context.slots_per_page(options.tokens_per_slot)
    device = DevicePool(planes, context.pages(context.device_tokens) * per_page, context.device)
    n_host = context.pages(context.host_tokens) * per_page
    host = HostMirror(planes, n_host, pin=context.pin_host) if n_host else None
    reach = Reach(Strided(options.block, options.summary), ChunkedLocal(options.block))
    return Component(reach, device, host, per_page)
