"""Shared by adapters for other engines: settings of a store, and the engine's interface."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote, urlencode

from pydantic import AliasChoices, Field, ValidationError

from kvgraft.errors import ConfigError
from kvgraft.refusals import SettingsModel, first_refusal
from kvgraft_storage.limits import SupervisionLimits

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EngineInterface", "StoreSettings"]


class StoreSettings(SettingsModel):
    """A store in an engine's configuration; extend it with the adapter's own settings.

    Attributes:
        backend: the kind of store: `file`, `valkey`, `s3`, `mooncake` or another that is installed.
        location: where it is, also written `path`: a directory, HOST:PORT, BUCKET/PREFIX.
        options: the backend's own, such as `capacity`.
        weights: text that identifies the weights, such as a commit; read from the model's files by
            default.
        salt: any other text that keeps data apart.
        deadline_s: longest time for one call of the store, from when it begins.
        queue_timeout_s: longest time for which a transfer waits for its turn.
        shutdown_s: longest wait for data on its way when the engine ends.
    """

    adapter: ClassVar[str] = "kvgraft"
    """The distribution that error messages name."""

    backend: str = Field(default="file", pattern=r"^[a-z][a-z0-9_-]*$")
    location: str = Field(validation_alias=AliasChoices("location", "path"), min_length=1)
    options: Mapping[str, str] = Field(default_factory=dict)
    weights: str | None = Field(default=None, min_length=1)
    salt: str | None = None
    deadline_s: float = Field(default=5.0, gt=0)
    queue_timeout_s: float = Field(default=30.0, gt=0)
    shutdown_s: float = Field(default=10.0, gt=0)

    @classmethod
    def of(cls, given: Mapping[str, Any], engines_own: Iterable[str] = ()) -> Self:
        """Settings from an engine's configuration; unknown ones are the backend's.

        Args:
            given: by name.
            engines_own: names that the engine reads itself; left out.

        Raises:
            ConfigError: one is missing or impossible, with its name.
        """
        own, skipped = {*cls.model_fields, "path"} - {"options"}, {*engines_own}
        options = {
            name: cls._option(name, value)
            for name, value in given.items()
            if name not in own and name not in skipped
        }
        mine = {name: value for name, value in given.items() if name in own}
        if not {"location", "path"} & set(mine):
            raise ConfigError(
                f'{cls.adapter}: path is missing; give a directory, such as "path": '
                '"/var/cache/kvgraft", or HOST:PORT for "backend": "valkey"'
            )
        try:
            return cls.model_validate({**mine, "options": options})
        except ValidationError as error:
            raise ConfigError(f"{cls.adapter}: {first_refusal(error, cls, 'setting')}") from error

    @classmethod
    def _option(cls, name: str, value: object) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, (str, int, float)):
            return str(value)
        raise ConfigError(
            f"{cls.adapter}: {name} is {value!r:.40}; give text, a number, or true or false"
        )

    @property
    def url(self) -> str:
        """The store, as `kvgraft_storage.open_storage` takes it."""
        query = f"?{urlencode(self.options)}" if self.options else ""
        return f"{self.backend}:{quote(self.location, safe='/:,=@~+%')}{query}"

    @property
    def limits(self) -> SupervisionLimits:
        """Bounds of supervision.

        Memory is not lent: an engine reuses its memory as soon as a transfer has ended, and a
        transfer must end even if a disk hangs.
        """
        return SupervisionLimits(
            deadline_s=self.deadline_s, queue_timeout_s=self.queue_timeout_s, lend_memory=False
        )


@dataclass(frozen=True)
class EngineInterface:
    """Versions of an engine that an adapter was written for, and the signatures it relies on.

    Attributes:
        adapter: the adapter's distribution.
        engine: the engine's name.
        distribution: the engine's distribution.
        oldest: the first version that works, such as `(0, 32)`.
        too_new: the first version that is not known to work.
        signatures: parameters by name, such as `Class.method`; the engine may have more after them,
            with defaults.
    """

    adapter: str
    engine: str
    distribution: str
    oldest: tuple[int, ...]
    too_new: tuple[int, ...]
    signatures: Mapping[str, tuple[str, ...]]

    def require_supported(self, version: str) -> None:
        """Refuse an engine that the adapter was not written for.

        Raises:
            ConfigError: it is older or newer, or has no version.
        """
        found = re.match(r"\d+(\.\d+)+", version)
        numbers = tuple(map(int, found[0].split("."))) if found else None
        if numbers is None or not self.oldest <= numbers < self.too_new:
            wanted = f">={_text(self.oldest)},<{_text(self.too_new)}"
            raise ConfigError(
                f"{self.adapter}: {self.engine} {version} is not {wanted}; "
                f"pip install '{self.distribution}{wanted}', "
                f"or another version of {self.adapter}"
            )

    def differences(self, found: Mapping[str, object]) -> list[str]:
        """How the classes and functions of these names differ from the expected ones; a line each.

        Args:
            found: classes and functions by name.
        """
        lines = []
        for name, expected in self.signatures.items():
            owner, _, attribute = name.partition(".")
            thing: object = found.get(owner)
            if attribute and thing is not None:
                thing = getattr(thing, attribute, None)
            if not callable(thing):
                lines.append(f"{name} is not there")
                continue
            parameters = inspect.signature(thing).parameters
            names = tuple(parameters)
            more = [parameters[each] for each in names[len(expected) :]]
            needed = [each.name for each in more if each.default is inspect.Parameter.empty]
            if names[: len(expected)] != expected or needed:
                lines.append(f"{name}({', '.join(names)}) is not ({', '.join(expected)})")
        return lines


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
