"""Settings of a cache, parsed from text."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    StrictBool,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvgraft.errors import ConfigError
from kvgraft.optional import is_installed, load_part
from kvgraft.refusals import SettingsModel, first_refusal, shown
from kvgraft.sizes import Nbytes, PoolTokens, Tokens, is_nbytes

__all__ = [
    "CacheConfig",
    "ComponentOptions",
    "GuardMode",
    "LoadModel",
    "WritePolicy",
    "parse_config",
]


class WritePolicy(str, enum.Enum):
    """When data is copied to HOST (B6)."""

    WRITE_THROUGH = "write-through"
    """At the first touch: as soon as it is in the tree."""
    WRITE_THROUGH_SELECTIVE = "write-through-selective"
    """At the second touch: when a prefix is hit for the first time."""
    WRITE_BACK = "write-back"
    """At eviction: data is copied to HOST before it leaves the device, the next victims ahead."""


class GuardMode(str, enum.Enum):
    """The share of a cache's operations that the guard checks while it serves."""

    OFF = "off"
    """No operation; it costs nothing."""
    SAMPLED = "sampled"
    """Every n-th operation of each kind; for staging."""
    ON = "on"
    """Every operation; for tests."""


class ComponentOptions(SettingsModel):
    """Options every built-in component has; packages extend it.

    Attributes:
        device_tokens: size of the device pool in tokens; the cache's by default.
        host_tokens: size of the host mirror in tokens; the cache's by default.
    """

    device_tokens: Annotated[Tokens, Field(gt=0)] | None = None
    host_tokens: Annotated[Tokens, Field(ge=0)] | None = None

    @field_validator("device_tokens", "host_tokens", mode="before")
    @classmethod
    def _no_bytes_of_one(cls, value: Any, info: ValidationInfo) -> Any:
        if is_nbytes(value):
            said = (
                "is a size in bytes; give the tokens of this component, such as '4M'; bytes are "
                f"those of all components together: setting {info.field_name} of the cache"
            )
            raise PydanticCustomError("size", "{said}", {"said": said})
        return value


class LoadModel(SettingsModel):
    """Cost model that chooses between loading a prefix back and computing it again (R8).

    Loading takes `latency_s + nbytes / bandwidth_bytes_s`. A pass computes at most `pass_tokens`
    and takes `pass_s` or `tokens / prefill_tokens_s`, whichever is longer: computing costs the
    passes over the whole prompt minus those over its rest. The defaults are a PCIe 4.0 x16 link at
    80 % of its 32 GB/s and 20,000 tokens a second; measure yours and say so.
    """

    bandwidth_bytes_s: PositiveFloat = 25e9
    latency_s: float = Field(default=100e-6, ge=0)
    prefill_tokens_s: PositiveFloat = 20_000.0
    pass_s: float = Field(default=0.0, ge=0)
    pass_tokens: PositiveInt = 2048

    def compute_s(self, tokens: int, rest: int) -> float:
        """Seconds to compute a prefix, beside the passes over the `rest` of the prompt."""
        return tokens / self.prefill_tokens_s + self._idle_s(tokens + rest) - self._idle_s(rest)

    def _idle_s(self, tokens: int) -> float:
        """Seconds in which the passes over a prompt could have computed more tokens."""
        full, last = divmod(tokens, self.pass_tokens)
        sizes = ((full, self.pass_tokens), (min(last, 1), last))
        return sum(n * max(0.0, self.pass_s - size / self.prefill_tokens_s) for n, size in sizes)


TENANTS_EXAMPLE = {"chat": {"namespaces": ["chat"], "guarantee": 0.5}}
STORAGE_EXAMPLE = {"url": "file:/var/cache/kvgraft", "model": "my-model", "weights": "rev-1"}

LRU, DENSITY = "lru", "density"
"""The core's own eviction policy, and that of kvgraft-density."""


def _default_policy() -> str:
    return DENSITY if is_installed(DENSITY) else LRU


class CacheConfig(SettingsModel):
    """Settings of one cache.

    Attributes:
        components: options per component name. A package may be there more than once, each
            instance with its own options, pools and reach: name them `package@label`.
        page_size: tokens per page.
        device: torch device of the device pools.
        device_tokens: size of each device pool in tokens, such as `4_000_000` or `"4M"`. A size in
            bytes, such as `"40GB"`, is taken as `device_bytes`.
        device_bytes: size in bytes of all components' device pools together, instead of tokens;
            the tokens are filled in when the cache is opened.
        device_memory: one budget in bytes for all device pools, whose shares follow their use;
            `device_bytes` fixes them. With `device_tokens` too, they begin at that size.
        host_tokens: size of each host mirror in tokens; no host tier with 0.
        host_bytes: size in bytes of all host mirrors together, instead of tokens.
        host_memory: one budget in bytes for all host mirrors, as `device_memory`.
        payload: false, for simulations: pools of any size take no memory. All decisions are the
            same, and nothing can be read, copied or stored.
        policy: the eviction policy: which data is kept, see `kvgraft.policies`. By default
            `density` where kvgraft-density is installed, else `lru`.
        write_policy: when data goes to HOST; by default write-back, but write-through with
            `storage` or `tenants`.
        pin_share: the part of every pool's slots that pinned prefixes may hold together (K6).
        load: the load-or-recompute decision; None always loads.
        storage: the storage tier, `kvgraft_storage.StorageSettings` or a dictionary of its fields;
            none by default.
        tenants: by name, the tenants that share the pools, each `kvgraft_retention.TenantSettings`
            or a dictionary of its fields; all other namespaces belong to the tenant `default`.
            Without tenants all requests are alike.
        cut_tokens: a prefill is cut where a state is worth keeping, but not closer than this to the
            cut or the prefix before: the cost of an extra pass of the model, in tokens.
        decode_interval_tokens: while a request decodes, a copy of its state is kept at each
            multiple of this many tokens, rounded up to pages; the last one stays when it ends. 0
            keeps one at every page, as a cache with windows always does.
        max_drafts: most drafts of a request that one pass of the model verifies; each request that
            decodes is promised slots for them, unless it could never fit with them (G1).
        max_requests: rows of the page tables of `Cache.step`: most requests that step at a time.
            Without it the tables grow, and are then other tensors.
        max_tokens: most tokens of a request that steps; without it the tables grow as well.
        transfer_timeout_s: longest wait for a copy that must finish now.
        guard: the share of operations that is checked while serving.
        guard_sample: share of operations that a sampled guard checks.
        guard_full_check: operations checked between two recomputations of all books; by default a
            64th of the slots, at least 8, which bounds their share of the cost.
    """

    components: dict[str, dict[str, Any]] = Field(min_length=1, examples=[["full"]])
    page_size: Tokens = Field(default=64, gt=0)
    device: str = "cpu"
    device_tokens: PoolTokens = Field(gt=0, examples=["4M"])
    device_memory: Nbytes | None = None
    device_bytes: Nbytes | None = None
    host_tokens: PoolTokens = Field(default=0, ge=0)
    host_memory: Nbytes | None = None
    host_bytes: Nbytes | None = None
    payload: StrictBool = True
    policy: str = Field(default_factory=_default_policy)
    pin_share: float = Field(default=0.25, gt=0, le=1)
    write_policy: WritePolicy = WritePolicy.WRITE_BACK
    load: LoadModel | None = Field(default=LoadModel(), examples=[{"prefill_tokens_s": 20_000}])
    storage: Any = Field(default=None, examples=[STORAGE_EXAMPLE])
    tenants: dict[str, Any] = Field(default={}, examples=[TENANTS_EXAMPLE])
    cut_tokens: Tokens = Field(default=0, ge=0)
    decode_interval_tokens: Tokens = Field(default=256, ge=0)
    max_drafts: Tokens = Field(default=0, ge=0)
    max_requests: PositiveInt | None = None
    max_tokens: Annotated[Tokens, Field(gt=0)] | None = None
    transfer_timeout_s: PositiveFloat = 30.0
    guard: GuardMode = GuardMode.OFF
    guard_sample: float = Field(default=0.01, gt=0, le=1)
    guard_full_check: PositiveInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, settings: Any) -> Any:
        #   tokens=N ─► N      tokens="8 GiB", bytes or memory alone ─► bytes, and 1 token until the
        #   pools are known    memory beside tokens ─► both     any other two ─► refused
        if not isinstance(settings, Mapping):
            return settings
        settings = dict(settings)
        for tier in ("device", "host"):
            tokens, nbytes, memory = f"{tier}_tokens", f"{tier}_bytes", f"{tier}_memory"
            if tokens in settings and settings[tokens] is None:
                del settings[tokens]
            if is_nbytes(settings.get(tokens)):
                if settings.get(nbytes) is not None:
                    raise _sized_twice(settings, tokens, nbytes)
                settings[nbytes] = settings.pop(tokens)
            if settings.get(memory) is not None:
                if settings.get(nbytes) is not None:
                    raise _sized_twice(settings, nbytes, memory)
                if tokens not in settings:
                    settings[nbytes] = settings[memory]
            if settings.get(nbytes) is not None:
                if tokens in settings:
                    raise _sized_twice(settings, tokens, nbytes)
                settings[tokens] = 1
        if settings.get("write_policy") is None:
            # write-back hits most; a store is fed from HOST, and tenants have no clean reserve
            through = settings.get("storage") or settings.get("tenants")
            policy = WritePolicy.WRITE_THROUGH if through else WritePolicy.WRITE_BACK
            settings["write_policy"] = policy
        return settings

    @model_validator(mode="after")
    def _pools_are_possible(self) -> CacheConfig:
        most = MOST_PAGES * self.page_size
        for tier in ("device", "host"):
            n_tokens: int = getattr(self, f"{tier}_tokens")
            if n_tokens > most:
                said = f"setting {tier}_tokens={n_tokens}: give {most} or less, {MOST_PAGES} pages"
                raise PydanticCustomError("pages", "{said}", {"said": said})
            if self.tenants and getattr(self, f"{tier}_memory") is not None:
                said = (
                    "setting tenants: tenants have shares of pools of a fixed size; give "
                    f"{tier}_bytes instead of {tier}_memory"
                )
                raise PydanticCustomError("tenants", "{said}", {"said": said})
        return self

    @field_validator("storage", "tenants")
    @classmethod
    def _of_their_packages(cls, given: Any, info: ValidationInfo) -> Any:
        """Settings of a part are its package's own."""
        if given is None or (info.field_name == "tenants" and not given):
            return given
        if not isinstance(given, (Mapping, SettingsModel)):
            raise PydanticCustomError("dict_type", "give options by name")
        return load_part(f"{info.field_name}_settings")(given)


MOST_PAGES = 2**31 - 1
"""Slots are numbered with int32."""


def _sized_twice(settings: Mapping[str, Any], *names: str) -> PydanticCustomError:
    given = " and ".join(f"{name}={shown(settings[name])}" for name in names)
    return PydanticCustomError("twice", "settings {given}: give one of the two", {"given": given})


def _by_name(components: object) -> dict[str, Any]:
    """Options by component; a list of names stands for components without options."""
    names = list(components) if isinstance(components, Iterable) else []
    if isinstance(components, str) or not names or not all(isinstance(each, str) for each in names):
        raise ConfigError(
            f"setting components={shown(components)}: give names such as ['full'], or options by "
            "name such as {'full': {'n_layers': 32}}"
        )
    for name in names:
        if names.count(name) > 1:
            package = name.partition("@")[0]
            raise ConfigError(
                f"setting components={shown(components)}: {name!r} is there twice; name two "
                f"instances '{package}@a' and '{package}@b', each with its own options"
            )
    return dict(components) if isinstance(components, Mapping) else {name: {} for name in names}


def parse_config(settings: dict[str, Any]) -> CacheConfig:
    """Settings as a `CacheConfig`; components without options may be given as names alone.

    Raises:
        ConfigError: naming the first field that is missing, unknown or impossible.
    """
    if "components" in settings:
        settings = {**settings, "components": _by_name(settings["components"])}
    try:
        return CacheConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(first_refusal(error, CacheConfig, "setting")) from error
