"""Arrows point inward: cache → requests → transfers → tree → pools → types."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from kvgraft.cache import Cache
from kvgraft.serving import Serving

from .sources import COMMAND, COMPONENTS, CORE, ENGINES, PLUGINS, REPLAY, STORES, Module, modules

MODULES = modules(CORE)
NAMES = frozenset(module.name for module in MODULES)

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "errors",
        "types",
        "compiled",
        "contract",
        "config",
        "optional",
        "terms",
        "reach",
        "sizes",
        "refusals",
        "stats",
    ),
    ("devices",),
    ("pools", "policies"),
    ("hookspecs",),
    ("tree",),
    ("packages",),
    ("transfers",),
    ("requests",),
    ("parts",),
    ("admission",),
    ("assembly",),
    ("serving",),
    ("cache",),
)
"""A layer imports itself and layers above it in this list."""

PURE = ("tree", "admission.decision")
"""Deciding modules: they know neither memory nor plugins."""

OUTSIDE_PURE = ("pools", "transfers", "packages", "requests", "cache", "hookspecs")

INSIDE_PURE = ("pools.allocator",)
"""Numbers of slots: no memory."""

OPEN_TO_PLUGINS = {
    "kvgraft",
    "kvgraft_cli.cache_options",
    "kvgraft_cli.sizes",
    "kvgraft.config",
    "kvgraft_storage.files",
    "kvgraft.parts",
    "kvgraft.policies",
    "kvgraft.pools",
    "kvgraft.refusals",
    "kvgraft.sizes",
    "kvgraft.stats",
    "kvgraft.transfers",
    "kvgraft_observe.events",
    "kvgraft_observe.tracing",
    "kvgraft_scheduling",
    "kvgraft_storage",
    "kvgraft_storage.stats",
    "kvgraft_testing",
}
"""The modules whose names are a plugin's to use."""

NO_TORCH = [
    "kvgraft",
    "kvgraft.packages.registry",
    "kvgraft.hookspecs",
    "kvgraft.contract",
    *sorted(name for name in NAMES if name.startswith("kvgraft.tree")),
    *(f"kvgraft.{name}" for name in PURE if name != "tree"),
    "kvgraft_full",
    "kvgraft_swa",
    "kvgraft_mamba",
    "kvgraft_hisparse",
]


MOST_LINES = 15_534
"""Of the core's source."""


def room(name: str) -> str:
    """The folder of a module of the core, or the module itself where it stands on top."""
    return name.split(".")[1]


def layer(name: str) -> int:
    first = room(name)
    (found,) = (number for number, members in enumerate(LAYERS) if first in members)
    return found


def running_imports(module: Module) -> set[str]:
    """Modules that a module imports when it runs."""
    return module.imports(known=NAMES)


def imports(module: Module) -> set[str]:
    """The same, with those that only type checkers read."""
    return module.named_imports(known=NAMES)


def test_a_module_imports_only_its_own_layer_and_those_below() -> None:
    wrong = []
    for module in MODULES:
        if module.name == "kvgraft":
            continue
        mine = layer(module.name)
        for imported in sorted(imports(module)):
            if imported == "kvgraft":
                wrong.append(f"{module.name} imports the package's root")
            elif imported.startswith("kvgraft.") and layer(imported) > mine:
                wrong.append(f"{module.name} imports {imported}, which is above it")
    assert wrong == []


def test_the_core_stays_small() -> None:
    """The number may only fall: a feature that not every cache needs is a package."""
    lines = sum(len(module.path.read_text(encoding="utf-8").splitlines()) for module in MODULES)
    assert lines <= MOST_LINES


def test_the_core_imports_no_package_of_a_part() -> None:
    for module in MODULES:
        foreign = {each for each in imports(module) if each.startswith("kvgraft_")}
        assert not foreign, f"{module.name} imports {sorted(foreign)}"


def test_a_package_imports_only_packages_that_its_metadata_names() -> None:
    wrong = []
    for source in PLUGINS:
        metadata = (source.parent / "pyproject.toml").read_text(encoding="utf-8")
        own = source.parent.name
        for module in modules(source):
            for imported in module.imports(known=frozenset()):
                package = re.match(r"kvgraft_([a-z0-9]+)", imported)
                if package is None or package[1] == own:
                    continue
                if f'"kvgraft-{package[1]}' not in metadata:
                    wrong.append(f"{module.name} imports {imported}")
    assert wrong == []


def test_deciding_modules_import_neither_memory_nor_plugins() -> None:
    for module in MODULES:
        if not module.name.startswith(tuple(f"kvgraft.{name}" for name in PURE)):
            continue
        for imported in module.imports(known=NAMES):
            inner = imported.removeprefix("kvgraft.")
            outside = inner.startswith(OUTSIDE_PURE) and inner not in INSIDE_PURE
            assert not outside, f"{module.name} imports {imported}"


def test_rooms_import_one_another_in_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        if module.name != "kvgraft":
            graph.setdefault(room(module.name), set()).update(
                room(name) for name in imports(module) & NAMES - {"kvgraft"}
            )
    for name, imported in graph.items():
        imported.discard(name)
    while free := [name for name, imported in graph.items() if not imported & graph.keys()]:
        for name in free:
            del graph[name]
    assert not graph


def test_modules_import_one_another_in_no_circle_when_they_run() -> None:
    graph = {
        module.name: running_imports(module) & NAMES - {module.name, "kvgraft"}
        for module in MODULES
        if module.name != "kvgraft"
    }
    while free := [name for name, imported in graph.items() if not imported & graph.keys()]:
        for name in free:
            del graph[name]
    assert not graph


@pytest.mark.parametrize("source", [*COMPONENTS, *STORES], ids=lambda path: path.parent.name)
def test_a_component_or_store_package_imports_only_public_modules_and_no_other_package(
    source: object,
) -> None:
    mine = modules(source)  # type: ignore[arg-type]
    own = frozenset(module.name for module in mine)
    for module in mine:
        for imported in module.imports(known=own | NAMES):
            if imported.startswith("kvgraft"):
                allowed = imported in own or imported in OPEN_TO_PLUGINS
                assert allowed, f"{module.name} imports {imported}"


@pytest.mark.parametrize("source", ENGINES, ids=lambda path: path.parent.name)
def test_an_engine_imports_only_public_modules_and_component_packages(source: object) -> None:
    mine = modules(source)  # type: ignore[arg-type]
    own = frozenset(module.name for module in mine)
    packages = tuple(f"{path.name}." for each in COMPONENTS for path in each.glob("kvgraft_*"))
    # metrics, hints and images of a server
    packages += ("kvgraft_observe.", "kvgraft_retention.", "kvgraft_identity.")
    if "kvgraft_dynamo" in own:  # the engine that a fleet's worker runs, and its hand-over
        packages += ("kvgraft_transformers.", "kvgraft_nixl")
    for module in mine:
        for imported in module.imports(known=own | NAMES):
            if imported.startswith("kvgraft"):
                allowed = imported in own or imported in OPEN_TO_PLUGINS
                allowed = allowed or imported.startswith(packages)
                assert allowed, f"{module.name} imports {imported}"


def test_the_command_and_replay_import_the_core_and_no_other_package() -> None:
    """Replay takes its options from the command's, writes files as stores do, has a line of those
    that wait, and sizes pools in bytes.
    """
    command = frozenset(module.name for module in modules(COMMAND))
    command |= {"kvgraft_storage.files", "kvgraft_scheduling.waiting", "kvgraft_arena.sizing"}
    command |= {"kvgraft_storage.settings", "kvgraft_retention.settings"}
    for mine, known in ((modules(COMMAND), command), (modules(REPLAY), command)):
        own = known | {module.name for module in mine}
        for module in mine:
            for imported in module.imports(known=own | NAMES):
                if imported.startswith("kvgraft"):
                    assert imported in own | NAMES, f"{module.name} imports {imported}"


def test_light_modules_run_without_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {NO_TORCH!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_finding_and_declaring_components_loads_no_torch() -> None:
    code = (
        "import sys; from kvgraft.packages.registry import discover\n"
        "assert {each.status for each in discover()} == {'ok'}\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_core_names_no_component() -> None:
    named = re.compile(r"\b(swa|mamba|hisparse|sliding_window|kvgraft_(full|swa|mamba|hisparse))\b")
    found = [
        f"{path.relative_to(CORE)}:{number}: {line.strip()}"
        for path in sorted((CORE / "kvgraft").rglob("*"))
        if path.suffix in (".py", ".j2", ".html", ".css", ".js")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if named.search(line)
    ]
    assert not found


def test_deciding_modules_read_no_clock_and_draw_no_random_number() -> None:
    """Recency is counted (T12), and equal states decide equally (D1)."""
    for module in MODULES:
        if module.name.startswith(("kvgraft.tree", "kvgraft.admission")):
            clocks = module.imports(known=NAMES) & {"time", "random", "datetime", "uuid", "secrets"}
            assert not clocks, f"{module.name} imports {sorted(clocks)}"


def test_the_cache_is_one_class_above_the_one_that_is_compiled() -> None:
    assert Cache.__mro__ == (Cache, Serving, object)
