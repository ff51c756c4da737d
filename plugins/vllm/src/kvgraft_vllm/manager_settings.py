"""Settings of the cache manager inside vLLM, from one environment variable.

    KVGRAFT_VLLM_MANAGER=1
    KVGRAFT_VLLM_MANAGER='{"policy": "lru", "reserve": 256}'

vLLM starts several processes; an environment variable reaches all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import Field, ValidationError

from kvgraft import ConfigError, GuardMode, SettingsModel, Tokens
from kvgraft.refusals import first_refusal

__all__ = ["VARIABLE", "ManagerSettings"]

VARIABLE = "KVGRAFT_VLLM_MANAGER"
"""Turns the manager on: `1`, or its settings as a JSON object."""


class ManagerSettings(SettingsModel):
    """How kvgraft decides inside vLLM's scheduler.

    Attributes:
        policy: the eviction policy: `density`, `lru` or another that is installed.
        reserve: decode tokens that a request is promised slots for, at most its `max_tokens`; with
            more of them fewer requests run at a time and fewer are preempted.
        point_tokens: tokens of the pool for which windows and states of one resume point are kept,
            about one turn of a conversation.
        guard: how much of the contract is checked while vLLM serves.
        metrics_port: the port of kvgraft's own metrics; with data parallelism the one of the first
            rank, others follow.
    """

    policy: str = "density"
    reserve: Tokens = Field(default=512, ge=0)
    point_tokens: Tokens = Field(default=2048, gt=0)
    guard: GuardMode = GuardMode.OFF
    metrics_port: int | None = Field(default=None, gt=0, lt=1 << 16)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ManagerSettings | None:
        """The settings; None if the manager is off.

        Raises:
            ConfigError: text that is neither 0, 1 nor a JSON object, or a setting that is unknown
                or impossible.
        """
        text = environment.get(VARIABLE, "").strip()
        if text in ("", "0"):
            return None
        try:
            given = {} if text == "1" else json.loads(text)
        except json.JSONDecodeError:
            given = None
        if not isinstance(given, dict):
            said = 'give 1, or settings such as {"policy": "lru"}'
            raise ConfigError(f"{VARIABLE}={text:.60}: {said}")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(f"{VARIABLE}: {first_refusal(error, cls, 'setting')}") from error
