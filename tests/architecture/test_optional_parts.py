"""A cache imports only the parts that its configuration names."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module

import pytest

from kvgraft.assembly import OPTIONAL_PARTS

from .sources import CORE, modules

NOT_TO_SERVE = (
    *("kvgraft.storage.", "kvgraft.storage_tier.", "kvgraft.guard.", "kvgraft.testing."),
    *(
        "kvgraft.events.",
        "kvgraft.arena.",
        "kvgraft.devices.accelerator.",
        "kvgraft.devices.simulated.",
        "kvgraft.transfers.streams.",
        "kvgraft.scaffold.",
        "kvgraft.cli.",
    ),
    *("click.", "rich.", "jinja2.", "hypothesis.", "pytest."),
)
"""Packages that a plain cache on the CPU never needs."""

SERVE = """
import sys
from kvgraft import Cache, TokenKey

cache = Cache.open(["full"], device_tokens=4096, host_tokens=4096)
for _ in range(2):
    request = cache.begin(TokenKey(range(1000)), reserve=8)
    assert cache.admit(request).admitted
    cache.load_back(request)
    while request.computed < request.prompt:
        tokens = cache.next_chunk(request)
        cache.allocate(request, tokens)
        cache.computed(request, tokens)
        cache.checkpoint(request)
    cache.finish(request)
cache.poll()
cache.explain(TokenKey(range(1000)))
cache.check_integrity()
cache.close()
print(*sys.modules)
"""
"""Two requests through a cache without storage, without the guard; prints the modules loaded."""


def test_a_plain_cache_serves_without_storage_guard_tests_or_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "kvgraft.cache" in loaded
    assert [name for name in loaded if f"{name}.".startswith(NOT_TO_SERVE)] == []


@pytest.mark.parametrize("part", OPTIONAL_PARTS)
def test_an_optional_part_can_be_built(part: str) -> None:
    module, _, name = OPTIONAL_PARTS[part].partition(":")
    assert callable(getattr(import_module(module), name))


def test_the_core_imports_a_module_by_name_in_few_places() -> None:
    """Elsewhere an `import` statement says it, and the tests of layers see it."""
    found = {
        module.name
        for module in modules(CORE)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
    }
    assert found == {
        "kvgraft",
        "kvgraft.packages.policies",
        "kvgraft.parts_factory",
        "kvgraft.pools",
        "kvgraft.testing",
        "kvgraft.testing.clauses.versions",
    }
