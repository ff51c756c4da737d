"""Options of all commands that replay: settings of caches except sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from kvgraft.config import CacheConfig
from kvgraft.errors import ConfigError
from kvgraft_cli.cache_options import OptionGroup, PolicyName, write_policy_option
from kvgraft_cli.components import parse_component
from kvgraft_cli.sizes import TokenCount

__all__ = ["cache_options", "parse_components"]


class PolicyList(PolicyName):
    """Names of policies such as `lru,density`, each once."""

    name = "policies"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The names.

        Raises:
            click.BadParameter: a name that no policy has, or a policy that cannot be used.
        """
        if not isinstance(value, str):
            return value
        names = [name.strip() for name in value.split(",")]
        for name in names:
            if names.count(name) > 1:
                self.fail(f"policy {name!r} is given {names.count(name)} times; give it once")
        return [super(PolicyList, self).convert(name, param, ctx) for name in names]


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
        default=CacheConfig.model_fields["policy"].get_default(call_default_factory=True),
        show_default=True,
        help="Eviction policy: which data is kept. With several, each is replayed and compared.",
    ),
    write_policy_option,
)
"""The options of the caches."""


def parse_components(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Components such as `swa:window=4096`, each name once.

    Raises:
        ConfigError: a text of another form, or a name given twice.
    """
    parsed = [parse_component(text) for text in texts]
    names = [name for name, _ in parsed]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"component {name!r} is given {names.count(name)} times; give it once"
            )
    return dict(parsed)
