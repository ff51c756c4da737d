"""A device of torch's without hardware, for a process of its own: torch can have one such device.

toy = load()                    # compiles it, a minute at first
cache = Cache.open(["full"], device_tokens=64, device="toy")
"""

from __future__ import annotations

import atexit
import fcntl
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["load"]


def build_directory() -> Path:
    """One for all clones, per Python and torch; ninja builds again when the source is another."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kvgraft" / f"toy-{sys.implementation.cache_tag}-torch-{torch.__version__}"


@contextmanager
def alone_in(directory: Path) -> Iterator[Path]:
    """Hold a build directory; what another process left there when it was killed is no lock."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "held").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # ends with the process; torch's own lock is a file
        (directory / "lock").unlink(missing_ok=True)
        yield directory


@cache
def load() -> Any:
    """The device's switches: `hold`, `release`, `lose`; torch knows it as `toy` from now on."""
    from torch.utils.cpp_extension import load as compiled

    source = Path(__file__).with_name("toy.cpp")
    with alone_in(build_directory()) as directory:
        found = compiled(
            "kvgraft_toy", [str(source)], extra_cflags=["-O0"], build_directory=str(directory)
        )
    torch.utils.rename_privateuse1_backend("toy")  # type: ignore[attr-defined]
    module = types.ModuleType("torch.toy")
    answers = {"is_available": True, "current_device": 0, "device_count": 1}
    for name, value in {**answers, "_is_in_bad_fork": False, "manual_seed_all": None}.items():
        setattr(module, name, lambda *_, value=value: value)
    torch._register_device_module("toy", module)  # type: ignore[no-untyped-call]
    atexit.register(found.settle)  # its threads hold tensors of Python's until their work is done
    return found
