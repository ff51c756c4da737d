"""Another vLLM is refused by its version, and a changed signature by its name."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import pytest

from kvgraft import ConfigError
from kvgraft_vllm.general_plugin import install
from kvgraft_vllm.interface import INTERFACE
from kvgraft_vllm.manager_settings import VARIABLE, ManagerSettings


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", "0.33.0rc1"])
def test_supported_versions_are_taken(version: str) -> None:
    INTERFACE.require_supported(version)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_in_a_line(version: str) -> None:
    with pytest.raises(ConfigError, match=r"is not >=0\.32,<0\.34; pip install") as refused:
        INTERFACE.require_supported(version)
    assert version in str(refused.value)
    assert "\n" not in str(refused.value)


def test_another_vllm_is_refused_before_anything_of_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = ModuleType("vllm")
    older.__dict__["__version__"] = "0.31.2"
    monkeypatch.setitem(sys.modules, "vllm", older)
    monkeypatch.delitem(sys.modules, "kvgraft_vllm.tier", raising=False)
    with pytest.raises(ConfigError, match=r"vLLM 0\.31\.2 is not >=0\.32,<0\.34"):
        importlib.import_module("kvgraft_vllm.tier")


def test_vllm_runs_the_function_that_the_entry_point_names() -> None:
    metadata = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'"vllm\.general_plugins"]\nkvgraft = "(.*)"\n', metadata)
    assert found is not None
    assert resolve_name(found[1]) is install


@pytest.mark.parametrize("text", ["", "0"])
def test_the_manager_is_off_unless_the_variable_says_so(text: str) -> None:
    assert ManagerSettings.from_environment({VARIABLE: text}) is None
    assert ManagerSettings.from_environment({}) is None
    assert ManagerSettings.from_environment({VARIABLE: "1"}) == ManagerSettings()


class Same:
    def lookup(self, key: bytes, req_context: object) -> None: ...

    def get_stats(self, *, fresh: bool = True) -> None: ...


class Renamed(Same):
    def lookup(self, block: bytes, req_context: object) -> None: ...


class Longer(Same):
    def lookup(  # type: ignore[override]
        self, key: bytes, req_context: object, step: int
    ) -> None: ...


def lookups(kind: type) -> list[str]:
    wanted = "SecondaryTierManager.lookup"
    return [
        line for line in INTERFACE.differences({"SecondaryTierManager": kind}) if wanted in line
    ]


def test_a_parameter_with_a_default_is_no_difference() -> None:
    assert lookups(Same) == []
    stats = [
        line
        for line in INTERFACE.differences({"SecondaryTierManager": Same})
        if "get_stats" in line
    ]
    assert stats == []


def test_a_renamed_or_new_parameter_and_a_missing_name_are_reported() -> None:
    expected = "is not (self, key, req_context)"
    assert lookups(Renamed) == [f"SecondaryTierManager.lookup(self, block, req_context) {expected}"]
    assert lookups(Longer) == [
        f"SecondaryTierManager.lookup(self, key, req_context, step) {expected}"
    ]
    assert len(INTERFACE.differences({})) == len(INTERFACE.signatures)
    assert "JobResult is not there" in INTERFACE.differences({})
