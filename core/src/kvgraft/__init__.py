"""One prefix tree, any attention.

kvgraft is a hierarchical KV cache for serving language models that mix kinds of attention. An
engine opens a `Cache`; each kind of attention is a component package found by its entry point.

Importing this package imports neither torch nor the tree: stores work without them. The names below
that need them load them on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.config import (
    CacheConfig,
    ComponentOptions,
    GuardMode,
    LoadModel,
    WritePolicy,
)
from kvgraft.contract import API_VERSION, COPY_ON_WRITE, HOST_MIRROR
from kvgraft.errors import (
    BudgetError,
    ConfigError,
    ContractViolation,
    IntegrityError,
    KvgraftError,
    LeaseError,
    PluginError,
    PluginHookError,
    SnapshotError,
    TransferError,
)
from kvgraft.hookspecs import hookimpl
from kvgraft.pools.options import AttentionOptions, Dtype, LayerOptions
from kvgraft.reach import Reach
from kvgraft.refusals import SettingsModel
from kvgraft.sizes import Nbytes, Tokens
from kvgraft.stats import CacheStats
from kvgraft.terms import Chunk, ChunkedLocal, Everything, Leading, StateAt, Term, Trailing
from kvgraft.types import (
    ComponentDeclaration,
    ComponentMatch,
    Demand,
    DemandQuery,
    Direction,
    Kind,
    LockQuery,
    MatchView,
    Namespaces,
    Span,
    Tier,
    TransferQuery,
)

if TYPE_CHECKING:
    from kvgraft.admission.decision import Decision, Outcome, Shortage, Waiting
    from kvgraft.cache import Cache
    from kvgraft.parts import Prefetch, Step, StorageTier, TableChanges
    from kvgraft.pools import BuildContext, Component, DevicePool, HostMirror, PlaneSpec
    from kvgraft.requests.request import Pending, Request
    from kvgraft.tree.keys import TokenKey

__version__ = "0.1.0"

_LAZY = {
    name: f"kvgraft.{module}"
    for module, names in {
        "admission.decision": ("Decision", "Outcome", "Shortage", "Waiting"),
        "cache": ("Cache",),
        "parts": ("Prefetch", "Step", "StorageTier", "TableChanges"),
        "pools": ("BuildContext", "Component", "DevicePool", "HostMirror", "PlaneSpec"),
        "requests.request": ("Pending", "Request"),
        "tree.keys": ("TokenKey",),
    }.items()
    for name in names
}

__all__ = [
    "API_VERSION",
    "COPY_ON_WRITE",
    "HOST_MIRROR",
    "AttentionOptions",
    "BudgetError",
    "BuildContext",
    "Cache",
    "CacheConfig",
    "CacheStats",
    "Chunk",
    "ChunkedLocal",
    "Component",
    "ComponentDeclaration",
    "ComponentMatch",
    "ComponentOptions",
    "ConfigError",
    "ContractViolation",
    "Decision",
    "Demand",
    "DemandQuery",
    "DevicePool",
    "Direction",
    "Dtype",
    "Everything",
    "GuardMode",
    "HostMirror",
    "IntegrityError",
    "Kind",
    "KvgraftError",
    "LayerOptions",
    "Leading",
    "LeaseError",
    "LoadModel",
    "LockQuery",
    "MatchView",
    "Namespaces",
    "Nbytes",
    "Outcome",
    "Pending",
    "PlaneSpec",
    "PluginError",
    "PluginHookError",
    "Prefetch",
    "Reach",
    "Request",
    "SettingsModel",
    "Shortage",
    "SnapshotError",
    "Span",
    "StateAt",
    "Step",
    "StorageTier",
    "TableChanges",
    "Term",
    "Tier",
    "TokenKey",
    "Tokens",
    "Trailing",
    "TransferError",
    "TransferQuery",
    "Waiting",
    "WritePolicy",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
