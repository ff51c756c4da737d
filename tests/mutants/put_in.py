"""A pytest plugin: the tests run on the bad core that `KVGRAFT_BAD_CORE` names.

`python -m tests.mutants.by_tests` gives it to pytest. Processes that a test starts run the correct
core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .cores_held_out import CORES_HELD_OUT

__all__ = ["BAD_CORE"]

BAD_CORE = "KVGRAFT_BAD_CORE"


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Iterator[None]:
    """Put the defect in once every module is imported."""
    name = os.environ.get(BAD_CORE)
    with pytest.MonkeyPatch.context() as patch:
        if name:
            CORES_HELD_OUT[name].put_in(patch)
        return (yield)
