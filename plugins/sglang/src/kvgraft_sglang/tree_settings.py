"""Settings of the tree inside SGLang, from one environment variable.

    KVGRAFT_SGLANG='{"policy": "lru"}' python -m sglang.launch_server --radix-cache-backend kvgraft

SGLang starts several processes; an environment variable reaches all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import ValidationError

from kvgraft import ConfigError, GuardMode, SettingsModel
from kvgraft.refusals import first_refusal

__all__ = ["BACKEND", "VARIABLE", "TreeSettings"]

BACKEND = "kvgraft"
"""The name for `--radix-cache-backend`."""

VARIABLE = "KVGRAFT_SGLANG"
"""The settings as a JSON object; none are needed."""


class TreeSettings(SettingsModel):
    """How kvgraft decides what SGLang keeps.

    Attributes:
        policy: the eviction policy: `density`, `lru` or another that is installed.
        guard: how much of the contract is checked while SGLang serves.
    """

    policy: str = "density"
    guard: GuardMode = GuardMode.OFF

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> TreeSettings:
        """The settings.

        Raises:
            ConfigError: text that is no JSON object, or a setting that is unknown or impossible.
        """
        text = environment.get(VARIABLE, "").strip() or "{}"
        try:
            given = json.loads(text)
        except json.JSONDecodeError:
            given = None
        if not isinstance(given, dict):
            raise ConfigError(f'{VARIABLE}={text:.60}: give settings such as {{"policy": "lru"}}')
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(f"{VARIABLE}: {first_refusal(error, cls, 'setting')}") from error
