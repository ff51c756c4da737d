"""Sizes of copies: measured once, kept in a file, overridden by the environment."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from kvgraft import ConfigError
from kvgraft_accelerator.calibration import (
    crossover,
    folder,
    given_sizes,
    identity,
    kept,
)
from kvgraft_accelerator.protocol import CopySizes

KEY = {"device": "a GPU", "unit": "0", "driver": "13000", "torch": "2.13.0"}
FOUND = CopySizes(straight_nbytes=1 << 14, batched_nbytes=1 << 15)


class Measure:
    """Counts how often somebody measures."""

    n = 0

    def __call__(self) -> CopySizes:
        self.n += 1
        return FOUND


@pytest.mark.parametrize(
    ("small", "large", "size"),
    [
        ([1, 2, 4, 8], [9, 9, 3, 5], 4),
        ([1, 2, 4, 8], [1, 2, 4, 8], 1),
        ([1, 2, 4, 8], [2, 3, 5, 9], 16),
        ([1, 2, 4, 8], [0, 9, 3, 5], 4),
    ],
    ids=["it wins from the third on", "it wins always", "it never wins", "it loses between"],
)
def test_the_large_way_is_taken_where_it_wins_from_there_on(
    small: list[float], large: list[float], size: int
) -> None:
    sizes = [1, 2, 4, 8]
    assert crossover(dict(zip(sizes, small)), dict(zip(sizes, large))) == size


def test_a_device_is_measured_once(tmp_path: Path) -> None:
    measure = Measure()
    assert [kept(tmp_path / "new", KEY, measure) for _ in range(3)] == [FOUND] * 3
    assert measure.n == 1
    kept(tmp_path / "new", {**KEY, "driver": "13010"}, measure)
    assert measure.n == 2
    assert len(list((tmp_path / "new").iterdir())) == 2


def written(content: object) -> bytes:
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        written({"key": {**KEY, "unit": "1"}, "sizes": FOUND._asdict()}),
        written({"key": KEY}),
        written({"key": KEY, "sizes": {"ring_nbytes": 5}}),
        written({"key": KEY, "sizes": {**FOUND._asdict(), "ring_nbytes": -5}}),
        written({"key": KEY, "sizes": {**FOUND._asdict(), "ring_nbytes": "much"}}),
    ],
)
def test_a_bad_file_is_reported_in_one_line_and_written_again(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept(tmp_path, KEY, Measure())
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    measure = Measure()
    with caplog.at_level(logging.WARNING, "kvgraft"):
        assert kept(tmp_path, KEY, measure) == FOUND
    (line,) = caplog.messages
    assert line.startswith(f"{path}: ")
    assert line.endswith("; copies are timed again")
    assert "\n" not in line
    assert kept(tmp_path, KEY, measure) == FOUND
    assert measure.n == 1


def test_a_folder_that_cannot_be_written_is_reported_and_measured_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    measure = Measure()
    with caplog.at_level(logging.WARNING, "kvgraft"):
        for _ in range(2):
            assert kept(tmp_path / "file" / "folder", KEY, measure) == FOUND
    assert measure.n == 2
    assert "copies are timed again at the next start" in caplog.messages[-1]


def test_the_environment_overrides_some_sizes() -> None:
    variable = "KVGRAFT_COPY_SIZES"
    assert given_sizes({}) is None
    found = given_sizes({variable: "straight_nbytes=65536, batched_nbytes=0"})
    assert found == CopySizes(straight_nbytes=65536, batched_nbytes=0)
    for wrong in (
        "much",
        "straight=5",
        "straight_nbytes=-5",
        "straight_nbytes=5,",
        "ring_nbytes=1" + "0" * 12,
    ):
        with pytest.raises(ConfigError, match=f"{variable}: .*write NAME=BYTES, names are ring_n"):
            given_sizes({variable: wrong})


def test_files_are_in_the_cache_folder_of_the_user() -> None:
    assert folder({"XDG_CACHE_HOME": "/here"}) == Path("/here/kvgraft/copy-sizes")
    assert folder({}) == Path.home() / ".cache/kvgraft/copy-sizes"


def test_without_a_home_sizes_are_measured_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    measure = Measure()
    assert [kept(folder({}), KEY, measure) for _ in range(2)] == [FOUND, FOUND]
    assert measure.n == 2
    assert "set XDG_CACHE_HOME" in caplog.text


def test_a_device_is_known_by_its_name_unit_driver_and_torch() -> None:
    found = identity(torch.device("cpu"), None)
    assert found.keys() == KEY.keys()
    assert found["torch"] == torch.__version__
