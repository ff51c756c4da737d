"""The KV-hint envelope that vLLM and SGLang carry with a request, as arguments of `Cache.begin`.

The envelope is theirs; what its actions mean is said by whoever carries them out. These are ours,
and others are passed over:

    kv.retain@1.*   {"priority": 1, "ttl_seconds": 300}     other data leaves before the request's,
                                                            until then; its own leaves first later
    kv.return@1.*   {"after": "tool"}                       whether its sequence comes back: after a
                                                            "tool", after the "user", or "never"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from kvgraft.errors import ConfigError
from kvgraft.policies.policy import Hint
from kvgraft.refusals import of_type
from kvgraft_retention.lifetimes import expect_priority, expect_ttl

__all__ = ["ACTIONS", "arguments_of"]

RETAIN: Final = "kv.retain"
RETURN: Final = "kv.return"

ACTIONS: Final = (RETAIN, RETURN)
"""The actions that are carried out, of version 1."""

AFTER: Final = {"tool": Hint.CONTINUES, "user": Hint.TURN_ENDED, "never": Hint.OVER}


def arguments_of(envelope: Any) -> dict[str, Any]:
    """Arguments of `Cache.begin` that an envelope asks for; of two values for one, the later.

    Later minor versions of an action may have more fields, which are passed over. So is an envelope
    of a later protocol than 0.

    Args:
        envelope: a mapping, as in JSON, or vLLM's or SGLang's object; None for none.

    Raises:
        ConfigError: it is no envelope, or has one of `ACTIONS` with an impossible payload.
    """
    found: dict[str, Any] = {}
    if envelope is None:
        return found
    actions = _field(envelope, "actions", "an envelope")
    read = envelope.get if isinstance(envelope, Mapping) else partial(getattr, envelope)
    if str(read("protocol_version", "0")).partition(".")[0] != "0":
        return found  # of a later protocol: its actions may mean something else
    if isinstance(actions, (str, bytes, Mapping)) or not isinstance(actions, Iterable):
        raise ConfigError(f"kv_hints: its actions are {of_type(actions)}; give a list")
    for action in actions:
        kind = _field(action, "action_type", "an action")
        if kind not in ACTIONS:
            continue
        version = str(_field(action, "action_version", "an action"))
        if version.partition(".")[0] != "1":
            continue
        payload = _field(action, "payload", "an action")
        if not isinstance(payload, Mapping):
            raise ConfigError(
                f"kv_hints: {kind}: its payload is {of_type(payload)}; give an object"
            )
        known = ("priority", "ttl_seconds") if kind == RETAIN else ("after",)
        asked = {each: payload[each] for each in known if each in payload}
        if not asked:
            raise ConfigError(f"kv_hints: {kind} asks for nothing; give {' or '.join(known)}")
        found |= _retained(asked) if kind == RETAIN else _returned(asked)
    if "ttl_s" in found:
        found.setdefault("priority", 1)
    return found


def _retained(payload: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "priority" in payload:
        expect_priority(f"kv_hints: {RETAIN}", payload["priority"])
        found["priority"] = payload["priority"]
    if "ttl_seconds" in payload:
        expect_ttl(f"kv_hints: {RETAIN}: ttl_seconds", payload["ttl_seconds"])
        found["ttl_s"] = payload["ttl_seconds"]
    return found


def _returned(payload: Mapping[str, Any]) -> dict[str, Any]:
    after = payload["after"]
    if not isinstance(after, str) or after not in AFTER:
        raise ConfigError(
            f"kv_hints: {RETURN}: after {after!r:.40}; give one of {', '.join(map(repr, AFTER))}"
        )
    return {"hint": AFTER[after]}


def _field(given: Any, name: str, what: str) -> Any:
    """A field of a mapping or an object."""
    try:
        return given[name] if isinstance(given, Mapping) else getattr(given, name)
    except (KeyError, AttributeError):
        raise ConfigError(
            f"kv_hints: {what} without {name!r}; give {{'protocol_version': '0.1', 'message_id': "
            "..., 'actions': [{'action_id': ..., 'action_type': ..., 'action_version': ..., "
            "'payload': {...}}]}"
        ) from None
