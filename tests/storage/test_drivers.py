"""Backends are found by entry point, and refused one by one (P1 to P7)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvgraft.errors import ConfigError
from kvgraft_storage import StorageBackend, discover_storage, open_storage
from kvgraft_storage.command import storage as storage_command

SOUND = """
from kvgraft_storage import StorageDriver, StorageOptions
from kvgraft_testing.storage import MemoryBackend

class Options(StorageOptions):
    capacity: int = 1000

DRIVER = StorageDriver("1.0", "thrown away", Options, lambda place, options: {made})
"""
MEMORY = SOUND.format(made="MemoryBackend(options.capacity)")


class Shelf:
    """A directory on the path that distributions are put into."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def put(self, distribution: str, source: str, name: str = "thrown") -> None:
        module = distribution.replace("-", "_")
        (self.directory / f"{module}.py").write_text(source, encoding="utf-8")
        info = self.directory / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n", encoding="utf-8"
        )
        (info / "entry_points.txt").write_text(
            f"[kvgraft.storage]\n{name} = {module}:DRIVER\n", encoding="utf-8"
        )


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Shelf(tmp_path)


def test_a_backend_is_found_and_opened_with_its_options(shelf: Shelf) -> None:
    shelf.put("store-sound", MEMORY)
    found = {each.name: each for each in discover_storage()}
    assert found["thrown"].problem is None
    assert found["thrown"].distribution == "store-sound"
    assert found["file"].problem is None
    store = open_storage("thrown://host:1/x?capacity=77")
    assert isinstance(store, StorageBackend)
    assert store.stats().capacity_nbytes == 77


def test_two_distributions_with_one_name_are_both_named(shelf: Shelf) -> None:
    shelf.put("store-one", MEMORY)
    shelf.put("store-two", MEMORY)
    with pytest.raises(ConfigError, match=r"published by store-(one|two) and store-(one|two);"):
        open_storage("thrown:x")
    assert {each.name for each in discover_storage() if each.problem is None} >= {"file"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nothing_of_the_sort", "import failed: ModuleNotFoundError"),
        ("raise SystemExit(1)", "import failed: SystemExit: 1"),
        ("DRIVER = 7", "names a int, not a StorageDriver"),
        (MEMORY.replace('"1.0"', '"2.0"'), "written for storage API 2.0, this core has 1.2"),
        (MEMORY.replace('"1.0"', "1.0"), "storage API 1.0 is not MAJOR.MINOR; write a literal"),
        (MEMORY.replace('"thrown away", Options', '"", int'), "are <class 'int'>, not a Storage"),
        (
            MEMORY.replace("    capacity", "    model_config = {'extra': 'ignore'}\n    capacity"),
            "Options must forbid unknown fields",
        ),
        (SOUND.format(made="7"), "opened a int, not a StorageBackend"),
        (SOUND.format(made="1 / 0"), "cannot be opened: ZeroDivisionError: division by zero"),
    ],
)
def test_a_backend_that_cannot_be_used_says_why(shelf: Shelf, source: str, said: str) -> None:
    shelf.put(f"store-broken-{abs(hash(said))}", source)
    with pytest.raises(ConfigError, match="storage 'thrown'") as refused:
        open_storage("thrown:x")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert any(each.name == "file" and each.driver for each in discover_storage())


def test_the_command_lists_backends_their_options_and_broken_ones(shelf: Shelf) -> None:
    shelf.put("store-sound", MEMORY)
    shelf.put("store-broken", "DRIVER = 7", name="crooked")
    told = CliRunner().invoke(storage_command, ["drivers", "--json"])
    assert told.exit_code == 0
    rows = {row["name"]: row for row in json.loads(told.output)}
    assert rows["thrown"]["distribution"] == "store-sound"
    assert rows["thrown"]["options"] == {"capacity": "1000"}
    assert rows["file"]["options"] == {
        "capacity": str(10 << 30),
        "segment": "",
        "refresh_s": "0.2",
        "max_open_files": "",
    }
    assert rows["crooked"]["options"] == {}
    assert "names a int, not a StorageDriver" in rows["crooked"]["status"]
    shown = CliRunner().invoke(storage_command, ["drivers"], env={"COLUMNS": "120"}).output
    assert "crooked: its entry point names a int, not a StorageDriver" in shown
    assert re.search(r"file .* refresh_s=0.2 .*", " ".join(shown.split()))


def test_a_server_that_another_backend_speaks_to_is_said() -> None:
    with pytest.raises(ConfigError, match="give valkey:, which speaks to redis servers"):
        open_storage("redis:localhost:6379")
