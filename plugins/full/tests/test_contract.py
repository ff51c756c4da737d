"""The component keeps the contract."""

from __future__ import annotations

from kvgraft_testing import ComponentContract


class TestFull(ComponentContract):
    component = "full"
    options = {"n_layers": 1}
    profile = "dev"
