"""Options of every command that replays: the caches, but for their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from kvgraft.cli.components import parse_component
from kvgraft.cli.sizes import TokenCount
from kvgraft.config import CacheConfig, WritePolicy
from kvgraft.errors import ConfigError
from kvgraft.packages.policies import load_policy
from kvgraft_replay.option_groups import OptionGroup

__all__ = ["cache_options", "parse_components"]


class PolicyList(click.ParamType):  # type: ignore[type-arg] # generic since click 8.3
    """Names of policies such as `lru,density`, each once."""

    name = "policies"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The names.

        Raises:
            click.BadParameter: a name that no policy has, or a policy that cannot be used.
        """
        if not isinstance(value, str):
            return value
        names = list(dict.fromkeys(name.strip() for name in value.split(",")))
        for name in names:
            try:
                load_policy(name)
            except ConfigError as error:
                self.fail(str(error), param, ctx)
        return names


cache_options = OptionGroup(
    click.option(
        "--page-size",
        type=TokenCount(min=1),
        default=64,
        show_default=True,
        help="Tokens per page.",
    ),
    click.option(
        "--policy",
        "policies",
        type=PolicyList(),
        metavar="NAME,...",
        default=CacheConfig.model_fields["policy"].default,
        show_default=True,
        help="Eviction policy: which data is kept. With several, each is replayed and compared.",
    ),
    click.option(
        "--write-policy",
        type=click.Choice([policy.value for policy in WritePolicy]),
        show_default="write-back; with a store or tenants write-through",
        help="When data is copied to the host.",
    ),
)
"""The options of the caches."""


def parse_components(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Components such as `swa:window=4096`, each name once.

    Raises:
        ConfigError: one that is not of that form, or a name given twice.
    """
    parsed = [parse_component(text) for text in texts]
    names = [name for name, _ in parsed]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"component {name!r} is given {names.count(name)} times; give it once"
            )
    return dict(parsed)
