"""The component keeps the contract."""

from __future__ import annotations

from kvgraft_testing import ComponentContract


class TestHiSparse(ComponentContract):
    component = "hisparse"
    options = {"n_layers": 1, "hot_tokens": 8, "max_running": 3}
    profile = "dev"
