"""Page tables on a device follow the steps, however late the device is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvgraft import Cache, ConfigError
from kvgraft_scheduling import DeviceTables

from ..gpu import accelerator
from .test_step import opened, prefilled

COMPONENTS: dict[str, Any] = {"full": {}, "swa": {"window": 8}, "mamba": {"states": 16}}


def keep_busy(device: torch.device) -> None:
    """Work given to the device from now on runs later than the host's next steps."""
    if device.type == "cuda":
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("device", ["cpu", pytest.param(accelerator(), marks=pytest.mark.gpu)])
def test_tables_and_steps_are_the_caches_own_on_the_device(device: str) -> None:
    """Also where rows are given to other requests and windows slide."""
    with opened(components=COMPONENTS, max_requests=4, max_tokens=256) as cache:
        running = prefilled(cache, 3)
        followed, wanted, found = DeviceTables(cache, device), [], []
        for at in range(40):
            if at == 10:
                cache.computed(running[0], 1)
                cache.finish(running.pop(0))
            if at == 20:
                running += prefilled(cache, 1, n_tokens=40)
            step = cache.step(running, np.ones(len(running), np.int32))
            keep_busy(followed.device)
            there = followed.upload(step)
            assert there.rows.device.type == followed.device.type
            for name in ("full", "swa"):
                wanted += [torch.from_numpy(cache.table(each, name).copy()) for each in running]
                rows = followed.tables[name].index_select(0, there.rows)
                found += [row[: len(like)] for row, like in zip(rows, wanted[-len(running) :])]
            for numbers, kept in ((step, wanted), (there, found)):
                kept.extend([numbers.rows, numbers.seq_lens, numbers.state_slots["mamba"]])
                kept.extend(numbers.slot_mapping.values())
        assert any((each < 0).any() for each in wanted), "no window has left pages behind"
        for like, tensor in zip(wanted, found):
            assert tensor.cpu().equal(like)
        assert len(wanted) == len(found)


def test_tables_that_grow_are_refused() -> None:
    with (
        Cache.open(["full"], device_tokens=64, max_requests=4) as cache,
        pytest.raises(ConfigError, match="open the cache with max_requests and max_tokens"),
    ):
        DeviceTables(cache)
