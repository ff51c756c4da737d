"""The source files as syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..commands import ROOT

__all__ = [
    "COMMAND",
    "COMPONENTS",
    "CORE",
    "ENGINES",
    "PARTS",
    "PLUGINS",
    "REPLAY",
    "STORES",
    "Module",
    "modules",
]

CORE = ROOT / "core" / "src"
PLUGINS = sorted(path for path in (ROOT / "plugins").glob("*/src") if path.is_dir())


def _publishes(source: Path, group: str) -> bool:
    metadata = (source.parent / "pyproject.toml").read_text(encoding="utf-8")
    return f'[project.entry-points."{group}"]' in metadata


COMPONENTS = [path for path in PLUGINS if _publishes(path, "kvgraft.components")]
"""Packages that publish a component."""

STORES = [path for path in PLUGINS if _publishes(path, "kvgraft.storage")]
"""Packages that publish a store."""

PARTS = [path for path in PLUGINS if _publishes(path, "kvgraft.parts")]
"""Packages that stand for a part of the cache, and so know the others."""

REPLAY = ROOT / "plugins" / "replay" / "src"
"""The package that measures the cache, and so reads its books."""

COMMAND = ROOT / "plugins" / "cli" / "src"
"""The package of the command, which says what is installed."""

ENGINES = [path for path in PLUGINS if path not in (*COMPONENTS, *STORES, *PARTS, REPLAY, COMMAND)]
"""Packages that embed the cache."""


class Module(NamedTuple):
    """One source file.

    Attributes:
        name: dotted.
        path: where it is.
        tree: its syntax tree.
    """

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def imports(self, *, known: frozenset[str]) -> set[str]:
        """Modules of `known` it imports when it runs, those inside functions included."""
        return self._imports(_running(self.tree), known)

    def named_imports(self, *, known: frozenset[str]) -> set[str]:
        """The same, with those that only type checkers read."""
        return self._imports(ast.walk(self.tree), known)

    def _imports(self, nodes: Iterable[ast.AST], known: frozenset[str]) -> set[str]:
        found: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{self.path}: relative import"
                assert node.module is not None
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found.add(inner if inner in known else node.module)
        return found

    def public(self) -> set[str]:
        """Functions, classes and constants it defines without a leading underscore."""
        names: set[str] = set()
        for node in self.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
        return {name for name in names if not name.startswith("_")}

    def exported(self) -> list[str] | None:
        """Its `__all__`, if it has one."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = ast.literal_eval(node.value)
                assert isinstance(names, list)
                return names
        return None


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _running(node)


def modules(*roots: Path) -> list[Module]:
    """The modules below source directories."""
    return [module for root in roots for module in _below(root)]


@cache
def _below(root: Path) -> list[Module]:
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    return found
