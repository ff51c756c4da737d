"""A model's components, from its configuration file.

Packages that can read such files publish a function `(path) -> options by component` in the
entry-point group `kvgraft.models`; kvgraft-transformers does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from kvgraft.errors import ConfigError
from kvgraft.optional import Published, how_to_install, import_failure
from kvgraft.packages.registry import select
from kvgraft.types import Kind

__all__ = ["MODELS_GROUP", "QUANTIZATIONS", "components_of", "model_name", "quantized"]

MODELS_GROUP = "kvgraft.models"

QUANTIZATIONS = {"fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Element types of keys and values, by engines' names for them."""

READER = "plugins/transformers/requirements.txt"

ReadModel = Callable[[Path], dict[str, dict[str, Any]]]


def components_of(path: Path, readers: Sequence[Published]) -> dict[str, dict[str, Any]]:
    """Options by component of the model that a configuration file describes.

    Args:
        path: the file, or the directory it is in.
        readers: functions that installed packages publish in `MODELS_GROUP`; the first is used.

    Raises:
        ConfigError: there is no such file, no installed package reads it, or no components serve
            its model.
    """
    if not path.exists():
        raise ConfigError(
            f"--model {path}: no such file; give a model's config.json or the directory it is in"
        )
    if not readers:
        raise ConfigError(
            f"--model {path}: no installed package reads a model's configuration; "
            f"{how_to_install(READER)}, or give --component NAME:OPTION=VALUE instead"
        )
    reader = readers[0]
    try:
        read = cast("ReadModel", reader.load())
    except ImportError as error:
        raise ConfigError(
            f"--model {path}: {reader.distribution}, which reads it: {import_failure(error)}; "
            f"{how_to_install(READER)}"
        ) from error
    return read(path)


def model_name(path: Path) -> str:
    """The model's name for reports: its directory's or file's, and its class if given.

    Args:
        path: the configuration file or its directory, which has been read.
    """
    file = path / "config.json" if path.is_dir() else path
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    with suppress(OSError, ValueError, AttributeError):
        fields = json.loads(file.read_text(encoding="utf-8"))
        told = fields.get("architectures") or [fields.get("model_type")]
        return f"{name} ({told[0]})" if told[0] else name
    return name


def quantized(components: Mapping[str, dict[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    """The components with keys and values of another element type; states stay as they are.

    Args:
        components: options by component.
        name: one of `QUANTIZATIONS`.
    """
    dtype = QUANTIZATIONS[name]
    packages = {each.partition("@")[0] for each in components}
    kinds = {each.name: each.declaration.kind for each in select(sorted(packages))}
    return {
        each: {**options, "dtype": dtype}
        if kinds[each.partition("@")[0]] is Kind.PAGED
        else dict(options)
        for each, options in components.items()
    }
