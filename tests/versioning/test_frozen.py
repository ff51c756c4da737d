"""Components written for older APIs work on this core, and are unchanged since then."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import Any

import pytest

from kvgraft import API_VERSION, Cache, Tier, TokenKey
from kvgraft.packages.registry import discover

from .serving import serve
from .surface import FROZEN

DIGESTS = {
    "1.0": "85ac96508ddb3195c20efd703c2ff244b6e11ef5beab5431e255abac468ad26c",
    "1.1": "7a3137fe9a33132ddb551a3e326a1bf8b89d8f6c165bdc63c073ac6fbafe738f",
}
"""Of every file of a version's directory. A line is added for a new version, none is changed."""

SETTINGS: dict[str, Any] = {"page_size": 4, "device_tokens": 64, "host_tokens": 128, "load": None}


def digest(version: str) -> str:
    """SHA-256 over names and contents of a directory's files, compiled ones left out."""
    total = hashlib.sha256()
    directory = FROZEN / version
    for path in sorted(directory.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            name = path.relative_to(directory).as_posix()
            total.update(f"{name} {len(content)}\n".encode() + content)
    return total.hexdigest()


@pytest.mark.parametrize("version", DIGESTS)
def test_frozen_files_are_unchanged(version: str) -> None:
    found = digest(version)
    assert found == DIGESTS[version], (
        f"a file below {FROZEN / version} was edited; it stands for components written for API "
        f"{version} and cannot be changed: undo, and make this core work with it (now {found})"
    )


def test_every_frozen_version_has_its_digest() -> None:
    assert {path.name for path in FROZEN.iterdir()} == DIGESTS.keys()
    assert API_VERSION in DIGESTS


@pytest.mark.usefixtures("frozen_1_0")
def test_components_written_for_1_0_are_found_and_can_be_used() -> None:
    found = {each.name: each for each in discover() if each.distribution == "kvgraft-frozen"}
    assert found.keys() == {"frozen_pages", "frozen_states"}
    assert {each.status for each in found.values()} == {"ok"}


@pytest.mark.usefixtures("frozen_1_0")
@pytest.mark.parametrize(
    "beside", [(), ("frozen_states",), ("frozen_states", "swa"), ("mamba", "hisparse")]
)
def test_a_component_written_for_1_0_serves_evicts_and_loads_back(beside: tuple[str, ...]) -> None:
    options = {"hisparse": {"hot_tokens": 4, "max_running": 4}, "swa": {"window": 6}}
    names = ("frozen_pages", *beside)
    cache = Cache.open({name: options.get(name, {}) for name in names}, **SETTINGS)
    try:
        _serve_evict_load_back(cache)
    finally:
        cache.close()


@pytest.mark.usefixtures("frozen_1_1")
@pytest.mark.parametrize("beside", [(), ("full", "mamba")])
def test_a_component_written_for_1_1_serves_with_a_reach_of_its_own(
    beside: tuple[str, ...],
) -> None:
    cache = Cache.open(["frozen_terms", *beside], **SETTINGS)
    try:
        first = TokenKey(range(100, 122))
        assert serve(cache, first, decode=[7, 8, 9]).anchor == 0
        again = TokenKey(first.tokens().tolist())
        assert serve(cache, again, decode=[10]).device >= 20
        assert cache.drain()
        for each in cache.mounted:
            cache.evict(each.name, each.component.device.capacity)
        longer = TokenKey([*again.tokens().tolist(), 50, 51, 52, 53, 54])
        assert serve(cache, longer).anchor >= 20
        cache.check_integrity()
    finally:
        cache.close()


def _serve_evict_load_back(cache: Cache) -> None:
    (pages,) = (each.component for each in cache.mounted if each.name == "frozen_pages")
    first = TokenKey(range(100, 122))
    assert serve(cache, first, decode=[7, 8, 9]).anchor == 0
    again = TokenKey(first.tokens().tolist())
    hit = serve(cache, again, decode=[10])
    assert hit.anchor == hit.device >= 20

    # Every device slot is freed: hits afterwards come from HOST.
    assert cache.drain()
    for each in cache.mounted:
        cache.evict(each.name, each.component.device.capacity)
    cache.check_integrity()
    longer = TokenKey([*again.tokens().tolist(), 50, 51, 52, 53, 54])
    loaded = serve(cache, longer)
    assert loaded.device == 0
    assert loaded.anchor >= 20

    # A branch, an abort, and more traffic than fits.
    serve(cache, TokenKey([*range(100, 112), *range(200, 210)]))
    dropped = cache.begin(TokenKey(range(100, 130)))
    assert cache.admit(dropped).admitted
    cache.abort(dropped)
    for start in range(300, 800, 100):
        serve(cache, TokenKey(range(start, start + 30)), decode=[1, 2])
        cache.check_integrity()
    assert cache.drain()

    assert cache.evict("frozen_pages", 1, Tier.HOST) >= 1
    cache.check_integrity()
    assert not cache.requests
    assert pages.held == []  # type: ignore[attr-defined]
    assert pages.moving == 0  # type: ignore[attr-defined]
    asked = pages.calls.keys() - {"abort_hicache_transfers"}  # type: ignore[attr-defined]
    assert asked == {
        "finalize_match_result",
        "acquire_component_lock",
        "release_component_lock",
        "build_hicache_transfers backup",
        "build_hicache_transfers load_back",
        "commit_hicache_transfers",
        "budget_contribution",
    }


@pytest.mark.usefixtures("frozen_1_0")
def test_a_component_written_for_1_0_is_notified_when_a_copy_fails() -> None:
    """Its `abort_hicache_transfers` runs, and the cache goes on."""
    from kvgraft import CacheConfig
    from kvgraft_testing.stepped import SteppedTransferEngine

    engine = SteppedTransferEngine()
    settings = {**SETTINGS, "write_policy": "write-through"}
    cache = Cache(CacheConfig(components={"frozen_pages": {}}, **settings), transfers=engine)
    pages = cache.mounted[0].component
    request = cache.begin(TokenKey(range(12)))
    assert cache.admit(request).admitted
    assert cache.allocate(request, 12)
    cache.computed(request, 12)
    cache.finish(request)
    while engine.pending:
        engine.fail(0)
    cache.poll()
    cache.check_integrity()
    assert pages.calls["abort_hicache_transfers"] >= 1  # type: ignore[attr-defined]
    assert pages.moving == 0  # type: ignore[attr-defined]


def test_finding_the_frozen_components_loads_no_torch() -> None:
    code = (
        "import sys; from kvgraft.packages.registry import select\n"
        "assert len(select(['frozen_pages', 'frozen_states'])) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(FROZEN / "1.0"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
