"""Options of tenants, and a scanner that runs beside the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from kvgraft.errors import ConfigError
from kvgraft_cli.cache_options import OptionGroup, tenant_option
from kvgraft_replay.numbers import Number
from kvgraft_replay.workload import Addresses, Span, TraceRequest, Workload

__all__ = ["SCANNER", "TRACE", "scanned", "tenant_options", "unused_tenants", "with_scanner"]

TRACE, SCANNER = "trace", "scanner"
"""Namespaces of the trace's and of the scanner's requests, if there is a scanner."""

DOCUMENT_TOKENS = 8192
"""Tokens of each document that the scanner reads once."""

tenant_options = OptionGroup(
    click.option(
        "--scanner",
        "scanner_tokens_s",
        type=Number(min=1),
        metavar="TOKENS",
        help="Beside the trace, a job asks for documents of 8,192 tokens, so many tokens a second, "
        "none twice. Its requests are in namespace 'scanner', the trace's in 'trace'.",
    ),
    tenant_option,
)
"""The options of tenants."""


def scanned(workload: Workload, options: Mapping[str, Any]) -> tuple[Workload, int | None]:
    """The workload with the scanner of the options, and the limit of its requests.

    Raises:
        ConfigError: the workload has no absolute times.
        TraceError: too many distinct tokens.
    """
    if options["scanner_tokens_s"] is None:
        return workload, options["limit"]
    return with_scanner(workload, options["scanner_tokens_s"], options["limit"]), None


def unused_tenants(tenants: Sequence[str], workload: Workload) -> list[str]:
    """Notes on tenants that no request of the workload belongs to."""
    from kvgraft_retention.settings import OTHERS  # imports torch, which takes seconds

    there = {each.namespace for each in workload.requests if each.namespace is not None}
    named = ", ".join(sorted(there)) or "none, as they have with --scanner alone"
    return [
        f"no request is of tenant {name!r}; its rights change nothing but the room of others. "
        f"Namespaces of the requests: {named}"
        for name in tenants
        if name != OTHERS and name not in there
    ]


def with_scanner(workload: Workload, tokens_s: float, limit: int | None) -> Workload:
    """The workload's first `limit` requests, and the scanner's until the last of them arrives.

    Raises:
        ConfigError: the workload has no absolute times.
        TraceError: too many distinct tokens.
    """
    if not workload.has_absolute_time:
        raise ConfigError(
            f"{workload.name}: its times count from each session's start, a scanner runs by the "
            "clock; give a trace with absolute times, or --synthetic"
        )
    theirs = [replace(each, namespace=TRACE) for each in workload.requests[:limit]]
    addresses = Addresses(f"{workload.name} and a scanner")
    addresses.take(max(span.first + span.length for each in theirs for span in each.content))
    end_s = max(each.arrival_s for each in theirs)
    session = 1 + max(each.session for each in theirs)
    every_s = DOCUMENT_TOKENS / tokens_s
    documents = [
        _document(session + number, number * every_s, addresses.take(DOCUMENT_TOKENS))
        for number in range(int(end_s / every_s) + 1)
    ]
    ordered = sorted([*theirs, *documents], key=lambda each: each.arrival_s)
    return Workload.of(
        [replace(each, index=index) for index, each in enumerate(ordered)],
        name=f"{workload.name} and a scanner",
        format=workload.format,
        has_absolute_time=True,
        block_tokens=workload.block_tokens,
        notices=workload.notices,
    )


def _document(session: int, arrival_s: float, content: Span) -> TraceRequest:
    """A request with a new document."""
    return TraceRequest(
        index=0,
        session=session,
        arrival_s=arrival_s,
        think_s=0.0,
        prompt_tokens=content.length,
        output_tokens=0,
        content=(content,),
        namespace=SCANNER,
    )
