"""Build hook of hatchling: compiles the modules that serving spends its time in, with mypyc.

For the core, and for packages of parts that name it in their `pyproject.toml`. Off unless asked
for, so `pip install` from source, editable or not, needs no compiler:

    HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 pip wheel ./core

Each wheel is compiled by itself: a part's reads classes of the core as Python does, and works with
either build of it. It has the extension modules beside the Python files they are made of, and is
for this platform and Python alone.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = "src"


class CompiledBuild(BuildHookInterface):
    """Adds extension modules to a wheel.

    Settings: `modules`, patterns of the files to compile, and `except`, files among those to leave
    out, if any; `opt-level`, of the C compiler, unless KVGRAFT_OPT_LEVEL says another; `needs`,
    distributions that the compiled wheel depends on as well, if any.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; nothing happens for an editable installation."""
        if version == "editable":
            return
        self._objects = TemporaryDirectory(prefix="kvgraft-build-")
        for built in self._compile(Path(self._objects.name)):
            path = built.relative_to(Path(self._objects.name, "lib"))
            build_data["force_include"][str(built)] = path.as_posix()
        for name in self.config.get("needs", []):
            build_data["dependencies"].append(f"{name}>={metadata.version(name)}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact: str) -> None:
        """The wheel is written."""
        if version != "editable":
            self._objects.cleanup()

    def _compile(self, into: Path) -> list[Path]:
        """The extension modules, below `into/lib` where they belong in the wheel."""
        from mypyc.build import mypycify
        from setuptools import Distribution

        sources = Path(self.root, SOURCES)
        found = {each for pattern in self.config["modules"] for each in sources.glob(pattern)}
        files = {each.relative_to(sources).as_posix() for each in found}
        modules = sorted(files.difference(self.config.get("except", [])))
        before = os.getcwd()
        os.chdir(sources)  # module names follow from paths relative to here
        try:
            extensions = mypycify(
                [f"--config-file={self.root}/pyproject.toml", *modules],
                opt_level=os.environ.get("KVGRAFT_OPT_LEVEL", str(self.config["opt-level"])),
                debug_level="0",
                multi_file=True,  # so that several processors share the work
                target_dir=str(into / "c"),
                group_name=self.metadata.name.replace("-", "_"),
            )
            for each in extensions:
                # calls between its files go straight to the function then
                each.extra_compile_args += ["-Wno-error", "-fvisibility=hidden"]
            compiling = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
            compiling.build_lib = str(into / "lib")
            compiling.build_temp = str(into / "objects")
            compiling.parallel = os.cpu_count()
            compiling.ensure_finalized()
            compiling.run()
        finally:
            os.chdir(before)
        return sorted(Path(into, "lib").rglob("*.so"))
