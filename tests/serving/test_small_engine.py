"""The engine to copy from, `examples/small_engine.py`: every answer is right, in any pools."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from ..commands import ROOT


@pytest.mark.parametrize(
    "settings",
    [{"guard": "on"}, {"device_tokens": 400, "host_tokens": 800, "guard": "on"}],
    ids=["as it is", "tight"],
)
def test_every_answer_is_right(capsys: pytest.CaptureFixture[str], settings: Any) -> None:
    main = runpy.run_path(str(ROOT / "examples" / "small_engine.py"))["main"]
    assert main(**settings) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[-3:] for line in lines] == [["6", "of", "6"]] * 4
    n_cached, n_from_host = (sum(int(line[at].replace(",", "")) for line in lines) for at in (2, 3))
    assert n_cached > n_from_host > 0
