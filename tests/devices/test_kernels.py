"""The kernel without a GPU: its bytes in Triton's interpreter, its accesses in its PTX.

Nothing here shows that a GPU runs it, or how fast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed; `make test-kernels` does it"
)

WIDEST = {"16": "v2.b64", "8": "b64", "4": "b32", "2": "b16", "1": "b8"}
"""By alignment in bytes; two words of 64 bits are the 16 bytes that a thread moves at most."""


def run(*arguments: str, cache: Path, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.devices.interpreted", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), **environ},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kernel_moves_all_bytes_and_none_beside_them(tmp_path: Path) -> None:
    run("copies", cache=tmp_path, TRITON_INTERPRET="1")


@pytest.mark.skipif(
    Version(version("triton") if find_spec("triton") else "0") < Version("3.3"),
    reason="Triton before 3.3 compiles no kernel by itself with these arguments",
)
def test_the_kernel_moves_16_bytes_at_once_where_pieces_allow(tmp_path: Path) -> None:
    found = json.loads(run("ptx", "80", "90", cache=tmp_path))
    assert found.keys() == {"80", "90"}
    for by_alignment in found.values():
        for alignment, accesses in by_alignment.items():
            width = WIDEST[alignment]
            # beside the pieces, three numbers of the table are read
            assert set(accesses["ld"]) == {f"cg.{width}", "b64"}
            assert accesses["st"] == [width]
