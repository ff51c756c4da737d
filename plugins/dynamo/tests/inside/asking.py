"""One request over HTTP."""

from __future__ import annotations

from typing import Any

from .conversations import NEW_TOKENS, Messages, Reply
from .programs import Frontend

__all__ = ["ask"]


def ask(frontend: Frontend, messages: Messages) -> Reply:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "nvext": {"extra_fields": ["worker_id"]},
    }
    response = frontend.ask("chat/completions", **body)
    assert response.status_code == 200, response.text
    told = response.json()
    usage, workers = told["usage"], told["nvext"]["worker_id"]
    return Reply(
        told["choices"][0]["message"]["content"] or "",
        usage["prompt_tokens"],
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        workers["decode_worker_id"],
        workers.get("prefill_worker_id"),
    )
