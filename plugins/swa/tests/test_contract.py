"""The component keeps the contract."""

from __future__ import annotations

from kvgraft_testing import ComponentContract


class TestSwa(ComponentContract):
    component = "swa"
    options = {"n_layers": 1, "window": 5}
    profile = "dev"
