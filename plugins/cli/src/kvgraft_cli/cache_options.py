"""Options of all commands that open caches, defined once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from kvgraft.config import WritePolicy
from kvgraft.errors import ConfigError
from kvgraft.packages.registry import load_policy
from kvgraft_cli.components import parse_options
from kvgraft_cli.sizes import ByteCount, TokenCount

__all__ = [
    "OptionGroup",
    "PolicyName",
    "check_tenants",
    "cut_tokens_option",
    "memory_options",
    "parse_tenants",
    "pool_sizes",
    "tenant_option",
    "write_policy_option",
]

F = TypeVar("F", bound=Callable[..., None])


class OptionGroup:
    """A decorator that adds options to a command; its help lists them in their order here.

    Args:
        options: decorators of `click`.
    """

    def __init__(self, *options: Callable[[Any], Any]) -> None:
        self._options = options

    def __call__(self, command: F) -> F:
        for option in reversed(self._options):
            command = option(command)
        return command


class PolicyName(click.ParamType):  # type: ignore[type-arg] # generic since click 8.3
    """The name of an eviction policy, such as `lru`."""

    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name.

        Raises:
            click.BadParameter: no policy has it, or the policy cannot be used.
        """
        try:
            load_policy(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return value


memory_options = OptionGroup(
    click.option(
        "--device-memory",
        type=ByteCount(min=1),
        metavar="BYTES",
        help="One budget for all device pools, such as 60GB, whose shares follow their use. They "
        "begin at --device-tokens, if that is given.",
    ),
    click.option(
        "--host-memory",
        type=ByteCount(min=1),
        metavar="BYTES",
        help="One budget for all host mirrors, as for the device.",
    ),
)
"""Budgets, for `pool_sizes`."""

write_policy_option = click.option(
    "--write-policy",
    type=click.Choice([policy.value for policy in WritePolicy]),
    help="When data is copied to the host.  [default: write-back; with a store or tenants "
    "write-through]",
)

tenant_option = click.option(
    "--tenant",
    "tenants",
    multiple=True,
    metavar="NAMESPACE[:OPTION=VALUE,...]",
    help="A tenant with that namespace and its rights, such as trace:guarantee=0.5; repeat for "
    "more. See docs/tenants.md.",
)
"""Tenants, for `parse_tenants`."""


def cut_tokens_option(default: int | None, said: str | None = None) -> Callable[[F], F]:
    """The option `--cut-tokens`.

    Args:
        default: its default.
        said: the default in the help, if it is no number.
    """
    return click.option(
        "--cut-tokens",
        type=TokenCount(min=0),
        default=default,
        show_default=said or True,
        help="Least distance of two cuts of a prefill for its states: the cost of an extra pass.",
    )


def pool_sizes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the pools' sizes; with a budget, tokens count only if they are given, too.

    Args:
        options: options of the command, with `--device-tokens` and `--host-tokens`.
    """
    sizes = {}
    source = click.get_current_context().get_parameter_source
    for tier in ("device", "host"):
        memory, tokens = f"{tier}_memory", f"{tier}_tokens"
        if options[memory] is not None:
            sizes[memory] = options[memory]
        if options[memory] is None or source(tokens) is not ParameterSource.DEFAULT:
            sizes[tokens] = options[tokens]
    return sizes


def check_tenants(options: Mapping[str, Any]) -> None:
    """Refuse tenants of pools that share one budget.

    Raises:
        ConfigError: naming the options.
    """
    for tier in ("device", "host"):
        if options["tenants"] and options[f"{tier}_memory"] is not None:
            raise ConfigError(
                f"--tenant and --{tier}-memory: tenants have shares of pools of a fixed size; "
                f"give the bytes as --{tier}-tokens, such as --{tier}-tokens 1GB"
            )


def parse_tenants(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The setting `tenants` from texts such as `trace:guarantee=0.5`, each name once.

    Raises:
        ConfigError: a text of another form, or a name or an option given twice.
    """
    tenants: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, _, rest = text.partition(":")
        if not name or name in tenants:
            twice = f"namespace {name!r} is given twice; give one --tenant with all its options"
            raise ConfigError(
                f"--tenant {text!r}: {twice if name else 'has no namespace; name one'}"
            )
        rights = parse_options(f"--tenant {text!r}", rest, f"{name}:guarantee=0.5")
        tenants[name] = {"namespaces": [name], **rights}
    return tenants
