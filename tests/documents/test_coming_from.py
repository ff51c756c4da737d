"""The page for users of other engines agrees with the answers that their names get."""

from __future__ import annotations

import re

import pytest

from kvgraft import Cache, ConfigError, Request, Step
from kvgraft.config import CacheConfig, parse_config
from kvgraft.refusals import ELSEWHERE
from kvgraft_storage.settings import StorageSettings

from ..commands import ROOT

PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ")[:2] for line in PAGE.splitlines() if line.startswith("| `")]


def test_names_that_are_answered_are_listed_with_the_same_name_here() -> None:
    found = set()
    for there, here in ROWS:
        for name in ELSEWHERE.keys() & set(re.findall(r"`(\w+)`", there)):
            ours = {each.replace("-", "_") for each in re.findall(r"[a-z]+(?:[_-][a-z]+)*", here)}
            assert set(ELSEWHERE[name]) & ours, f"{name}: {here}"
            found.add(name)
    assert len(found) >= 15


def test_names_of_settings_that_are_listed_are_answered() -> None:
    settings = "|".join(CacheConfig.model_fields)
    for there, here in ROWS:
        found = re.findall(rf"`({settings})`", here)
        names = {*re.findall(r"`([a-z]+(?:_[a-z]+)+)`", there)} - CacheConfig.model_fields.keys()
        if names and found and here.startswith(f"`{found[0]}`"):
            assert any(meant(name, found) for name in names), f"{there}: {here}"


def meant(name: str, ours: list[str]) -> bool:
    """Whether a setting of that name is refused with a hint at one of ours."""
    with pytest.raises(ConfigError) as refused:
        parse_config({"components": ["full"], "device_tokens": 64, name: 1})
    return any(f"did you mean {each!r}" in str(refused.value) for each in ours)


def test_calls_and_settings_of_ours_that_are_named_are_there() -> None:
    here = " ".join(here for _, here in ROWS)
    for name in re.findall(r"`Cache\.(\w+)", here):
        assert hasattr(Cache, name), name
    for name in re.findall(r"`step\.(\w+)", here):
        assert name in Step._fields, name
    settings = {*CacheConfig.model_fields, *StorageSettings.model_fields}
    calls = {name for each in (Cache, Request) for name in dir(each)} | {
        "reserve",
        "chunk",
        "n_drafts",
    }
    words = set(re.findall(r"`([a-z]+(?:_[a-z]+)*)`", here))
    assert words - settings - calls == {"dtype", "cache_salt", "n_layers"}
