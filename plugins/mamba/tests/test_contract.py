"""The component keeps the contract."""

from __future__ import annotations

from kvgraft_testing import ComponentContract


class TestMamba(ComponentContract):
    component = "mamba"
    options = {
        "n_layers": 1,
        "conv_dim": 8,
        "states": 7,
        "host_states": 6,
        "checkpoint_interval_tokens": 4,
    }
    profile = "dev"
