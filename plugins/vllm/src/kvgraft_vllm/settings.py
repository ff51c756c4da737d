"""Settings of the tier: what stands beside `type` and `module_path` in vLLM's configuration.

    {"type": "KvgraftTier", "module_path": "kvgraft_vllm.tier",
     "backend": "file", "path": "/var/cache/kvgraft", "capacity": "40GB"}

Options that are not the tier's own are the backend's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from kvgraft import ConfigError, Nbytes
from kvgraft.refusals import first_refusal
from kvgraft.storage import SupervisionLimits

__all__ = ["TierSettings"]


class TierSettings(BaseModel):
    """One tier.

    Attributes:
        backend: the kind of store: `file`, `valkey`, `s3`, `mooncake` or another that is installed.
        location: where it is, also written `path`: a directory, HOST:PORT, BUCKET/PREFIX.
        options: the backend's own, such as `capacity`.
        weights: what tells these weights from others, such as a commit; read from the files of the
            model by default.
        salt: any other text that keeps data apart.
        lookup_timeout_s: longest time for which a request waits to hear what the store has.
        deadline_s: longest time for one call of the store, from when it begins.
        queue_timeout_s: longest time for which a transfer waits for its turn.
        store_nbytes: most bytes on their way to the store; vLLM's CPU memory holds them meanwhile,
            and what comes beyond is not stored and counted.
        shutdown_s: longest wait for what is on its way when the engine ends.
        log_requests: a line per request that says what came from the store and what ended the hit.
        enable_kv_events: tell vLLM's KV events what the store takes and drops.
        locality: `LOCAL` or `REMOTE`, for vLLM's filters and events.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = Field(default="file", pattern=r"^[a-z][a-z0-9_-]*$")
    location: str = Field(validation_alias=AliasChoices("location", "path"), min_length=1)
    options: Mapping[str, str] = Field(default_factory=dict)
    weights: str | None = Field(default=None, min_length=1)
    salt: str | None = None
    lookup_timeout_s: float = Field(default=1.0, gt=0)
    deadline_s: float = Field(default=5.0, gt=0)
    queue_timeout_s: float = Field(default=30.0, gt=0)
    store_nbytes: Nbytes = Field(default=1 << 30, ge=1)
    shutdown_s: float = Field(default=10.0, gt=0)
    log_requests: bool = True
    enable_kv_events: bool = False
    locality: str | None = Field(default=None, pattern="^(LOCAL|REMOTE)$")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TierSettings:
        """Settings from an entry of `secondary_tiers`, without vLLM's own keys.

        Raises:
            ConfigError: one is missing or impossible, with its name.
        """
        own = {*cls.model_fields, "path"} - {"options"}
        options = {name: _text(name, value) for name, value in given.items() if name not in own}
        mine = {name: value for name, value in given.items() if name in own}
        if not {"location", "path"} & set(mine):
            raise ConfigError(
                'kvgraft-vllm: path is missing; give a directory, such as "path": '
                '"/var/cache/kvgraft", or HOST:PORT for "backend": "valkey"'
            )
        try:
            return cls.model_validate({**mine, "options": options})
        except ValidationError as error:
            raise ConfigError(f"kvgraft-vllm: {first_refusal(error, cls, 'setting')}") from error

    @property
    def url(self) -> str:
        """The store, as `kvgraft.storage.open_storage` takes it."""
        query = f"?{urlencode(self.options)}" if self.options else ""
        return f"{self.backend}:{quote(self.location, safe='/:,=@~+%')}{query}"

    @property
    def limits(self) -> SupervisionLimits:
        """Bounds of supervision.

        Memory is not lent: vLLM reuses a chunk's memory as soon as its job has ended, and a job
        must end although a disk hangs.
        """
        return SupervisionLimits(
            deadline_s=self.deadline_s, queue_timeout_s=self.queue_timeout_s, lend_memory=False
        )


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ConfigError(
        f"kvgraft-vllm: {name} is {value!r:.40}; give text, a number, or true or false"
    )
