"""`docs/guard.md` says what the guard checks, and no more."""

from __future__ import annotations

import re

from kvgraft.config import CacheConfig
from kvgraft_guard import GUARDED
from kvgraft_testing.rules import RULES

from ..commands import ROOT

TEXT = (ROOT / "docs" / "guard.md").read_text(encoding="utf-8")


def test_the_document_lists_the_guarded_rules_as_the_code_does() -> None:
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.+) \|$", TEXT, re.MULTILINE)
    assert dict(rows) == GUARDED
    assert len(rows) == len(GUARDED)


def test_guarded_rules_stand_in_the_contracts_order() -> None:
    assert list(GUARDED) == [rule for rule in RULES if rule in GUARDED]


def test_the_document_names_every_setting_and_operation() -> None:
    settings = {name for name in CacheConfig.model_fields if name.startswith("guard")}
    assert set(re.findall(r"^\| `(guard\w*)` \|", TEXT, re.MULTILINE)) == settings
    for operation in ("begin", "admit", "load_back", "restart", "retract", "evict", "close"):
        assert f"`{operation}`" in TEXT
