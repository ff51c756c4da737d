"""Every error kvgraft raises, in one tree.

    KvgraftError
    ├── ConfigError            options, sizes or combinations that cannot work
    │   └── NoStorageError     the storage tier is used and there is none; an AttributeError too
    ├── PluginError            a component package that cannot be used
    │   └── PluginHookError    an exception a plugin's hook raised; carries component and hook
    ├── SnapshotError          a damaged or foreign snapshot of the tree
    ├── LeaseError             a lease or receipt used twice, or elsewhere (rule L2)
    ├── BudgetError            a request or a pin that needs more of a pool than it may have
    ├── TransferError          a copy between tiers that did not finish
    └── ContractViolation      a rule of the contract broken; carries rule, component, evidence
        └── IntegrityError     found by recomputing the books from the tree

A message is one line: subject, numbers, next action. Where failure is an ordinary outcome it is
a value (`kvgraft.admission.Decision`), not an exception.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "ConfigError",
    "ContractViolation",
    "IntegrityError",
    "KvgraftError",
    "LeaseError",
    "NoStorageError",
    "PluginError",
    "PluginHookError",
    "SnapshotError",
    "TransferError",
]


class KvgraftError(Exception):
    """Base of everything kvgraft raises on purpose."""


class ConfigError(KvgraftError):
    """An option, a size or a combination of components that cannot work."""


class NoStorageError(ConfigError, AttributeError):
    """A method of the storage tier is used and the cache has no storage tier."""


class PluginError(KvgraftError):
    """A component package that cannot be used; `plugin` names it, `rule` says what it breaks."""

    def __init__(self, plugin: str, message: str, rule: str = "P6") -> None:
        super().__init__(f"component {plugin!r}: {message}")
        self.plugin = plugin
        self.reason = message
        self.rule = rule


class PluginHookError(PluginError):
    """A hook of a plugin raised; the original exception is the cause."""

    def __init__(self, plugin: str, hook: str, cause: BaseException) -> None:
        super().__init__(plugin, f"hook {hook} raised {type(cause).__name__}: {cause}")
        self.hook = hook


class SnapshotError(KvgraftError):
    """A snapshot of the tree that cannot be read, or is of another model or layout."""


class LeaseError(KvgraftError):
    """A call out of order, or with a request, a pin or a key that the cache does not have (L2)."""


class BudgetError(KvgraftError):
    """A request or a pin asks a pool for more slots than it may have."""


class TransferError(KvgraftError):
    """A copy between tiers failed or did not finish in its time."""


class ContractViolation(KvgraftError):  # noqa: N818 - the contract's own word for it
    """A rule of the contract is broken; `rule`, `component` and `evidence` say which and how."""

    def __init__(self, rule: str, component: str | None, evidence: str) -> None:
        subject = f"component {component!r}" if component is not None else "core"
        super().__init__(f"{rule}: {subject}: {evidence}")
        self.rule = rule
        self.component = component
        self.evidence = evidence


class IntegrityError(ContractViolation):
    """`check_integrity()` recomputed the books and they disagree."""
