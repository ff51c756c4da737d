"""`kvgraft new-component`: packages that pass before anyone has changed a line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..cli.refusals import refused
from ..commands import KVGRAFT, ROOT, run
from .asking import expect_kept
from .test_sinks import EXAMPLE
from .workshop import Workshop

KINDS = {"paged": "[b-1024, b)", "state": "state at b"}


def written(kind: str, into: Path, name: str = "my-layers") -> Path:
    done = run(KVGRAFT, "new-component", name, "--kind", kind, "--into", into)
    assert (done.returncode, done.stderr) == (0, "")
    return into / f"kvgraft-{name}"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_passes_the_commands_it_prints(
    workshop: Workshop, kind: str, tmp_path: Path
) -> None:
    printed = workshop.succeeds(f"kvgraft new-component my-layers --kind {kind}", tmp_path)
    change, *commands = printed.partition("next, then search for 'Change:'\n")[2].splitlines()
    assert change.strip() == "cd kvgraft-my-layers"
    package = tmp_path / "kvgraft-my-layers"
    try:
        for command in commands:
            shown = workshop.succeeds(command, package)
            if command.strip() == "kvgraft components":
                assert "my-layers" in shown
        row = workshop.listed()["my-layers"]
        assert (row["distribution"], row["kind"]) == ("kvgraft-my-layers", kind)
        assert (row["status"], row["reach"]) == ("ok", KINDS[kind])
        result = workshop.replayed("my-layers", tmp_path)
        assert result["payloads_verified"] > 0
        assert result["component_hits"]["my-layers"]["device_slots"] > 0
        assert result["component_hits"]["my-layers"]["host_slots"] > 0
    finally:
        workshop.uninstall("kvgraft-my-layers")
    assert "my-layers" not in workshop.listed()


def test_new_packages_and_the_example_keep_every_clause_that_is_asked_of_hooks_and_pools(
    tmp_path: Path,
) -> None:
    """Without the state machine, and without installing them."""
    names = {kind: f"my-{kind}" for kind in KINDS}
    sources = [written(kind, tmp_path, name=name) / "src" for kind, name in names.items()]
    expect_kept([*names.values(), "sinks"], [*sources, EXAMPLE / "src"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_is_clean_and_its_readme_names_its_files_and_options(
    kind: str, tmp_path: Path
) -> None:
    package = written(kind, tmp_path)
    done = run(
        *(sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "100"),
        *("--select", "E,W,F,I,UP,B,C4,D,N,PIE,PT,RET,RUF,SIM", "--ignore", "D102"),
        *("--config", "lint.pydocstyle.convention='google'", package),
    )
    assert done.returncode == 0, done.stdout
    readme = (package / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:src|tests)/\S+|pyproject.toml)`", readme))
    assert len(named) == 5
    assert all((package / name).is_file() for name in named)
    options = (package / "src/kvgraft_my_layers/options.py").read_text(encoding="utf-8")
    fields = set(re.findall(r"^    (\w+): ", options, re.MULTILINE))
    assert fields
    assert fields <= set(re.findall(r"`(\w+)`", readme))
    marked = [path for path in package.rglob("*.py") if "Change:" in path.read_text()]
    assert len(marked) == 4


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_is_strictly_typed(kind: str, tmp_path: Path) -> None:
    package = written(kind, tmp_path)
    done = run(
        *(sys.executable, "-m", "mypy", "--strict", "--cache-dir", ROOT / ".mypy_cache"),
        package / "src",
        MYPYPATH=f"{ROOT / 'core' / 'src'}:{package / 'src'}",
        timeout_s=280,
    )
    assert done.returncode == 0, done.stdout


def test_a_new_package_fits_its_name(tmp_path: Path) -> None:
    package = written("paged", tmp_path / "made" / "too", name="ring2-b")
    text = "".join(path.read_text() for path in package.rglob("*") if path.is_file())
    assert 'name = "kvgraft-ring2-b"' in text
    assert 'ring2-b = "kvgraft_ring2_b:plugin"' in text
    assert "class Ring2BOptions(LayerOptions):" in text
    assert not re.search(r"\{\{|\{%|\}\}", text)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Errors about impossible names and places, each with exit status 2."""
    place = tmp_path_factory.mktemp("refusals")
    (place / "file").write_text("kept")
    (place / "kvgraft-taken").mkdir()
    (place / "kvgraft-taken" / "README.md").write_text("kept")
    arguments = {
        "empty": [""],
        "capitals": ["Ring_Buffer"],
        "digit": ["2ring"],
        "path": ["../ring"],
        "newline": ["ring\n"],
        "prefixed": ["kvgraft-ring"],
        "installed": ["full"],
        "directory": ["taken"],
        "into a file": ["ring", "--into", str(place / "file")],
        "below a file": ["ring", "--into", str(place / "file" / "deeper")],
        "long": ["r" * 300],
    }
    into = ["--into", str(place)]
    before = sorted(place.rglob("*"))
    outcomes = refused(
        {
            case: ["new-component", "--kind", "paged", *into * ("--into" not in rest), *rest]
            for case, rest in arguments.items()
        }
    )
    assert {case: each.status for case, each in outcomes.items()} == dict.fromkeys(arguments, 2)
    assert sorted(place.rglob("*")) == before
    assert (place / "kvgraft-taken" / "README.md").read_text() == "kept"
    return {case: each.errors.replace(str(place), "PLACE") for case, each in outcomes.items()}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("empty", "component name '': give lower-case letters and digits, "),
        ("capitals", "component name 'Ring_Buffer': .* for example 'ring-buffer'"),
        ("digit", "component name '2ring': .* a letter first; for example 'ring'"),
        ("path", r"component name '\.\./ring': "),
        ("newline", r"component name 'ring\\n': "),
        ("prefixed", "component name 'kvgraft-ring': .*; give 'ring'"),
        ("installed", "component name 'full': kvgraft-full publishes it here; choose another"),
        ("directory", "PLACE/kvgraft-taken: is there already and stays as it is"),
        ("into a file", "PLACE/file: is there already"),
        ("below a file", "PLACE/file/deeper: Not a directory; choose another directory"),
        ("long", "File name too long; choose a shorter name$"),
    ],
)
def test_a_name_or_place_that_cannot_be_is_refused_in_one_line(
    refusals: dict[str, str], case: str, message: str
) -> None:
    assert refusals[case].startswith("kvgraft: ")
    assert refusals[case].count("\n") == 1
    assert re.search(message, refusals[case])


def test_it_is_said_how_to_install_kvgraft_where_no_index_has_it(tmp_path: Path) -> None:
    printed = run(KVGRAFT, "new-component", "my-layers", "--into", tmp_path).stdout
    readme = (tmp_path / "kvgraft-my-layers" / "README.md").read_text(encoding="utf-8")
    document = (ROOT / "docs" / "write-a-component.md").read_text(encoding="utf-8")
    for text in (printed, readme, document):
        assert "pip install -r plugins/testing/requirements.txt ./plugins/replay" in text
    assert readme.count("CUDA") == document.count("CUDA") == 1


def test_help_says_that_nothing_is_overwritten_and_paged_is_the_default(
    tmp_path: Path,
) -> None:
    shown = subprocess.run(
        [KVGRAFT, "new-component", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "[paged|state]" in shown
    assert "Nothing is overwritten." in " ".join(shown.split())
    done = run(KVGRAFT, "new-component", "ring", "--into", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "component 'ring', paged; wrote" in done.stdout
