"""A line in the log for every request: its result and duration."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvgraft_transformers.serving.replies import Reply

__all__ = ["Record", "RequestLog", "record_of"]

log = logging.getLogger("kvgraft.serve.requests")

LONGEST_REASON = 200
"""Most characters of a refusal in a line."""


@dataclass(slots=True)
class Record:
    """Facts that the routes know of one request.

    Attributes:
        begun: its arrival, by `time.monotonic`.
        reply: its reply, with the tokens so far; None for a request without answers.
        first: the time of its first text; None before.
        reasons: finish reasons of its answers, by number.
        refusal: why it was refused or ended without answers; empty otherwise.
    """

    begun: float = field(default_factory=time.monotonic)
    reply: Reply | None = None
    first: float | None = None
    reasons: dict[int, str] = field(default_factory=dict)
    refusal: str = ""


def record_of(request: Request) -> Record:
    """The record of a request, for the routes to fill."""
    if not hasattr(request.state, "record"):
        request.state.record = Record()
    record: Record = request.state.record
    return record


class RequestLog:
    """Logs every POST once its response has ended, or its client has gone.

    Args:
        app: answers the requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; `Record` has the logged facts."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        record = scope.setdefault("state", {})["record"] = Record()
        status = 0

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            log.info("%s", _line(scope, record, status))


def _line(scope: Scope, record: Record, status: int) -> str:
    """`POST /v1/completions 200 cmpl-... from 127.0.0.1: 12 prompt tokens (0 cached), ...`."""
    reply, said = record.reply, [f"POST {scope['path']} {status or 'no response'}"]
    if reply is not None:
        said.append(reply.name)
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            said.append(f"x-request-id {value.decode('latin-1')[:LONGEST_REASON]!r}")
    if scope.get("client"):
        said.append(f"from {scope['client'][0]}")
    parts = []
    if reply is not None and (reply.usage.prompt_tokens or not record.refusal):
        usage = reply.usage
        ends = ", ".join(record.reasons[each] for each in sorted(record.reasons))
        parts += [
            f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached)",
            f"{usage.completion_tokens} new ({ends or 'not ended'})",
        ]
    if record.refusal:
        parts.append(record.refusal[:LONGEST_REASON])
    if record.first is not None:
        parts.append(f"first after {record.first - record.begun:.3f} s")
    parts.append(f"all after {time.monotonic() - record.begun:.3f} s")
    return f"{' '.join(said)}: {'; '.join(parts)}"
