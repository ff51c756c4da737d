"""The engine to copy from, `examples/small_engine.py`: every answer is right, in any pools."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest

from kvgraft.errors import TransferError
from kvgraft.transfers import CpuTransferEngine, Ticket

from ..commands import ROOT


@pytest.fixture
def main() -> Callable[..., int]:
    serve: Callable[..., int] = runpy.run_path(str(ROOT / "examples/small_engine.py"))["main"]
    return serve


class FailingCopies(CpuTransferEngine):
    """Every third copy fails."""

    n_copies = 0

    def submit(self, copies: Any, fence: Any = None) -> Ticket:
        self.n_copies += 1
        if self.n_copies % 3:
            return super().submit(copies, fence)
        ticket = Ticket(copies)
        ticket.finish(TransferError("the bus fails"))
        return ticket


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pools", ["as it is", "tight", "failing copies"])
def test_every_answer_is_right(
    main: Callable[..., int], capsys: pytest.CaptureFixture[str], pools: str
) -> None:
    settings: dict[str, Any] = {"guard": "on"}
    if pools != "as it is":
        settings |= {"device_tokens": 400, "host_tokens": 800}
    if pools == "failing copies":
        settings |= {"transfers": FailingCopies(), "guard": "off"}
    assert main(**settings) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[-3:] for line in lines] == [["6", "of", "6"]] * 4
    n_cached, n_from_host = (sum(int(line[at].replace(",", "")) for line in lines) for at in (2, 3))
    assert n_cached > n_from_host > 0


def test_a_request_that_never_fits_is_no_right_answer(
    main: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(device_tokens=128) == 1
    said = capsys.readouterr().out
    assert "rejected: never fits; component 'full' device pool: needs" in said
    assert "0 of 6" in said
