"""`kvgraft doctor`."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import kvgraft
from kvgraft.compiled import is_compiled
from kvgraft_cli.doctor import doctor
from kvgraft_file import FileBackend, FileOptions

from ..commands import KVGRAFT, run_forked
from ..packages.distributions import Shelf


def test_the_installation_is_reported_in_one_page() -> None:
    done = run_forked(KVGRAFT, "doctor", "--json")
    report = json.loads(done.stdout)
    assert report["versions"]["kvgraft"] == kvgraft.__version__
    # an index's own wheels leave the accelerator out of their version
    assert report["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert report["versions"]["build"] == ("compiled" if is_compiled() else "plain")
    assert report["components"].keys() >= {"full", "swa", "mamba", "hisparse"}
    assert report["policies"] == {"density": "ok", "lru": "ok"}
    assert report["storage backends"]["file"] == "ok"
    assert report["commands"]["replay"] == "kvgraft-replay"
    assert "cpu" in report["devices"]
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert report["limits"]["open files and sockets"] == soft


def test_a_torch_for_cuda_that_finds_no_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    done = CliRunner().invoke(doctor, ["--json"])
    found = json.loads(done.output)["devices"]
    assert found["cuda"] == "none found by a torch built for CUDA 12.8"


def test_the_table_says_the_same() -> None:
    report = json.loads(run_forked(KVGRAFT, "doctor", "--json").stdout)
    table = run_forked(KVGRAFT, "doctor", COLUMNS="200").stdout
    for part, rows in report.items():
        assert part in table or not rows
        assert all(name in table for name in rows)


def test_a_store_that_cannot_be_reached_is_reported_and_the_status_is_1(tmp_path: Path) -> None:
    there, missing = tmp_path / "store", tmp_path / "none"
    there.mkdir()
    FileBackend(there, FileOptions()).close()
    done = run_forked(KVGRAFT, "doctor", "--json", f"file:{there}", f"file:{missing}")
    assert done.returncode == 1
    stores = json.loads(done.stdout)["stores"]
    assert stores[f"file:{there}"] == "ok"
    assert "does not exist" in stores[f"file:{missing}"]
    assert done.stderr.startswith(f"kvgraft: file:{missing}: ")
    assert done.stderr.count("\n") == 1
    reached = run_forked(KVGRAFT, "doctor", f"file:{there}")
    assert (reached.returncode, reached.stderr) == (0, "")


def test_a_long_reason_does_not_widen_the_table(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'none'}?capacity={'1' * 500}"
    done = run_forked(KVGRAFT, "doctor", url)
    assert len(done.stderr) > 500
    assert max(map(len, done.stdout.splitlines())) < len(url) + 120


def test_a_broken_package_is_reported_and_the_status_is_1(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("kvgraft-broken", "import nowhere_at_all", name="broken")
    done = shelf.run(KVGRAFT, "doctor", "--json")
    assert done.returncode == 1
    assert "import failed" in json.loads(done.stdout)["components"]["broken"]
