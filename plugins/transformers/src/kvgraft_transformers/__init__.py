"""Prefix reuse for Hugging Face transformers: kvgraft's pools as the model's cache.

    from kvgraft_transformers import ModelMemory

    memory = ModelMemory.open(model, device_tokens=65_536, host_tokens=262_144)
    with memory.session(input_ids, max_new_tokens=64) as session:
        model.generate(input_ids, **session.cache.arguments, max_new_tokens=64)

Importing this package imports neither torch nor transformers; its names load them on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgraft_transformers.architecture import Architecture, LayerPlan, read_architecture
    from kvgraft_transformers.config_file import components_of_config
    from kvgraft_transformers.errors import (
        AdmissionRefusedError,
        SessionError,
        UnsupportedModelError,
    )
    from kvgraft_transformers.memory import ModelMemory
    from kvgraft_transformers.session import Session
    from kvgraft_transformers.session_cache import SessionCache

__version__ = "0.1.0"

_LAZY = {
    "AdmissionRefusedError": "errors",
    "Architecture": "architecture",
    "LayerPlan": "architecture",
    "ModelMemory": "memory",
    "Session": "session",
    "SessionCache": "session_cache",
    "SessionError": "errors",
    "UnsupportedModelError": "errors",
    "components_of_config": "config_file",
    "read_architecture": "architecture",
}

__all__ = [
    "AdmissionRefusedError",
    "Architecture",
    "LayerPlan",
    "ModelMemory",
    "Session",
    "SessionCache",
    "SessionError",
    "UnsupportedModelError",
    "components_of_config",
    "read_architecture",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        from kvgraft_transformers.versions import check_transformers

        check_transformers()
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
