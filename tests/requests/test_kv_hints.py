"""The envelope of hints that vLLM and SGLang carry with a request says how its data is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvgraft import Cache, ConfigError, TokenKey
from kvgraft.policies.policy import Hint
from kvgraft_retention.kv_hints import arguments_of

from ..serving import life


def envelope(*actions: tuple[str, Any], version: str = "1.0") -> dict[str, Any]:
    """Actions by type and payload, as JSON."""
    return {
        "protocol_version": "0.1",
        "message_id": "a message",
        "actions": [
            {
                "action_id": f"{number}",
                "action_type": kind,
                "action_version": version,
                "payload": payload,
            }
            for number, (kind, payload) in enumerate(actions)
        ],
    }


def objects(given: dict[str, Any]) -> Any:
    """The same as an engine's objects."""
    actions = [SimpleNamespace(**each) for each in given["actions"]]
    return SimpleNamespace(**{**given, "actions": actions})


@pytest.mark.parametrize(
    ("actions", "found"),
    [
        ([], {}),
        ([("kv.retain", {"priority": 3})], {"priority": 3}),
        ([("kv.retain", {"ttl_seconds": 1.5})], {"priority": 1, "ttl_s": 1.5}),
        ([("kv.return", {"after": "tool"})], {"hint": Hint.CONTINUES}),
        ([("kv.return", {"after": "user"})], {"hint": Hint.TURN_ENDED}),
        ([("kv.return", {"after": "never"})], {"hint": Hint.OVER}),
        ([("kv.fetch", {"from": "a worker"}), ("tool.started", {})], {}),
        ([("kv.retain", {"ttl_seconds": 5, "new in 1.4": 3})], {"priority": 1, "ttl_s": 5}),
        (
            [
                ("kv.retain", {"priority": 2, "ttl_seconds": 9}),
                ("kv.fetch", {}),
                ("kv.return", {"after": "tool"}),
                ("kv.retain", {"priority": -1}),
            ],
            {"priority": -1, "ttl_s": 9, "hint": Hint.CONTINUES},
        ),
    ],
)
def test_known_actions_are_arguments_of_begin(
    actions: list[tuple[str, Any]], found: dict[str, Any]
) -> None:
    given = envelope(*actions)
    assert arguments_of(given) == arguments_of(objects(given)) == found
    with Cache.open(["full"], device_tokens=256, page_size=16) as cache:
        cache.abort(cache.begin(TokenKey(range(20)), **arguments_of(given)))


def test_other_versions_are_passed_over_and_later_minor_ones_are_not() -> None:
    actions = [("kv.retain", {"priority": "high"})]
    assert arguments_of({"actions": [{"action_type": "kv.other"}]}) == {}
    assert arguments_of(envelope(*actions, version="2.0")) == {}
    assert arguments_of(None) == {}
    with pytest.raises(ConfigError, match="priority 'high'"):
        arguments_of(envelope(*actions, version="1.7"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "an envelope without 'actions'"),
        (7, "an envelope without 'actions'"),
        ({"actions": "kv.retain"}, "its actions are a str; give a list"),
        ({"actions": [{}]}, "an action without 'action_type'"),
        ({"actions": [{"action_type": "kv.retain"}]}, "an action without 'action_version'"),
        (
            {"actions": [{"action_type": "kv.retain", "action_version": "1.0"}]},
            "an action without 'payload'",
        ),
        (envelope(("kv.retain", [1])), "its payload is a list"),
        (envelope(("kv.retain", {})), "asks for nothing; give priority or ttl_seconds"),
        (envelope(("kv.retain", {"ttl": 3})), "asks for nothing; give priority or ttl_seconds"),
        (envelope(("kv.retain", {"ttl_seconds": None})), "ttl_seconds None; give seconds"),
        (envelope(("kv.retain", {"priority": True})), "priority True; give a whole number"),
        (envelope(("kv.retain", {"ttl_seconds": -1})), "ttl_seconds -1; give seconds"),
        (envelope(("kv.retain", {"ttl_seconds": "9"})), "ttl_seconds '9'; give seconds"),
        (envelope(("kv.return", {"after": "lunch"})), "after 'lunch'; give one of 'tool'"),
        (envelope(("kv.return", {"after": ["tool"]})), "give one of 'tool'"),
    ],
)
def test_an_impossible_envelope_is_refused_in_a_line(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        arguments_of(given)
    assert "\n" not in str(refused.value)


def test_data_that_is_to_be_retained_outlasts_other_data() -> None:
    with Cache.open(["full"], device_tokens=512, page_size=16, policy="lru") as cache:
        kept = arguments_of(envelope(("kv.retain", {"priority": 1})))
        life.serve(cache, TokenKey(range(128)), **kept)
        for number in range(1, 20):
            life.serve(cache, TokenKey(range(1000 * number, 1000 * number + 128)))
        assert life.serve(cache, TokenKey(range(128))).anchor_tokens == 112


@pytest.mark.parametrize(("protocol", "found"), [("0.9", {"priority": 3}), ("1.0", {}), (2, {})])
def test_envelope_of_a_later_protocol_is_passed_over(protocol: object, found: object) -> None:
    given = {**envelope(("kv.retain", {"priority": 3})), "protocol_version": protocol}
    assert arguments_of(given) == arguments_of(objects(given)) == found
