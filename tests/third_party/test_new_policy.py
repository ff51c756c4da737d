"""`kvgraft new-policy`: a package that passes before anyone has changed a line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ..cli.refusals import refused
from ..commands import KVGRAFT, ROOT, run, run_forked
from ..packaging.conftest import built_wheels
from .workshop import Workshop

NAME = "my-policy"


def written(into: Path, name: str = NAME) -> Path:
    done = run_forked(KVGRAFT, "new-policy", name, "--into", into)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"eviction policy {name!r}; wrote" in done.stdout
    return into / f"kvgraft-{name}"


def metadata(package: Path) -> Path:
    """A directory with the metadata that an installer would make of its pyproject.toml."""
    text = (package / "pyproject.toml").read_text(encoding="utf-8")
    (points,) = re.findall(r'entry-points\."(kvgraft\.policies)"\]\n(.+)\n', text)
    place = package / "installed"
    directory = place / f"{package.name.replace('-', '_')}-0.1.0.dist-info"
    directory.mkdir(parents=True)
    (directory / "METADATA").write_text(f"Name: {package.name}\nVersion: 0.1.0\n")
    (directory / "entry_points.txt").write_text(f"[{points[0]}]\n{points[1]}\n".replace('"', ""))
    return place


def test_a_new_package_passes_its_tests_and_is_found_by_name(tmp_path: Path) -> None:
    """Without installing it."""
    package = written(tmp_path)
    path = f"{package / 'src'}:{metadata(package)}"
    done = run_forked("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=package, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
    replay = (KVGRAFT, "replay", "--synthetic", "chat", "--requests", "20", "--component", "full")
    shown = run_forked(
        *replay, "--device-tokens", "20k", "--policy", f"lru,{NAME}", PYTHONPATH=path
    )
    assert shown.returncode == 0, shown.stderr
    assert NAME in shown.stdout


@pytest.mark.long
def test_a_new_package_passes_the_commands_it_prints(
    workshop: Workshop, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    full = "kvgraft-full"
    workshop.wheels[full] = built_wheels(tmp_path_factory)[full]
    workshop.install(full)
    printed = workshop.succeeds(f"kvgraft new-policy {NAME}", tmp_path)
    change, *commands = printed.partition("next, then search for 'Change:'\n")[2].splitlines()
    assert change.strip() == f"cd kvgraft-{NAME}"
    try:
        for command in commands:
            shown = workshop.succeeds(command, tmp_path / f"kvgraft-{NAME}", contract="")
        assert NAME in shown
    finally:
        workshop.uninstall(f"kvgraft-{NAME}")
        workshop.uninstall(full)


def test_a_new_package_is_clean_and_its_readme_names_its_files(tmp_path: Path) -> None:
    package = written(tmp_path)
    done = run(
        *(sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "100"),
        *("--select", "E,W,F,I,UP,B,C4,D,N,PIE,PT,RET,RUF,SIM", "--ignore", "D10"),
        *("--config", "lint.pydocstyle.convention='google'"),
        cwd=package,
    )
    assert done.returncode == 0, done.stdout
    readme = (package / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:src|tests)/\S+|pyproject.toml)`", readme))
    assert len(named) == 3
    assert all((package / name).is_file() for name in named)
    marked = [path for path in package.rglob("*") if path.suffix in (".py", ".toml")]
    assert sum("Change:" in path.read_text() for path in marked) == 3
    assert not re.search(r"\{\{|\{%|\}\}", "".join(path.read_text() for path in marked))


@pytest.mark.long
def test_a_new_package_is_strictly_typed(tmp_path: Path) -> None:
    package = written(tmp_path)
    done = run(
        *(sys.executable, "-m", "mypy", "--strict", "--cache-dir", ROOT / ".mypy_cache"),
        package / "src",
        MYPYPATH=f"{ROOT / 'core' / 'src'}:{package / 'src'}",
        timeout_s=280,
    )
    assert done.returncode == 0, done.stdout


def test_a_name_that_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "kvgraft-taken").mkdir()
    messages = {
        "lru": "policy name 'lru': kvgraft publishes it here; choose another",
        "density": "policy name 'density': kvgraft-density publishes it here; choose another",
        "My_Policy": "policy name 'My_Policy': .* for example 'my-policy'",
        "kvgraft-mine": "policy name 'kvgraft-mine': .*; give 'mine'",
        "taken": f"{tmp_path}/kvgraft-taken: is there already and stays as it is",
    }
    outcomes = refused({name: ["new-policy", name, "--into", str(tmp_path)] for name in messages})
    for name, message in messages.items():
        assert outcomes[name].status == 2
        assert re.fullmatch(f"kvgraft: {message}.*\n", outcomes[name].errors)
    assert [path.name for path in tmp_path.iterdir()] == ["kvgraft-taken"]
