"""The pools of the `mamba` component; loaded when a cache is built."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraft import ConfigError, Reach, StateAt
from kvgraft.pools import (
    BuildContext,
    Component,
    DevicePool,
    HostMirror,
    PlaneSpec,
    torch_dtype,
)
from kvgraft_mamba.checkpoints import CheckpointRule
from kvgraft_mamba.options import MambaOptions

__all__ = ["StateComponent", "build", "state_planes"]

TOKENS_PER_STATE = 2048
"""Pool tokens per state by default: about one conversation turn."""

FEWEST_STATES = 16
"""Default size of a small pool: a live and a captured state for eight running requests."""


@dataclass(slots=True, kw_only=True)
class StateComponent(Component):
    """The component with data for its hook.

    Attributes:
        rule: the boundaries at which a request captures states.
    """

    rule: CheckpointRule


def state_planes(options: MambaOptions) -> list[PlaneSpec]:
    """The planes of one state, in layer order.

    Per layer: `"conv"` `(conv_dim, conv_width)` in `dtype`, once per convolution (`"conv0"`,
    `"conv1"` where there are more than one), and `"recurrent"` `(n_heads, head_dim, state_dim)` in
    `state_dtype`; each only if the layers have one.
    """
    conv = (options.conv_dim, options.conv_width)
    recurrent = (options.n_heads, options.head_dim, options.state_dim)
    n_convs = options.n_convs if options.conv_dim else 0
    convs = ["conv"] if n_convs == 1 else [f"conv{i}" for i in range(n_convs)]
    planes = []
    for layer in options.layer_numbers:
        planes += [PlaneSpec(layer, name, conv, torch_dtype(options.dtype)) for name in convs]
        if options.n_heads:
            planes.append(
                PlaneSpec(layer, "recurrent", recurrent, torch_dtype(options.state_dtype))
            )
    return planes


def build(options: MambaOptions, context: BuildContext) -> StateComponent:
    """Pools of states, one slot each.

    Raises:
        ConfigError: a checkpoint interval that is not whole pages.
    """
    interval = options.checkpoint_interval_tokens
    if interval is not None and interval % context.page_size:
        above = (interval // context.page_size + 1) * context.page_size
        raise ConfigError(
            f"option checkpoint_interval_tokens: {interval} is not a multiple of page_size "
            f"{context.page_size}; use {above}"
        )
    planes = state_planes(options)
    device_tokens = options.device_tokens or context.device_tokens
    device = DevicePool(planes, options.states or _default_states(device_tokens), context.device)
    host_tokens = context.host_tokens if options.host_tokens is None else options.host_tokens
    n_host = _default_states(host_tokens) if options.host_states is None else options.host_states
    if not host_tokens:  # without host memory there is no mirror, whatever its size
        n_host = 0
    rule = CheckpointRule(
        interval=None if interval is None else context.pages(interval),
        # the other half is for live states of requests
        most=device.capacity // 2,
    )
    return StateComponent(
        reach=Reach(StateAt()),
        device=device,
        host=HostMirror(planes, n_host, pin=context.pin_host) if n_host else None,
        rule=rule,
    )


def _default_states(tokens: int) -> int:
    return max(FEWEST_STATES, tokens // TOKENS_PER_STATE)
