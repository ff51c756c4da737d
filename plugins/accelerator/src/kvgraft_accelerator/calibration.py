"""Sizes from which one way to copy is faster than another, measured once per device and link.

They are kept in a file for each device, driver and version of torch, in the user's cache folder.
`KVGRAFT_COPY_SIZES` overrides them, such as `straight_nbytes=65536,batched_nbytes=16384`; nothing
is measured then.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.errors import ConfigError
from kvgraft_accelerator.cuda_driver import CudaDriver
from kvgraft_accelerator.fragments import Fragments
from kvgraft_accelerator.protocol import CopySizes, Purpose
from kvgraft_accelerator.ways import Way

if TYPE_CHECKING:
    from kvgraft_accelerator.runtime import Accelerator

__all__ = ["calibrated", "crossover", "folder", "given_sizes", "identity", "kept", "measured"]

VARIABLE = "KVGRAFT_COPY_SIZES"

SIZES = tuple(1 << shift for shift in range(12, 21))
"""Bytes of the pieces that are timed."""

TOTAL_NBYTES = 64 << 20
"""Bytes that each copy moves."""

MOST = 4096
"""Pieces that it moves at most."""

MOST_DIGITS = 12
"""Of a size that somebody gives: no device has a terabyte."""

REPEATS = 3
"""Times that each is timed; the least counts. It runs once before."""

logger = logging.getLogger("kvgraft")


def given_sizes(environ: Mapping[str, str]) -> CopySizes | None:
    """The sizes that the environment names, the others as they are by default; None if none.

    Raises:
        ConfigError: a name that is none, or a size that is no number.
    """
    text = environ.get(VARIABLE)
    if not text:
        return None
    found = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in CopySizes._fields or not value.isdecimal() or len(value) > MOST_DIGITS:
            names = ", ".join(CopySizes._fields)
            raise ConfigError(
                f"{VARIABLE}: {part.strip()!r:.60}; write NAME=BYTES, names are {names}"
            )
        found[name] = int(value)
    return CopySizes()._replace(**found)


def calibrated(device: Accelerator, driver: CudaDriver | None) -> CopySizes:
    """The sizes of a device that has a batched call and a kernel: from its file, or measured."""
    key = identity(device.device, driver)
    return kept(folder(os.environ), key, lambda: measured(device))


def folder(environ: Mapping[str, str]) -> Path | None:
    """Where the files are; None for a user without a home, where the environment names no place."""
    try:
        cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:
        return None
    return Path(cache, "kvgraft", "copy-sizes")


def identity(device: torch.device, driver: CudaDriver | None) -> dict[str, str]:
    """A device with its link, and the software that copies."""
    module = torch.get_device_module(device)
    properties = getattr(module, "get_device_properties", lambda _: device)(device)
    return {
        "device": str(getattr(properties, "name", device.type)),
        "unit": str(getattr(properties, "uuid", device.index)),
        "driver": "" if driver is None else str(driver.version()),
        "torch": torch.__version__,
    }


def kept(where: Path | None, key: Mapping[str, str], measure: Callable[[], CopySizes]) -> CopySizes:
    """The sizes in the file of a key; measured and written where there is none that can be read."""
    if where is None:
        logger.warning("copies are timed at every start: there is no home; set XDG_CACHE_HOME")
        return measure()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = where / f"{digest}.json"
    try:
        return _read(path, key)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, RecursionError) as error:
        logger.warning("%s: %s; copies are timed again", path, error)
    sizes = measure()
    try:
        where.mkdir(parents=True, exist_ok=True)
        written = json.dumps({"key": dict(key), "sizes": sizes._asdict()}, indent=1)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(written, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        logger.warning("%s: %s; copies are timed again at the next start", path, error)
    return sizes


def _read(path: Path, key: Mapping[str, str]) -> CopySizes:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("key") != key:
        raise ValueError("not of this device")
    sizes = found.get("sizes")
    if not isinstance(sizes, dict) or set(sizes) != set(CopySizes._fields):
        raise ValueError("no sizes in it")
    if not all(type(each) is int and 0 <= each < 10**MOST_DIGITS for each in sizes.values()):
        raise ValueError("sizes that are no numbers of bytes")
    return CopySizes(**sizes)


def measured(
    device: Accelerator, sizes: Sequence[int] = SIZES, total_nbytes: int = TOTAL_NBYTES
) -> CopySizes:
    """Time pieces of several sizes each way; takes about a second.

    Loads by the kernel are compared with batched ones. Backups that are gathered on the device and
    cross the bus as one piece are compared with batched ones that do not.
    """
    batched, kernel = device.ways.batched, device.ways.kernel
    assert batched is not None
    assert kernel is not None
    host = device.page_locked_for_now(total_nbytes)
    rows, ring = (device.zeros((total_nbytes,), torch.uint8, "calibration") for _ in range(2))
    stream = device.stream(Purpose.LOAD_BACK).raw
    by_kernel, by_batch, gathered, straight = ({} for _ in range(4))
    stream.wait_stream(device.compute().raw)
    for nbytes in sizes:
        loaded = _pieces(host, rows, nbytes)
        by_kernel[nbytes] = _seconds(stream, [(kernel, loaded)])
        by_batch[nbytes] = _seconds(stream, [(batched, loaded)])
        n = len(loaded.nbytes)
        whole = _pieces(ring[: n * nbytes], host, n * nbytes)
        gathered[nbytes] = _seconds(
            stream, [(kernel, _pieces(rows, ring, nbytes)), (batched, whole)]
        )
        straight[nbytes] = _seconds(stream, [(batched, _pieces(rows, host, nbytes))])
    return CopySizes(
        straight_nbytes=crossover(gathered, straight), batched_nbytes=crossover(by_kernel, by_batch)
    )


def crossover(small: Mapping[int, float], large: Mapping[int, float]) -> int:
    """The size from which `large` is never slower; twice the largest if there is none.

    Args:
        small: seconds by size of the way that is meant for small pieces.
        large: of the way that is meant for large ones.
    """
    found = 2 * max(small)
    for nbytes in sorted(small, reverse=True):
        if large[nbytes] > small[nbytes]:
            break
        found = nbytes
    return found


def _pieces(source: torch.Tensor, target: torch.Tensor, nbytes: int) -> Fragments:
    """Pieces of one memory in no order, into another in order; `MOST` at most."""
    n = min(len(source) // nbytes, MOST)
    order = np.random.default_rng(0).permutation(n).astype(np.int64)
    sources = source.data_ptr() + order * nbytes
    targets = target.data_ptr() + np.arange(n, dtype=np.int64) * nbytes
    return Fragments(sources, targets, np.full(n, nbytes, np.int64))


def _seconds(stream: torch.Stream, calls: Sequence[tuple[Way, Fragments]]) -> float:
    """The least time that some calls took, one behind the other."""
    found = []
    for _ in range(1 + REPEATS):
        stream.synchronize()
        began = time.perf_counter()
        with stream:
            for way, fragments in calls:
                way(fragments, stream)
        stream.synchronize()
        found.append(time.perf_counter() - began)
    return min(found[1:])
