"""The contract, as kvgraft ships it, over this component."""

from __future__ import annotations

from typing import Any, ClassVar

from kvgraft_testing import ComponentContract


class TestDraft(ComponentContract):
    """Small sizes: one layer, and a hidden state of three elements."""

    component = "draft"
    options: ClassVar[dict[str, Any]] = {"hidden": 3, "head_dim": 2}
