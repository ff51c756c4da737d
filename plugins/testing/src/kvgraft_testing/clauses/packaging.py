"""Clauses about a component package's declaration and imports (P)."""

from __future__ import annotations

import subprocess
import sys

from kvgraft.errors import ConfigError, ContractViolation, PluginError
from kvgraft.packages.dispatch import parse_options
from kvgraft_testing.clause import clause, expect
from kvgraft_testing.subject import Subject

__all__ = [
    "a_small_mirror_is_right",
    "capabilities_are_as_declared",
    "in_a_fresh_process",
    "it_is_found_by_its_entry_point",
    "it_works_without_a_host_tier",
    "last_line",
    "little_host_memory_serves",
    "loading_it_imports_no_torch",
    "unknown_options_are_refused",
]

TIMEOUT_S = 60


def in_a_fresh_process(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code where nothing is imported yet."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def last_line(text: str) -> str:
    """The last line of a process's output; empty if there is none."""
    return next(iter(reversed(text.strip().splitlines())), "")


def _installed(subject: Subject) -> str | None:
    if subject.plugin.distribution:
        return None
    return "given directly, not installed"


@clause("P1", "The component is found by its entry point.", needs=_installed)
def it_is_found_by_its_entry_point(subject: Subject) -> None:
    from kvgraft.packages.registry import discover

    found = {entry.name: entry for entry in discover()}
    entry = found.get(subject.name)
    expect(
        entry is not None and entry.plugin is not None,
        "P1",
        subject,
        f"no usable entry point; found are {', '.join(sorted(found))}",
    )


LOAD_ALONE = """
import os, sys, traceback, importlib_metadata
from kvgraft.contract import ENTRY_POINT_GROUP

if "torch" in sys.modules:
    sys.exit("torch is imported before any component: by kvgraft, or by Python's start-up")

class Noticed:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            frames = [f for f in traceback.extract_stack()[:-1] if "importlib" not in f.filename]
            at = frames[-1]
            name = os.path.join(*at.filename.split(os.sep)[-2:])
            print(f"torch is imported at load, by {name}, line {at.lineno}: {at.line}")

sys.meta_path.insert(0, Noticed())
name, distribution = sys.argv[1:]
points = importlib_metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
(point,) = [each for each in points if each.dist.name == distribution][:1]
point.load().declare_component()
sys.exit("torch" in sys.modules)
"""
"""Imports one component's package and no other, and names the importer of torch."""


@clause("P2", "Loading and declaring the component imports no torch.", needs=_installed)
def loading_it_imports_no_torch(subject: Subject) -> None:
    done = in_a_fresh_process(LOAD_ALONE, subject.name, subject.plugin.distribution)
    said = last_line(done.stderr) or last_line(done.stdout) or "torch is imported at load"
    expect(done.returncode == 0, "P2", subject, said)


@clause("P7", "An unknown option is refused with its name.")
def unknown_options_are_refused(subject: Subject) -> None:
    name = "no_such_option"
    try:
        parse_options(subject.plugin, {**subject.options, name: 1})
    except PluginError as error:
        expect(name in str(error), "P7", subject, f"refused without the option's name: {error}")
    else:
        raise ContractViolation("P7", subject.name, f"takes the option {name!r}")


def _has_room(subject: Subject) -> str | None:
    if subject.options.get("host_tokens", 1):
        return None
    return "its options leave no host memory"


def _does_without(subject: Subject) -> str | None:
    if subject.home_is_host:
        return "its canonical copy is on HOST"
    return (
        "its options say how much host memory there is"
        if "host_tokens" in subject.options
        else None
    )


@clause("P8", "A host mirror is there exactly if it is declared and has room.", needs=_has_room)
def capabilities_are_as_declared(subject: Subject) -> None:
    for page_size in subject.page_sizes:
        mirror = subject.mount(page_size).component.host
        expect(
            (mirror is not None) == subject.is_mirrored,
            "P8",
            subject,
            f"declares {sorted(subject.plugin.declaration.capabilities)}, its mirror is {mirror}",
        )


@clause("P8", "Without host memory there is no host mirror.", needs=_does_without)
def it_works_without_a_host_tier(subject: Subject) -> None:
    for page_size in subject.page_sizes:
        mirror = subject.mount(page_size, host_pages=0).component.host
        expect(
            mirror is None,
            "P8",
            subject,
            f"pages of {page_size}, host_tokens=0: has a host mirror of "
            f"{mirror.capacity if mirror is not None else 0} slots; leave it out",
        )


FEW_PAGES = (1, 3)
"""Pages of host memory: one, and fewer than there are on DEVICE."""


def _sized_by_the_cache(subject: Subject) -> str | None:
    if not subject.is_mirrored:
        return "the component says that it has no host mirror"
    if "host_tokens" in subject.options:
        return "its options say how much host memory there is"
    return None


@clause(
    "P8",
    "A declared host mirror is there at small sizes too, and takes no more than there is.",
    needs=_sized_by_the_cache,
)
def a_small_mirror_is_right(subject: Subject) -> None:
    for page_size in subject.page_sizes:
        for host_pages in FEW_PAGES:
            try:
                component = subject.mount(page_size, host_pages=host_pages).component
            except PluginError as error:
                if isinstance(error.__cause__, ConfigError):
                    continue  # it says that this is too little for it
                raise
            where = f"pages of {page_size}, host memory of {host_pages}"
            mirror = component.host
            expect(mirror is not None, "P8", subject, f"{where}: declared, and no mirror is there")
            assert mirror is not None
            most = host_pages * component.slots_per_page
            expect(
                mirror.capacity > 0 and (subject.is_state or mirror.capacity <= most),
                "P8",
                subject,
                f"{where}: its mirror has {mirror.capacity} slots, there is room for {most}",
            )


@clause("P8", "Requests are served right with little host memory.", needs=_sized_by_the_cache)
def little_host_memory_serves(subject: Subject) -> None:
    for host_pages in FEW_PAGES:
        subject.serve_with(host_pages)
