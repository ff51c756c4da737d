"""Backends that misbehave when they are told to."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvgraft_storage import Capabilities, Status, Storage, Value
from kvgraft_testing.storage import MemoryBackend

__all__ = ["Hanging", "Raising", "polled"]


def polled(storage: Storage) -> Storage:
    """The storage, after it looked at its calls and its breakers."""
    storage.poll()
    return storage


class Hanging(MemoryBackend):
    """Its calls wait while `gate` is closed, and say when they are inside."""

    def __init__(self, *, synchronous: bool = False) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Semaphore(0)
        self.n_calls = 0
        self._synchronous = synchronous

    @property
    def capabilities(self) -> Capabilities:
        return super().capabilities._replace(synchronous=self._synchronous)

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self._pass()
        return super().get_into(keys, values, deadline_s)

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self._pass()
        return super().set_from(keys, values, deadline_s)

    def healthy(self) -> bool:
        self._pass()
        return super().healthy()

    def _pass(self) -> None:
        self.n_calls += 1
        self.inside.release()
        self.gate.wait()


class Raising(MemoryBackend):
    """Raises, or answers nonsense, while `fault` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: BaseException | list[object] | None = None

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        if isinstance(self.fault, BaseException):
            raise self.fault
        if self.fault is not None:
            return self.fault  # type: ignore[return-value]
        return super().get_into(keys, values, deadline_s)
