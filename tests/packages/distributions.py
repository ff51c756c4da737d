"""Throw-away distributions: a module and a dist-info directory on a path of their own."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from ..commands import run, run_forked

__all__ = ["COMPONENT", "Shelf"]

COMPONENT = """
from kvgraft import ComponentDeclaration, ComponentOptions, Everything, Kind, Reach, hookimpl

@hookimpl
def declare_component():
    return ComponentDeclaration(
        name={name!r}, api_version="1.0", kind=Kind.PAGED, summary="thrown away after the test",
        options=ComponentOptions,
    )

@hookimpl
def create_component(options, context):
    import torch
    from kvgraft.pools import Component, PlaneSpec, paged_pools

    planes = [PlaneSpec(0, "kv", (context.page_size,), torch.uint8)]
    device, _ = paged_pools(options, context, planes)
    return Component(Reach(Everything()), device)
"""
"""A whole component; `.format(name=...)` it, and change the part under test."""

DISCOVER = """
import json
from kvgraft.packages.registry import discover
print(json.dumps({each.name: [each.distribution, each.version, each.problem]
                  for each in discover()}))
"""


class Shelf:
    """A directory on `sys.path` holding distributions.

    Args:
        directory: where to put them.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def put(
        self,
        distribution: str,
        source: str,
        *,
        name: str = "thrown",
        module: str | None = None,
        version: str = "2.1",
        group: str = "kvgraft.components",
        member: str = "",
    ) -> None:
        """Install a distribution publishing one component, as an installer leaves it.

        With another `group` it publishes the module's `member` there.
        """
        module = module or distribution.replace("-", "_")
        (self.directory / f"{module}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        info = self.directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", encoding="utf-8"
        )
        (info / "entry_points.txt").write_text(
            f"[{group}]\n{name} = {module}{member and ':'}{member}\n", encoding="utf-8"
        )

    @property
    def path(self) -> str:
        """A `PYTHONPATH` on which the shelf comes first."""
        return os.pathsep.join(filter(None, (str(self.directory), os.environ.get("PYTHONPATH"))))

    def run(self, *arguments: str, COLUMNS: str | None = "100") -> CompletedProcess[str]:  # noqa: N803
        """`run_forked`, where the shelf is seen first."""
        return run_forked(*arguments, PYTHONPATH=self.path, COLUMNS=COLUMNS)

    def start(self, *arguments: str) -> CompletedProcess[str]:
        """The same in a Python that is started for it."""
        return run(sys.executable, *arguments, PYTHONPATH=self.path)

    def discovered(self) -> dict[str, list[Any]]:
        """Name to distribution, version and problem, as another process finds them."""
        done = self.run("-c", DISCOVER)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def problem(self, name: str = "thrown") -> str:
        """Why a component cannot be used; empty if it can."""
        return self.discovered()[name][2] or ""
