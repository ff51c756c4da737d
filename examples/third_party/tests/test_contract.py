"""The contract, as kvgraft ships it, over this component."""

from __future__ import annotations

from typing import Any, ClassVar

from kvgraft_testing import ComponentContract


class TestSinks(ComponentContract):
    """Small sizes: pages of 1, 2 and 4 tokens make the window one page or several."""

    component = "sinks"
    options: ClassVar[dict[str, Any]] = {"sinks": 2, "window": 5, "n_layers": 2, "head_dim": 2}
