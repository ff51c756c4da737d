"""Stores with one defect each, for the suite for tiers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from kvgraft_file import FileBackend, FileOptions
from kvgraft_storage import Capabilities, Status, StorageBackend, StoreStats, Value, VerifyReport

__all__ = ["Forgetful", "LeavesALock", "Scratch", "Unbounded"]


class Whole(StorageBackend):
    """A store that is right: the embedded one, by another name."""

    def __init__(self, path: str, capacity: int = 32 << 20) -> None:
        self._inner = FileBackend.open(path, FileOptions(capacity=capacity))

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return self._inner.exists(keys)

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        return self._inner.get_into(keys, values, deadline_s)

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        return self._inner.set_from(keys, values, deadline_s)

    def remove(self, keys: Sequence[bytes]) -> Sequence[Status]:
        return self._inner.remove(keys)

    def clear(self) -> None:
        self._inner.clear()

    def flush(self) -> None:
        self._inner.flush()

    def stats(self) -> StoreStats:
        return self._inner.stats()

    def verify(self) -> VerifyReport:
        return self._inner.verify()

    def healthy(self) -> bool:
        return self._inner.healthy()

    def close(self) -> None:
        self._inner.close()


class Forgetful(Whole):
    """It says that it stored a page, and did not."""

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        return [Status.OK] * len(keys)


class Unbounded(Whole):
    """It has a capacity that it does not keep to."""

    def __init__(self, path: str, capacity: int) -> None:
        super().__init__(path, 8 * capacity)


class Scratch(Whole):
    """It begins with nothing."""

    def __init__(self, path: str) -> None:
        for each in Path(path).iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        super().__init__(path)


class LeavesALock(Whole):
    """Nobody can open it a second time."""

    def __init__(self, path: str) -> None:
        Path(path, "lock").touch(exist_ok=False)
        super().__init__(path)
