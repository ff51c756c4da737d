"""The compiled build: whether it is loaded, and the marks that its compiler reads.

mypyc makes extension modules of the modules that serving spends its time in (`compiled_build.py`
beside this package, `docs/adr`). `kvgraft.tree.keys` alone asks which build it is: the loop of
`kvgraft.tree.packing` pays only where it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:
    Kind = TypeVar("Kind")

    def mypyc_attr(**marks: bool) -> Callable[[type[Kind]], type[Kind]]:
        """Mark a class for the compiler, which alone reads it."""
        del marks
        return lambda kind: kind


__all__ = ["fields_of", "is_compiled", "mypyc_attr"]


def fields_of(kind: type) -> tuple[str, ...]:
    """Names of the attributes that a class with slots, or a compiled one, declares."""
    declared: tuple[str, ...] = getattr(kind, "__mypyc_attrs__", getattr(kind, "__slots__", ()))
    return declared


def is_compiled() -> bool:
    """Whether the compiled build is installed."""
    found = find_spec("kvgraft.tree.tree")
    assert found is not None
    assert found.origin is not None
    return found.origin.endswith(tuple(EXTENSION_SUFFIXES))
