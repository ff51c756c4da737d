"""The `__all__` of a package, and of a module that others import, lists its public names."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import pytest

import kvgraft

from .sources import CORE, PLUGINS, Module, modules
from .test_imports import OPEN_TO_PLUGINS


@cache
def everything() -> list[Module]:
    """The modules of all distributions, which only the process that runs these tests reads."""
    return modules(CORE, *PLUGINS)


NEEDS = {
    "kvgraft_dynamo.worker": "dynamo",
    "kvgraft_vllm.kv_events": "vllm",
    "kvgraft_vllm.manager": "vllm",
    "kvgraft_vllm.tier": "vllm",
    "kvgraft_sglang.allocator": "sglang",
    "kvgraft_sglang.backend": "sglang",
    "kvgraft_sglang.tree": "sglang",
    "kvgraft_testing.tiers.sglang": "sglang",
    "kvgraft_testing.tiers.vllm": "vllm",
    "kvgraft_accelerator.kernels": "triton",
}
"""Modules that only an engine imports, or that an optional dependency brings."""


def importable() -> list[Module]:
    """All but those of packages that need a newer Python, or something that is not installed."""
    return [
        module
        for module in everything()
        if find_spec(module.name.partition(".")[0]) is not None
        and find_spec(NEEDS.get(module.name, "kvgraft")) is not None
    ]


def is_inside_the_core(module: Module) -> bool:
    """Whether only the core imports a module: there, an underscore tells what is private."""
    in_core = module.name.startswith("kvgraft.")
    return in_core and not module.is_package and module.name not in OPEN_TO_PLUGINS


def wrongly_listed(module: Module) -> str | None:
    """The fault of a module's `__all__`; None if it has none."""
    exported = module.exported()
    if exported is None:
        if is_inside_the_core(module):
            return None
        names = module.public()
        return f"defines {sorted(names)} and has no __all__" if names else None
    if len(set(exported)) != len(exported):
        return "lists a name twice"
    imported = importlib.import_module(module.name)
    missing = [name for name in exported if not hasattr(imported, name)]
    return f"lists {missing}, which it does not have" if missing else None


def test_a_module_offers_every_name_in_its_all() -> None:
    found = {module.name: wrongly_listed(module) for module in importable()}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_everything_public_of_a_package_is_in_its_list() -> None:
    for package in ("kvgraft", "kvgraft.pools", "kvgraft.transfers", "kvgraft.admission"):
        imported = importlib.import_module(package)
        defined = {
            name
            for name, value in vars(imported).items()
            if not name.startswith("_")
            and getattr(value, "__module__", "").startswith("kvgraft")
            and callable(value)
        }
        assert defined <= set(imported.__all__), package


def test_names_that_need_torch_come_with_the_others() -> None:
    assert set(kvgraft.__all__) >= set(kvgraft._LAZY)
    assert all(getattr(kvgraft, name) is not None for name in kvgraft.__all__)
    with pytest.raises(AttributeError, match="'kvgraft' has no attribute 'nothing'"):
        _ = kvgraft.nothing


def test_a_module_says_why_it_exists() -> None:
    assert [module.name for module in everything() if not ast.get_docstring(module.tree)] == []


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands as a statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str):
                yield node.lineno, text


def test_a_docstring_begins_with_its_subject_or_a_verb() -> None:
    found = [
        f"{module.path}:{line}"
        for module in everything()
        for line, text in docstrings(module.tree)
        if re.match(r"\s*(What|Whatever|Who|Whoever|Whose|That which)\b", text)
    ]
    assert found == [], "a docstring's first word is a noun or a verb, not a question"


def test_every_distribution_says_that_it_is_typed() -> None:
    for source in (CORE, *PLUGINS):
        (package,) = (path for path in source.iterdir() if (path / "__init__.py").exists())
        assert (package / "py.typed").exists()


NAMED_TUPLES = {"_replace", "_asdict", "_fields"}
"""Methods of named tuples that are public, with an underscore."""


def private_reads(module: Module) -> Iterator[str]:
    """Names with an underscore that a module reads of others than itself."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()") and node.attr not in NAMED_TUPLES:
                yield f"{module.name}:{node.lineno}: {owner}.{node.attr}"


def test_the_guard_reads_no_private_field() -> None:
    guard = [module for module in everything() if module.name.startswith("kvgraft_guard")]
    assert guard
    assert [read for module in guard for read in private_reads(module)] == []
