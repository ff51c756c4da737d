"""kvgraft's backend beside SGLang's own `file`: a restart, a damaged page, other weights, full.

PYTHONPATH=DIRECTORY python -m plugins.sglang.tests.engine.compare

DIRECTORY is where `make test-sglang` keeps SGLang's files.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from plugins.sglang.tests.engine.lives import Lives, damage_a_page

N, N_FULL, CAPACITY = 20, 50, 1 << 20
SAVE, FETCH = ["save", 1, N], ["fetch", 1, N]
STORAGE = {"kvgraft": "dynamic", "file": "file"}


def settings(kind: str, directory: Path) -> dict[str, Any]:
    if kind == "kvgraft":
        return {"path": str(directory), "capacity": CAPACITY}
    return {"file_storage_path": str(directory), "max_size": CAPACITY}


def nbytes(directory: Path) -> int:
    """Bytes of its payload files."""
    files = [*directory.glob("*.kvseg"), *directory.glob("*.bin")]
    return sum(each.stat().st_size for each in files)


def compare(live: Lives, kind: str, place: Path) -> None:
    def run(where: str, *steps: list[Any], **more: str) -> list[Any]:
        directory = place / kind / where
        directory.mkdir(parents=True, exist_ok=True)
        return live({**settings(kind, directory), **more}, *steps, storage=STORAGE[kind])

    run("a", SAVE)
    rows = {"started again": run("a", FETCH)[0]}
    rows["other weights of the same name"] = run("a", FETCH, weights="two")[0]
    damage_a_page([*(place / kind / "a").glob("*.kvseg"), *(place / kind / "a").glob("*.bin")][:1])
    rows["a bit of a page turned"] = run("a", FETCH)[0]
    run("b", *(["save", first, N_FULL] for first in range(4)))
    rows["full, the newest of four prompts"] = run("b", ["fetch", 3, N_FULL])[0]
    for scene, (found, fetched, wrong) in rows.items():
        print(f"| {scene} | {kind} | {found} and {fetched} | {wrong} |", flush=True)
    print(f"full, {kind}: {nbytes(place / kind / 'b')} bytes of {CAPACITY}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        lives = Lives(Path(made) / "errors")
        print("| scene | backend | pages found and fetched | with wrong bytes |\n|---|---|---|---|")
        for each in STORAGE:
            compare(lives, each, Path(made))
        lives.close()
