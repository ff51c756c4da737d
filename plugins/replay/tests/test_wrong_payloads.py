"""A component whose copies go wrong is found out by the bytes, and the command says so."""

from __future__ import annotations

import json
from pathlib import Path

from tests.commands import KVGRAFT
from tests.packages.distributions import Shelf

SOURCE = """
from kvgraft import (
    HOST_MIRROR, ComponentDeclaration, ComponentOptions, Everything, Kind, Reach, hookimpl
)

@hookimpl
def declare_component():
    return ComponentDeclaration(
        name="thrown", api_version="1.0", kind=Kind.PAGED, summary="copies from the wrong slot",
        options=ComponentOptions, capabilities=frozenset({HOST_MIRROR}),
    )

@hookimpl
def create_component(options, context):
    import torch
    from kvgraft.pools import Component, PlaneSpec, paged_pools

    planes = [PlaneSpec(0, "kv", (context.page_size,), torch.uint8)]
    return Component(Reach(Everything()), *paged_pools(options, context, planes))

@hookimpl
def build_hicache_transfers(component, query):
    from kvgraft import Direction
    from kvgraft.transfers import pair_planes

    copies = pair_planes(component, query)
    if query.direction is Direction.LOAD_BACK:
        n = component.host.capacity
        copies = [copy._replace(source_rows=(copy.source_rows + 1) % n) for copy in copies]
    return copies

@hookimpl
def commit_hicache_transfers(component, query):
    pass

@hookimpl
def abort_hicache_transfers(component, query):
    pass
"""


def test_bytes_that_differ_from_the_stored_ones_count_as_mismatches_and_exit_with_1(
    tmp_path: Path,
) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("kvgraft-thrown", SOURCE)
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
