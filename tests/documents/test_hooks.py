"""Every hook is documented with its exact arguments, its inverse and its rules."""

from __future__ import annotations

import inspect
import re

import pytest

from kvgraft import config, hookspecs
from kvgraft.packages.registry import HOOKS

from ..commands import ROOT

TEXT = (ROOT / "docs" / "components.md").read_text(encoding="utf-8")


def section(hook: str) -> str:
    found: list[str] = re.findall(rf"^### `{hook}\(.*?(?=^##)", TEXT, re.MULTILINE | re.DOTALL)
    (only,) = found
    return only


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_documented_with_its_exact_arguments(hook: str) -> None:
    assert section(hook).startswith(f"### `{hook}({', '.join(HOOKS[hook])})`\n")


def test_no_hook_is_documented_that_does_not_exist() -> None:
    assert set(re.findall(r"^### `(\w+)\(", TEXT, re.MULTILINE)) == set(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_the_document_names_the_rules_that_the_hooks_docstring_names(hook: str) -> None:
    docstring = inspect.getdoc(getattr(hookspecs, hook)) or ""
    assert docstring
    cited = set(re.findall(r"\b[A-Z]\d{1,2}\b", docstring.partition("Contract:")[2]))
    assert cited <= set(re.findall(r"\b[A-Z]\d{1,2}\b", section(hook)))


@pytest.mark.parametrize("hook", hookspecs.REQUIRED)
def test_a_required_hook_says_so(hook: str) -> None:
    assert "Required." in section(hook)


def test_every_setting_of_a_cache_is_documented() -> None:
    settings = set(config.CacheConfig.model_fields) - {"components"}
    text = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) >= settings
