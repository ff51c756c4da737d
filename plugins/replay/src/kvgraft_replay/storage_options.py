"""Options of `kvgraft replay` for its storage tier."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from kvgraft.errors import ConfigError
from kvgraft_cli.cache_options import OptionGroup
from kvgraft_cli.sizes import ByteCount, TokenCount
from kvgraft_replay.numbers import Number
from kvgraft_storage.settings import PrefetchPolicy, StorageSettings, StorePolicy

__all__ = ["storage_options", "storage_settings"]

PREFETCH = PrefetchPolicy.WAIT_COMPLETE
"""The only policy whose results do not depend on the store's speed."""


def _default(field: str) -> Any:
    """A setting's default, as an option's value."""
    value = StorageSettings.model_fields[field].default
    if field.endswith("nbytes"):
        return f"{value >> 20}MiB" if value % (1 << 30) else f"{value >> 30}GiB"
    return getattr(value, "value", value)


OPTIONS = {
    "storage": click.option(
        "--storage",
        metavar="URL",
        help="A store behind the host, as file:PATH. Another replay of the same workload and "
        "components finds this one's data there. Needs --host-tokens.",
    ),
    "store": click.option(
        "--store-policy",
        "store",
        type=click.Choice([policy.value for policy in StorePolicy]),
        default=_default("store"),
        show_default=True,
        help="When data on the host goes to the store.",
    ),
    "store_nbytes": click.option(
        "--store-memory",
        "store_nbytes",
        type=ByteCount(min=1),
        metavar="SIZE",
        default=_default("store_nbytes"),
        show_default=True,
        help="Most bytes on their way to the store.",
    ),
    "prefetch": click.option(
        "--prefetch-policy",
        "prefetch",
        type=click.Choice([policy.value for policy in PrefetchPolicy]),
        default=PREFETCH.value,
        show_default=True,
        help="How long a queued request waits for the store. With any other than the default "
        "results depend on the store's speed.",
    ),
    "prefetch_timeout_s": click.option(
        "--prefetch-timeout",
        "prefetch_timeout_s",
        type=Number(min=0, min_open=True),
        metavar="SECONDS",
        default=_default("prefetch_timeout_s"),
        show_default=True,
        help="Longest wait under the policy timeout, in real time.",
    ),
    "threshold_tokens": click.option(
        "--prefetch-threshold",
        "threshold_tokens",
        type=TokenCount(min=1),
        metavar="TOKENS",
        default=_default("threshold_tokens"),
        show_default=True,
        help="Fewer tokens than this are not fetched.",
    ),
    "prefetch_nbytes": click.option(
        "--prefetch-memory",
        "prefetch_nbytes",
        type=ByteCount(min=1),
        metavar="SIZE",
        default=_default("prefetch_nbytes"),
        show_default=True,
        help="Most host memory that prefetches hold.",
    ),
}
"""Options by setting."""

storage_options = OptionGroup(*OPTIONS.values())
"""The options of the storage tier."""


def storage_settings(options: dict[str, Any]) -> dict[str, Any] | None:
    """Settings of the storage tier; None without a store.

    Raises:
        ConfigError: one of the other options without `--storage`.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is not ParameterSource.DEFAULT
        if options["storage"] is None and name in OPTIONS and given:
            raise ConfigError(f"{parameter.opts[0]} needs a store; give --storage URL as well")
    if options["storage"] is None:
        return None
    settings = {name: value for name, value in options.items() if name in OPTIONS}
    settings["url"] = settings.pop("storage")
    return settings
