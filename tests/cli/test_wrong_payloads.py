"""A component whose copies go wrong is found out by the bytes, and the command says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..commands import KVGRAFT
from ..registry.distributions import COMPONENT, Shelf

SWAPPING = COMPONENT.replace("return Component(Reach(Everything()), device)", "return build(device, planes, context)").replace(
    "paged_pools(options, context, planes)", "paged_pools(options, context, planes)"
) + '''

def build(device, planes, context):
    from kvgraft.pools import Component, HostMirror

    return Component(Reach(Everything()), device, HostMirror(planes, context.host_tokens // context.page_size))

@hookimpl
def build_hicache_transfers(component, query):
    """Reads each load-back from the slot next to the right one."""
    from kvgraft.transfers import pair_planes

    copies = pair_planes(component, query)
    if query.direction.value == "load_back":
        copies = [copy._replace(source_rows=(copy.source_rows + 1) % component.host.capacity)
                  for copy in copies]
    return copies

@hookimpl
def commit_hicache_transfers(component, query):
    pass

@hookimpl
def abort_hicache_transfers(component, query):
    pass
'''  # fmt: skip


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_bytes_that_are_not_what_was_stored_count_as_mismatches_and_exit_with_1(
    shelf: Shelf, tmp_path: Path
) -> None:
    source = SWAPPING.replace(
        "options=ComponentOptions,",
        'options=ComponentOptions, capabilities=frozenset({"host_mirror"}),',
    )
    shelf.put(
        "kvgraft-thrown",
        source.replace("{name!r}", "'thrown'").replace("{{", "{").replace("}}", "}"),
    )
    result = tmp_path / "result.json"
    done = shelf.run(
        *(KVGRAFT, "replay", "--synthetic", "chat", "--requests", "60", "--component", "thrown"),
        *("--device-tokens", "40000", "--host-tokens", "400000", "--load-policy", "always"),
        *("--json", str(result)),
    )
    counts = json.loads(result.read_text())
    assert counts["load_backs"]["completed"] > 0
    assert counts["payload_mismatches"] > 0
    assert counts["ledger_violations"] == counts["out_of_memory"] == 0
    assert done.returncode == 1
    assert done.stderr == f"kvgraft: {counts['first_problem']}\n"
    assert "thrown" in counts["first_problem"]
