"""How a component package presents itself (P)."""

from __future__ import annotations

import subprocess
import sys

from kvgraft.dispatch import parse_options
from kvgraft.errors import ContractViolation, PluginError
from kvgraft.testing.clause import clause, expect
from kvgraft.testing.subject import Subject

__all__ = [
    "capabilities_are_as_declared",
    "in_a_fresh_process",
    "it_is_found_by_its_entry_point",
    "it_works_without_a_host_tier",
    "last_line",
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
    """The last line of what a process printed; empty if there is none."""
    return next(iter(reversed(text.strip().splitlines())), "")


def _installed(subject: Subject) -> str | None:
    if subject.plugin.distribution:
        return None
    return "given directly, not installed"


@clause("P1", "The component is found by its entry point.", needs=_installed)
def it_is_found_by_its_entry_point(subject: Subject) -> None:
    from kvgraft.registry import discover

    found = {entry.name: entry for entry in discover()}
    entry = found.get(subject.name)
    expect(
        entry is not None and entry.plugin is not None,
        "P1",
        subject,
        f"no usable entry point; found are {', '.join(sorted(found))}",
    )


@clause("P2", "Loading and declaring the component imports no torch.", needs=_installed)
def loading_it_imports_no_torch(subject: Subject) -> None:
    script = (
        "import sys; from kvgraft.registry import select; "
        "select(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )
    done = in_a_fresh_process(script, subject.name)
    said = last_line(done.stderr) or "torch is imported at load"
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


@clause("P8", "Without host memory the component works on DEVICE alone.", needs=_does_without)
def it_works_without_a_host_tier(subject: Subject) -> None:
    mounted = subject.mount(subject.page_size, host_pages=0)
    expect(
        mounted.component.host is None or mounted.component.host.capacity > 0,
        "P8",
        subject,
        "has a host mirror of no slots; leave it out",
    )
