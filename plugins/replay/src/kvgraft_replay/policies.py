"""Eviction policies on the command line: names with commas between them."""

from __future__ import annotations

from typing import Any

import click

from kvgraft.config import CacheConfig
from kvgraft.errors import ConfigError
from kvgraft.packages.policies import load_policy

__all__ = ["policy_option"]


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


policy_option = click.option(
    "--policy",
    "policies",
    type=PolicyList(),
    metavar="NAME,...",
    default=CacheConfig.model_fields["policy"].default,
    show_default=True,
    help="Eviction policy: which data is kept. With several, each is replayed and compared.",
)
