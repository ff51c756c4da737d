"""Disk full, directories that cannot be used, files of others."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvgraft.errors import ConfigError
from kvgraft_file.disk import DiskFile, supports_direct
from kvgraft_storage import Status, Storage, open_storage
from kvgraft_storage.command import storage as storage_group
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, stored
from tests.commands import KVGRAFT, run_forked, storage_command

from .store import open_store, segments

OK, MISS, FULL = Status.OK, Status.MISS, Status.FULL
SIZE = 9000


def test_a_full_disk_is_full_and_its_records_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(FINGERPRINT, open_store(tmp_path, 1 << 20, 1 << 16))
    places = addresses(30)
    assert stored(storage, places[:8], SIZE) == [OK] * 8

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert fetched(storage, places[7:8], SIZE) == [OK]
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert stored(storage, places[8:9], 5 * SIZE) == [FULL], "others are dropped for it first"
    assert fetched(storage, places[7:8], SIZE) == [OK]
    assert stored(storage, places[20:22], SIZE) == [OK] * 2, "written over others"
    assert not list(tmp_path.glob(".*.tmp"))
    monkeypatch.undo()
    assert stored(storage, places[8:], SIZE) == [OK] * 22
    assert storage.state is not None
    assert storage.state.value == "closed", "a full disk is no failure"
    assert storage.close()


def test_a_disk_that_fills_while_a_segment_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(FINGERPRINT, open_store(tmp_path))
    places = addresses(6)
    stored(storage, places[:2], SIZE)

    def torn(self: DiskFile, pieces: list[memoryview], offset: int) -> None:
        os.pwritev(self.fd, pieces[:1], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DiskFile, "write", torn)
    assert stored(storage, places[2:4], SIZE) == [FULL, FULL]
    assert fetched(storage, places, SIZE) == [OK, OK, MISS, MISS, MISS, MISS]
    monkeypatch.undo()
    assert stored(storage, places[4:], SIZE) == [OK, OK]
    assert storage.close()
    storage = Storage(FINGERPRINT, open_store(tmp_path))
    assert fetched(storage, places, SIZE) == [OK, OK, MISS, MISS, OK, OK]
    assert storage.close()


def test_a_disk_that_fails_is_down_and_a_place_that_fails_is_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(FINGERPRINT, open_store(tmp_path))
    stored(storage, addresses(1), SIZE)
    told = []
    for code in (errno.EIO, errno.ENODEV):

        def failing(
            self: DiskFile, pieces: list[memoryview], offset: int, code: int = code
        ) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patched:
            patched.setattr(DiskFile, "read", failing)
            told += fetched(storage, addresses(1), SIZE)
            stored(storage, addresses(1), SIZE)
    assert told[0] is Status.CORRUPT
    assert told[1] in (Status.DOWN, MISS)
    assert storage.close()


def test_every_writer_needs_a_segment_and_is_told_full_without_one(tmp_path: Path) -> None:
    stores = [Storage(FINGERPRINT, open_store(tmp_path, 1 << 17, 1 << 16)) for _ in range(3)]
    told = [
        stored(storage, addresses(1, first=number), SIZE)[0]
        for number, storage in enumerate(stores)
    ]
    assert told == [OK, OK, FULL]
    assert all(storage.close() for storage in stores)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; /proc stands in")
def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(ConfigError, match="cannot be written to: Permission denied; give"):
        open_store(tmp_path)


def test_a_directory_that_not_even_root_can_write_to_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/proc cannot be written to: .*; give this user write"):
        open_storage("file:/proc")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file:/nowhere/at/all", "/nowhere/at/all does not exist; create the directory first"),
        ("file:/etc/hostname", "/etc/hostname is no directory; name one"),
        ("file:", "no directory; write file:/path"),
        ("/var/cache", "is not NAME:LOCATION, such as file:"),
        ("fil:/tmp", "'fil' is not installed; installed: file.*; did you mean file?"),
        (
            "file:{0}?capcity=1GiB",
            "no option 'capcity'; did you mean 'capacity'\\? options: capacity, segment",
        ),
        ("file:{0}?capacity=lots", "option capacity='lots' is no size; write for example 256MiB"),
        ("file:{0}?capacity=1", "option capacity='1': give 32768 or more"),
        ("file:{0}?capacity=1GiB&capacity=2GiB", "option 'capacity' is given twice"),
        ("file:{0}?capacity=1MiB&segment=1MiB", "capacity 1048576 < 2 x segment 1048576"),
        ("file:{0}?capacity", "write OPTION=VALUE&OPTION=VALUE"),
    ],
)
def test_a_store_that_cannot_be_opened_is_one_line(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        open_storage(url.format(tmp_path))
    assert "\n" not in str(refused.value)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    theirs = {
        "notes.txt": b"mine",
        ".notes-1.tmp": b"mine too",
        "1.kvseg": b"x",
    }
    named = {
        "0000000000000001.kvseg": b"named like a segment",
        "00000000000000ff.kvseg": bytes(8192),
    }
    for name, content in {**theirs, **named}.items():
        (tmp_path / name).write_bytes(content)
    store = open_store(tmp_path, 1 << 18, 1 << 16)
    storage = Storage(FINGERPRINT, store)
    assert set(stored(storage, addresses(60), SIZE)) == {OK}
    assert store.stats().details["foreign_files"] == 2
    assert len(store.verify().damaged) == 2
    assert {name: (tmp_path / name).read_bytes() for name in named} == named
    store.clear()
    assert storage.close()
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    del left["kvgraft.lock"], left["kvgraft.uses"]
    assert left == theirs


def test_a_segment_whose_first_block_is_damaged_counts_until_it_is_cleared(tmp_path: Path) -> None:
    capacity, segment = 1 << 18, 1 << 16
    storage = Storage(FINGERPRINT, open_store(tmp_path, capacity, segment))
    assert stored(storage, addresses(3), SIZE) == [OK] * 3
    assert storage.close()
    (path,) = segments(tmp_path)
    with path.open("r+b") as file:
        file.write(bytes(4096))
    store = open_store(tmp_path, capacity, segment)
    assert store.stats().nbytes == path.stat().st_size
    (found,) = store.verify().damaged
    assert found.where == str(path)
    assert "clear removes it" in found.reason
    storage = Storage(FINGERPRINT, store)
    for first in range(0, 60, 3):
        assert stored(storage, addresses(3, first), SIZE) == [OK] * 3
        assert sum(each.stat().st_size for each in segments(tmp_path)) <= capacity
    assert path.exists()
    store.clear()
    assert segments(tmp_path) == []
    assert store.verify().damaged == ()
    assert storage.close()


def test_where_no_segment_can_be_had_records_are_written_over_one_by_one(tmp_path: Path) -> None:
    capacity, segment = 1 << 18, 1 << 16
    store = open_store(tmp_path, capacity, segment)
    storage = Storage(FINGERPRINT, store)
    for first in range(0, 9, 3):
        assert stored(storage, addresses(3, first), SIZE) == [OK] * 3
    with (tmp_path / "00000000000000ff.kvseg").open("wb") as file:
        file.truncate(2 * capacity)
    assert stored(storage, addresses(3, 9), 3 * SIZE) == [FULL] * 3, "nothing is gained"
    assert fetched(storage, addresses(9), SIZE) == [OK] * 9
    assert stored(storage, addresses(2, 9), SIZE) == [OK] * 2
    assert fetched(storage, addresses(11), SIZE) == [OK] * 7 + [MISS] * 2 + [OK] * 2
    store.clear()
    assert stored(storage, addresses(3, 9), SIZE) == [OK] * 3
    assert storage.close()


def test_a_special_file_is_no_segment_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "0000000000000001.kvseg").mkdir()
    (tmp_path / "0000000000000002.kvseg").symlink_to("nowhere")
    (tmp_path / "ffffffffffffffff.kvseg").write_bytes(bytes(8192))
    store = open_store(tmp_path)
    storage = Storage(FINGERPRINT, store)
    assert stored(storage, addresses(3), SIZE) == [OK] * 3
    assert store.verify().damaged == ()
    assert store.stats().details["foreign_files"] == 0
    store.clear()
    assert len(segments(tmp_path)) == 3
    assert storage.close()


@pytest.mark.parametrize("record", [0, 2, 3], ids=["the first", "one behind", "past the middle"])
@pytest.mark.parametrize("how", ["overwritten", "zeroed", "cut"])
def test_missing_data_behind_a_record_is_found(tmp_path: Path, how: str, record: int) -> None:
    storage = Storage(FINGERPRINT, open_store(tmp_path))
    assert stored(storage, addresses(6), SIZE) == [OK] * 6
    assert storage.close()
    (path,) = segments(tmp_path)
    where = 4096 + record * 16384
    if how == "cut":
        os.truncate(path, where + 5000)
    else:
        with path.open("r+b") as file:
            file.seek(where)
            n_bytes = path.stat().st_size - where
            file.write(bytes(n_bytes) if how == "zeroed" else random.Random(1).randbytes(n_bytes))
    left = path.stat().st_size - where
    store = open_store(tmp_path)
    report = store.verify()
    assert report.n_records == record
    (found,) = report.damaged
    assert found.where == f"{path}@{where}"
    assert found.reason == f"{left:,} bytes are no record any more"
    store.close()


def test_without_direct_io_all_the_same_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert supports_direct(tmp_path) in (True, False)
    monkeypatch.setattr("kvgraft_file.directory.supports_direct", lambda path: False)
    storage = Storage(FINGERPRINT, open_store(tmp_path))
    places = addresses(5)
    assert stored(storage, places, SIZE) == [OK] * 5
    assert fetched(storage, places, SIZE) == [OK] * 5
    assert storage.close()


def test_a_store_that_was_closed_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close()
    with pytest.raises(ConfigError, match="was closed; open it again"):
        store.exists([bytes(32)])


def test_the_command_shows_verifies_and_clears(tmp_path: Path) -> None:
    url = f"file:{tmp_path}?capacity=1MiB"
    storage = Storage(FINGERPRINT, open_store(tmp_path))
    stored(storage, addresses(3), SIZE)
    assert storage.close()
    status, told = storage_command("stats", url)
    assert (status, "records" in told) == (0, True)
    assert json.loads(storage_command("stats", "--json", url)[1])["records"] == 3
    status, told = storage_command("verify", url)
    assert (status, "nothing damaged" in told) == (0, True)
    (path,) = segments(tmp_path)
    with path.open("r+b") as file:
        file.seek(9000)
        file.write(b"damage")
    status, told = storage_command("verify", url)
    assert status == 1
    assert "does not match its checksum" in told
    assert "3 records" in told
    status, told = storage_command("verify", "--json", url)
    assert (status, len(json.loads(told)["damaged"])) == (1, 1)
    asked = CliRunner().invoke(storage_group, ["clear", url])
    assert str(asked.exception) == "nothing removed: no answer; add --yes"
    refused = CliRunner().invoke(storage_group, ["clear", url], input="n\n")
    assert str(refused.exception) == "nothing removed"
    assert segments(tmp_path)
    assert storage_command("clear", "--yes", url) == (
        0,
        f"removed 3 records, {4096 + 3 * 16384:,} bytes\n",
    )
    assert not segments(tmp_path)


def test_the_command_refuses_a_directory_that_is_no_store_and_leaves_it_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "notes.txt").write_text("not a store")
    for arguments in (["stats"], ["verify"], ["clear", "--yes"]):
        refused = CliRunner().invoke(storage_group, [*arguments, f"file:{tmp_path}"])
        assert str(refused.exception) == (
            f"storage 'file': {tmp_path} holds no store: 0 segments, no kvgraft.lock; "
            "name the directory of a store"
        )
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


def test_the_command_shows_a_capacity_only_where_the_url_gives_it(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    url = f"file:{tmp_path}"
    assert json.loads(storage_command("stats", "--json", url)[1])["capacity"] is None
    assert "no limit known" in storage_command("stats", url)[1]
    given = json.loads(storage_command("stats", "--json", f"{url}?capacity=1MiB")[1])
    assert given["capacity"] == 1 << 20


def test_the_command_refuses_in_one_line() -> None:
    refused = run_forked(KVGRAFT, "storage", "stats", "file:/nowhere")
    assert refused.returncode == 2
    assert refused.stderr == (
        "kvgraft: storage 'file': /nowhere does not exist, so it holds no store; check the path\n"
    )
