"""A cache imports only the parts that its configuration names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from kvgraft.optional import PARTS, PARTS_GROUP, load_part, published

from ..commands import ROOT
from .sources import CORE, modules

NOT_TO_SERVE = (
    *("kvgraft_storage.", "kvgraft_guard.", "kvgraft_testing.", "kvgraft_observe."),
    *(
        "kvgraft_identity.",
        "kvgraft_ranks.",
        "kvgraft_retention.",
        "kvgraft_arena.",
        "kvgraft_accelerator.",
        "kvgraft_cli.",
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


def folders(part: str) -> list[str]:
    """The packages that bring a part, as its message names them; the last one is the part's."""
    (first, *others) = PARTS[part]
    if not first.endswith(".txt"):
        return [first, *others]
    lines = (ROOT / first).read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("./") for line in lines if line.startswith("./plugins/")]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_found_by_its_entry_point(part: str) -> None:
    assert callable(load_part(part))
    (brought,) = (each for each in published(PARTS_GROUP) if each.name == part)
    assert folders(part)[-1] == f"plugins/{brought.distribution.removeprefix('kvgraft-')}"


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_named_with_all_packages_that_it_needs(part: str) -> None:
    """pip finds none of ours by itself, so the message lists them."""
    *before, last = folders(part)
    metadata = (ROOT / last / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = metadata.partition("\ndependencies = [")[2].partition("]")[0]
    needed = set(re.findall(r'"kvgraft-([a-z0-9]+)>=', dependencies))
    assert {f"plugins/{name}" for name in needed} == {*before}


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
        "kvgraft.pools",
    }


MOST_MODULES = 70
"""Of the core, for full attention alone. The number may only fall."""


def test_a_cache_of_full_attention_loads_few_modules() -> None:
    code = (
        "import sys; from kvgraft import Cache\n"
        "Cache.open(['full'], device_tokens=4096).close()\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    loaded = [each for each in done.stdout.split() if f"{each}.".startswith("kvgraft.")]
    assert len(loaded) <= MOST_MODULES


def test_a_cache_imports_no_component_that_it_does_not_name() -> None:
    code = (
        "import sys; from kvgraft import Cache\n"
        "Cache.open(['full'], device_tokens=4096).close()\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    ours = {name.removesuffix("__mypyc") for name in loaded if name.startswith("kvgraft")}
    assert ours == {"kvgraft", "kvgraft_density", "kvgraft_full", "kvgraft_scheduling"}


STEP = """
import sys
from kvgraft import Cache, TokenKey

cache = Cache.open(["full"], device_tokens=4096)
requests = [cache.begin(TokenKey(range(each, each + 100)), reserve=8) for each in range(2)]
for request in requests:
    assert cache.admit(request).admitted
opened = set(sys.modules)
assert requests[0].pending is None
cache.step(requests, n_tokens=100)
print(*set(sys.modules) - opened)
"""
"""The first pass of an engine; prints the modules that it loads."""


def test_the_first_step_of_an_engine_loads_no_module() -> None:
    """They are loaded with the cache: finding and importing a part takes tens of milliseconds."""
    done = subprocess.run(
        [sys.executable, "-c", STEP], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
