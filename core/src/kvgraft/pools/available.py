"""Measures the available memory before pools take it.

The kernel promises more memory than it has and ends a process that makes use of the promise,
without a word. So the core asks first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

__all__ = ["AvailableMemory", "available_nbytes", "host_available_nbytes"]

AvailableMemory = Callable[[torch.device], "int | None"]
"""Bytes that can be taken on a device, or None where it is unknown; the CPU stands for the host."""


def available_nbytes(device: torch.device) -> int | None:
    """Bytes that can be taken on `device` now; None where the system does not report it.

    For CUDA the driver's free memory plus torch's reserve.
    """
    if device.type == "cpu":
        return host_available_nbytes()
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return None


def host_available_nbytes(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that can be taken without swapping; None where nobody tells.

    The least of the machine's available memory and the memory that the control groups (v2 or v1) of
    this process and all above it leave: their limit less their use. Caches of files do not count as
    used, the kernel gives them up. Elsewhere than on Linux, the physical memory that is free, or
    all of it where the system reports no more.

    Args:
        root: where `proc` and `sys` are.
    """
    found = [_meminfo(root / "proc/meminfo"), *_control_groups(root)]
    known = [nbytes for nbytes in found if nbytes is not None]
    return max(0, min(known)) if known else _sysconf()


def _meminfo(path: Path) -> int | None:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_groups(root: Path) -> Iterator[int | None]:
    """Bytes that each control group with a limit leaves."""
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for group in _upwards(mount, path):
                yield _left(group, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            for group in _upwards(mount / "memory", path):
                yield _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it, as far as this mount shows them."""
    group = mount / path.lstrip("/")
    while group != mount and mount in group.parents:
        yield group
        group = group.parent
    yield mount


def _left(group: Path, limit: str, used: str, prefix: str) -> int | None:
    most, now = _number(group / limit), _number(group / used)
    if most is None or now is None:
        return None
    caches = (f"{prefix}inactive_file", f"{prefix}active_file")
    fields = (line.split() for line in _lines(group / "memory.stat"))
    given_up = sum(int(value) for name, value in fields if name in caches)
    return most - max(0, now - given_up)


def _number(path: Path) -> int | None:
    """A file's only number; None without the file, or where it says "max"."""
    for line in _lines(path):
        return int(line) if line.isdigit() else None
    return None


def _lines(path: Path) -> list[str]:
    """A file's lines; none where it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _sysconf() -> int | None:
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        try:
            n_pages = os.sysconf(name)
        except (ValueError, OSError, AttributeError):
            continue
        if n_pages >= 0:
            return n_pages * os.sysconf("SC_PAGE_SIZE")
    return None
