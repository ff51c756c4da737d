"""Every subset of the component distributions works, and removed ones are gone (P1).

One environment goes from subset to subset as an administrator would: by installing and removing
wheels, one at a time in the long tests.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from ..commands import ROOT, run
from ..documents.test_links_and_blocks import blocks
from .conftest import Environment, with_needs

COMPONENTS = ("full", "swa", "mamba", "hisparse")

PROBE = r"""
import contextlib, importlib, importlib.metadata, importlib.util, io, json, runpy, sys
from pathlib import Path

OPTIONS = {"swa": {"window": 32}, "hisparse": {"hot_tokens": 32, "max_running": 4}}
command, installed, removed = sys.argv[1], *map(json.loads, sys.argv[2:])


def kvgraft(*arguments):
    # The installed script, in this process: importing torch once is most of the time it takes.
    sys.argv = [command, *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(command, run_name="__main__")
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
    return status, out.getvalue(), err.getvalue()


def serve(cache, key, decode):
    request = cache.begin(key, reserve=decode)
    assert cache.admit(request).admitted
    cache.load_back(request)
    assert cache.drain() and not request.load_failed
    found = [request.anchor_tokens, request.device_tokens]
    while request.computed < request.prompt:
        step = cache.next_chunk(request)
        assert step and cache.allocate(request, step)
        cache.computed(request, step)
    for token in range(decode):
        key.extend([token])
        assert cache.allocate(request, 1)
        cache.computed(request, 1)
    cache.finish(request)
    assert cache.drain()
    if importlib.util.find_spec("kvgraft_guard"):
        cache.check_integrity()
    return found


def hits():
    from kvgraft import Cache, TokenKey

    components = {name: OPTIONS.get(name, {}) for name in installed}
    cache = Cache.open(
        components, page_size=16, device_tokens=4096, host_tokens=4096, load=None
    )
    key = TokenKey(range(100))
    found = [serve(cache, key, 4)]
    key.extend(range(1000, 1060))
    found.append(serve(cache, key, 4))
    for each in cache.mounted:
        cache.evict(each.name, each.component.device.capacity)
    key.extend(range(2000, 2020))
    found.append(serve(cache, key, 0))
    cache.close()
    return {"mounted": sorted(each.name for each in cache.mounted), "found": found}


def remains(name):
    module = f"kvgraft_{name}"
    left = [str(path) for place in sys.path for path in Path(place).glob(f"{module}*")]
    if importlib.util.find_spec(module) is not None:
        left.append(f"import {module}")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        left.append(str(importlib.metadata.distribution(f"kvgraft-{name}")))
    return left


print(json.dumps({
    "components": kvgraft("components", "--json"),
    "served": hits() if installed else None,
    "imported": [importlib.import_module(f"kvgraft_{name}").__name__ for name in installed],
    "refused": {
        name: kvgraft("replay", "--synthetic", "chat", "--component", name) for name in removed
    },
    "remains": [line for name in removed for line in remains(name)],
}))
"""


def subset(number: int) -> tuple[str, ...]:
    """The subset with a number in Gray's code: its neighbours differ by one component."""
    code = number ^ number >> 1
    return tuple(name for bit, name in enumerate(COMPONENTS) if code >> bit & 1)


SUBSETS = [subset(number) for number in range(2 ** len(COMPONENTS))]

QUICK = [("full",)]
"""One alone: the others are met in the long tests, all together in `test_build` as well."""


class Administrator:
    """Brings one environment from subset to subset."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.installed: set[str] = set()
        (environment.directory / "probe.py").write_text(PROBE, encoding="utf-8")

    def change_to(self, subset: set[str]) -> None:
        """Install missing distributions and remove surplus ones."""
        components = (f"kvgraft-{name}" for name in subset)
        self.environment.change_to(*with_needs("kvgraft-replay", *components))
        self.installed = subset

    def probe(self) -> dict[str, Any]:
        """The findings of a process in the environment, away from the source tree."""
        directory = self.environment.directory
        removed = sorted(set(COMPONENTS) - self.installed)
        done = run(
            *(self.environment.python, "-I", "probe.py", directory / "bin" / "kvgraft"),
            *(json.dumps(sorted(self.installed)), json.dumps(removed)),
            cwd=directory,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.fixture
def administrator(shared_environment: Environment) -> Administrator:
    return Administrator(shared_environment)


def test_each_step_of_the_walk_changes_one_distribution_and_all_are_changed() -> None:
    sets = [frozenset(names) for names in SUBSETS]
    assert len(set(sets)) == 2 ** len(COMPONENTS)
    assert all(len(one ^ other) == 1 for one, other in itertools.pairwise(sets))


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [pytest.param(names, marks=() if names in QUICK else pytest.mark.long) for names in SUBSETS],
    ids=lambda names: "+".join(names) or "none",
)
def test_every_subset_works_and_the_rest_is_gone(
    administrator: Administrator, names: tuple[str, ...]
) -> None:
    administrator.change_to(set(names))
    found = administrator.probe()

    status, out, err = found["components"]
    assert (status, err) == (0, "")
    rows = json.loads(out)
    assert [row["name"] for row in rows] == sorted(names)
    assert {row["status"] for row in rows} <= {"ok"}
    assert found["imported"] == [f"kvgraft_{name}" for name in sorted(names)]

    if names:
        assert found["served"]["mounted"] == sorted(names)
        assert found["served"]["found"] == [[0, 0], [96, 96], [160, 0]]

    installed = ", ".join(sorted(names)) or "none"
    assert found["remains"] == []
    assert found["refused"] == {
        name: [
            2,
            "",
            f"kvgraft: component {name!r} is not installed; installed: {installed}; "
            "in a clone of kvgraft, pip install ./plugins/NAME brings its own\n",
        ]
        for name in COMPONENTS
        if name not in names
    }


def test_the_readmes_first_example_runs_on_the_install_it_stands_beside(
    administrator: Administrator,
) -> None:
    """The packages of its `pip install`, and nothing else of ours."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.search(r"^pip install ./core (.*)$", readme, re.MULTILINE)
    assert named is not None
    distributions = [each.replace("./plugins/", "kvgraft-") for each in named[1].split()]
    administrator.environment.change_to("kvgraft", *distributions)
    embedding = next(each.text for each in blocks("python") if each.document == "README.md")
    assert "Cache.open" in embedding
    done = run(administrator.environment.python, "-I", "-c", embedding)
    assert (done.returncode, done.stderr) == (0, "")
    assert "full: accepts" in done.stdout
