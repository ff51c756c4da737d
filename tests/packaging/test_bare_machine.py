"""The README's first commands on a machine that has plain pip, Python and GNU make, and no more."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..commands import ROOT

DEBOOTSTRAP = shutil.which("debootstrap", path=f"{os.environ['PATH']}:/usr/sbin")
PACKAGES = "python3-venv,make,ca-certificates"
USER = "newcomer"
WHOLE = ("make demo", "make test")

INSIDE = f"""
set -e
cd "$1"
while read -r path; do mount --rbind "$path" "./$path"; done <bound
mount -t proc proc proc
mount --rbind /dev dev
exec chroot . su -l {USER} -c "$2"
"""
"""Runs a command as the user, where the machine's root directory is $1; needs a mount namespace."""


def output(*command: str) -> str:
    """The output of a command; skips where it cannot do its work."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        told = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        pytest.skip(f"{Path(command[0]).name}: {told[-1]}")
    return done.stdout


def mirror() -> tuple[str, str]:
    """The suite of Debian that this machine is, and where its packages come from."""
    release = Path("/etc/os-release").read_text(encoding="utf-8")
    suite = re.search(r"^VERSION_CODENAME=(\w+)$", release, re.MULTILINE)
    if "ID=debian\n" not in release or suite is None:
        pytest.skip("needs Debian")
    targets = output("apt-get", "indextargets", "--format", "$(SITE) $(CODENAME)")
    for site, name in (line.split() for line in targets.splitlines()):
        if name == suite[1]:
            return name, site
    pytest.skip(f"apt has no source for {suite[1]}")


def settings_of_pip() -> tuple[str, list[Path]]:
    """This machine's configuration of pip as one file, and the files and directories it names."""
    sections: dict[str, dict[str, str]] = {}
    for line in output(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, quoted = line.partition("=")
        section, _, key = name.replace(":env:", "global").rpartition(".")
        # a variable of the environment comes first, and is stronger than a file
        sections.setdefault(section, {}).setdefault(key, ast.literal_eval(quoted))
    text = ""
    for section, settings in sections.items():
        text += f"[{section}]\n"
        text += "".join(f"{key} = {' '.join(value.split())}\n" for key, value in settings.items())
    values = (value for settings in sections.values() for value in settings.values())
    named = []
    for word in (word for value in values for word in value.split()):
        # an index refers to files beside it
        named.append(Path(word[7:]).parent if word.startswith("file://") else Path(word))
    return text, [path for path in named if path.is_absolute() and path.exists()]


@pytest.fixture
def machine() -> Iterator[Path]:
    """The root directory of a minimal Debian, with a clean clone of the repository in a home."""
    if DEBOOTSTRAP is None:
        pytest.skip("needs debootstrap")
    if os.geteuid():
        pytest.skip("needs root, as debootstrap does")
    suite, site = mirror()
    with tempfile.TemporaryDirectory(prefix="kvgraft-machine-", ignore_cleanup_errors=True) as at:
        root = Path(at)
        root.chmod(0o755)
        output(DEBOOTSTRAP, "--variant=minbase", f"--include={PACKAGES}", suite, str(root), site)
        settings, named = settings_of_pip()
        (root / "etc/pip.conf").write_text(settings, encoding="utf-8")
        for path in named:
            inside = root / path.relative_to("/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                inside.mkdir(exist_ok=True)
            else:
                inside.touch()
        (root / "bound").write_text("".join(f"{path}\n" for path in named), encoding="utf-8")
        output("chroot", str(root), "useradd", "--create-home", USER)
        home = root / "home" / USER
        output("git", "clone", "-q", str(ROOT), str(home / "kvgraft"))
        output("chroot", str(root), "chown", "-R", f"{USER}:", f"/home/{USER}")
        yield root


def run_inside(machine: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the clone, as the user, with processes and mounts of its own."""
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    return subprocess.run(
        [*apart, "sh", "-c", INSIDE, "sh", str(machine), f"cd kvgraft && {command}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3000,
        check=False,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "NO_COLOR": "1"},
    )


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_demo_and_tests_pass_on_a_minimal_debian(machine: Path) -> None:
    for command in WHOLE:
        done = run_inside(machine, command)
        assert done.returncode == 0, done.stdout[-6_000:]
