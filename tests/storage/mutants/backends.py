"""Known-bad backends, one defect each, made from a sound one that outlives its openers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvgraft.errors import ConfigError
from kvgraft_storage import Capabilities, Change, Damage, Status, StoreStats, Value, VerifyReport
from kvgraft_storage.payload import HEADER_NBYTES
from kvgraft_testing.storage import MemoryBackend

__all__ = ["MUTANTS", "Kept"]

Contents = OrderedDict[bytes, tuple[bytes, bytes]]


class Kept(MemoryBackend):
    """A sound backend: every opener of a directory's store sees its content."""

    places: dict[Path, Contents] = {}  # noqa: RUF012 - the disk, so to say
    versions_there: dict[Path, dict[bytes, bytes]] = {}  # noqa: RUF012 - likewise

    def __init__(self, directory: Path) -> None:
        super().__init__(1 << 20, 200_000)
        self.stored = self.places.setdefault(directory, OrderedDict())
        self._versions = self.versions_there.setdefault(directory, {})

    @property
    def capabilities(self) -> Capabilities:
        return super().capabilities._replace(durable=True, shared=True)

    def close(self) -> None:
        self.closed = True


class BitFlip(Kept):
    def _get(self, key: bytes, value: Value) -> Status:
        status = super()._get(key, value)
        value.payload[len(value.payload) // 2] ^= 8
        return status


class FlippedHeader(Kept):
    def _get(self, key: bytes, value: Value) -> Status:
        status = super()._get(key, value)
        value.header[100] ^= 1
        return status


class TornTail(Kept):
    def _set(self, key: bytes, value: Value) -> Status:
        status = super()._set(key, value)
        if status is Status.OK and len(value.payload) > 4096:
            header, payload = self.stored[key]
            self.stored[key] = header, payload[:4096] + bytes(len(payload) - 4096)
        return status


class StaleKey(Kept):
    """Looks keys up by half of them, as a table of short hashes would."""

    def _get(self, key: bytes, value: Value) -> Status:
        close = next((each for each in self.stored if each[:1] == key[:1]), key)
        return super()._get(close, value)


class OtherKey(Kept):
    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        return super().get_into(list(reversed(keys)), values, deadline_s)


class TextKeys(Kept):
    """Ends keys at their first zero byte."""

    def _set(self, key: bytes, value: Value) -> Status:
        return super()._set(key.split(b"\0")[0], value)

    def _get(self, key: bytes, value: Value) -> Status:
        return super()._get(key.split(b"\0")[0], value)


class AnySize(Kept):
    """Fills part of a larger buffer and says OK."""

    def _get(self, key: bytes, value: Value) -> Status:
        header, payload = self.stored.get(key, (b"", b""))
        if header and len(payload) < len(value.payload):
            value.header[:] = header
            value.payload[: len(payload)] = payload
            return Status.OK
        return super()._get(key, value)


class CutSize(Kept):
    """Fills a smaller buffer with the beginning and says OK."""

    def _get(self, key: bytes, value: Value) -> Status:
        header, payload = self.stored.get(key, (b"", b""))
        if header and len(payload) > len(value.payload):
            value.header[:] = header
            value.payload[:] = payload[: len(value.payload)]
            return Status.OK
        return super()._get(key, value)


class NothingRead(Kept):
    """Says OK and fills nothing."""

    def _get(self, key: bytes, value: Value) -> Status:
        return Status.OK if key in self.stored else Status.MISS


class NothingStored(Kept):
    def _set(self, key: bytes, value: Value) -> Status:
        return Status.OK


class ExistsAlways(Kept):
    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [True] * len(keys)


class ExistsNever(Kept):
    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [False] * len(keys)


class Hangs(Kept):
    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        threading.Event().wait(deadline_s + 0.1)
        return [Status.DOWN] * len(keys)


class DropsAtExit(Kept):
    """Acknowledges data as durable that only its own process has."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.stored = OrderedDict()


class SwappedStatuses(Kept):
    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        return list(reversed(super().get_into(keys, values, deadline_s)))


class SwappedRemoves(Kept):
    def remove(self, keys: Sequence[bytes]) -> Sequence[Status]:
        return list(reversed(super().remove(keys)))


class OneStatus(Kept):
    """One status for the whole call."""

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        return super().set_from(keys, values, deadline_s)[:1]


class RemovesNothing(Kept):
    def remove(self, keys: Sequence[bytes]) -> Sequence[Status]:
        return [Status.OK if key in self.stored else Status.MISS for key in keys]


class ClearsNothing(Kept):
    cleared = False

    def clear(self) -> None:
        if not self.cleared:  # the first one is the suite's own
            super().clear()
        self.cleared = True


class NeverAgain(Kept):
    """A key that was removed once cannot be stored any more."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.removed: set[bytes] = set()

    def remove(self, keys: Sequence[bytes]) -> Sequence[Status]:
        self.removed.update(keys)
        return super().remove(keys)

    def _set(self, key: bytes, value: Value) -> Status:
        return Status.OK if key in self.removed else super()._set(key, value)


class Mixes(Kept):
    """A key that is stored again is half old and half new."""

    def _set(self, key: bytes, value: Value) -> Status:
        old = self.stored.get(key)
        status = super()._set(key, value)
        if old is not None and status is Status.OK:
            header, new = self.stored[key]
            half = len(new) // 2
            self.stored[key] = header, old[1][:half] + new[half:]
        return status


class Overflows(Kept):
    """Never makes room."""

    def _set(self, key: bytes, value: Value) -> Status:
        if len(value.payload) > 200_000:
            return Status.TOO_LARGE
        self.stored[key] = bytes(value.header), bytes(value.payload)
        return Status.OK


class FullForEver(Kept):
    """Claims to evict, and answers FULL."""

    def _set(self, key: bytes, value: Value) -> Status:
        return super()._set(key, value) if self._nbytes() < 500_000 else Status.FULL


class TakesTooLarge(Kept):
    """Cuts long payloads, and says OK; Storage refuses them before, the store must too."""

    @property
    def capabilities(self) -> Capabilities:
        return super().capabilities._replace(max_payload_nbytes=None)

    def _set(self, key: bytes, value: Value) -> Status:
        cut = value._replace(payload=value.payload[:8000])
        return super()._set(key, cut)


class WritesBeside(Kept):
    """Spoils the source of a set."""

    def _set(self, key: bytes, value: Value) -> Status:
        status = super()._set(key, value)
        if not value.payload.readonly:
            value.payload[0] ^= 1
        return status


class CountsWrong(Kept):
    def stats(self) -> StoreStats:
        return StoreStats(0, 0, 1 << 20)


class CriesWolf(Kept):
    def verify(self) -> VerifyReport:
        report = super().verify()
        return report._replace(damaged=(Damage("here", "", "looks odd"),))


class SeesNoOther(Kept):
    """Does not see what another opener removes."""

    def _get(self, key: bytes, value: Value) -> Status:
        self.seen: dict[bytes, tuple[bytes, bytes]] = getattr(self, "seen", {})
        if key in self.stored:
            self.seen[key] = self.stored[key]
        elif key in self.seen and len(self.seen[key][1]) == len(value.payload):
            value.header[:], value.payload[:] = self.seen[key]
            return Status.OK
        return super()._get(key, value)


class ClosedAndWell(Kept):
    def healthy(self) -> bool:
        return True


class ClosesOnce(Kept):
    def close(self) -> None:
        if self.closed:
            raise OSError("closed twice")
        super().close()


class PinsNot(Kept):
    @property
    def capabilities(self) -> Capabilities:
        return super().capabilities._replace(pin=True)

    def pin(self, keys: Sequence[bytes]) -> Sequence[Status]:
        raise ConfigError("not today")


class DropsParts(Kept):
    """Stores the first part of a payload, and zeros."""

    @property
    def capabilities(self) -> Capabilities:
        return super().capabilities._replace(synchronous=True, scatter=True)

    def _set(self, key: bytes, value: Value) -> Status:
        rest = bytes(value.nbytes - len(value.payload))
        whole = memoryview(bytes(value.payload) + rest)
        return super()._set(key, Value(value.header, whole))


class HintsAlways(Kept):
    def probably_has(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        return [True] * len(keys)


class HintsNever(Kept):
    def probably_has(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        return [False] * len(keys)


class EvictsInSilence(Kept):
    """Logs keys it stores and not keys it evicts."""

    def _log(self, change: Change, keys: Sequence[bytes]) -> None:
        if change is not Change.EVICTED:
            super()._log(change, keys)


class LogsTwice(Kept):
    def _log(self, change: Change, keys: Sequence[bytes]) -> None:
        super()._log(change, [*keys, *keys])


class Racy(Kept):
    """Threads share one buffer."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.shared = bytearray(1 << 20)

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        for key, value in zip(keys, values):
            self.shared[: len(value.payload)] = value.payload
            threading.Event().wait(0.0005)
            staged = memoryview(self.shared)[: len(value.payload)]
            super().set_from([key], [value._replace(payload=staged)], deadline_s)
        return [Status.OK] * len(keys)


class FirstOut(Kept):
    """Claims to track uses, and evicts the oldest data."""

    def _use(self, keys: Iterable[bytes]) -> None:
        pass


class TouchEmpties(Kept):
    """Writes the time of a use over the data."""

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.stored[key] = (bytes(HEADER_NBYTES), b"now")


class HeadsFirst(Kept):
    """Takes the last key of a call as the one used last: heads are the oldest of their chains."""

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        return super().set_from(keys[::-1], values[::-1], deadline_s)[::-1]


MUTANTS: dict[type[Kept], str] = {
    BitFlip: "S9",
    FlippedHeader: "S9",
    TornTail: "S9",
    StaleKey: "S9",
    OtherKey: "S9",
    TextKeys: "S8",
    AnySize: "S9",
    CutSize: "S9",
    NothingRead: "S9",
    NothingStored: "S8",
    ExistsAlways: "S9",
    ExistsNever: "S9",
    Hangs: "S8",
    DropsAtExit: "S9",
    SwappedStatuses: "S8",
    SwappedRemoves: "S9",
    OneStatus: "S8",
    RemovesNothing: "S8",
    ClearsNothing: "S8",
    NeverAgain: "S8",
    Mixes: "S9",
    Overflows: "S10",
    FullForEver: "S10",
    TakesTooLarge: "S9",
    WritesBeside: "S9",
    CountsWrong: "S9",
    CriesWolf: "S9",
    SeesNoOther: "S8",
    ClosedAndWell: "S11",
    ClosesOnce: "S11",
    PinsNot: "S11",
    DropsParts: "S9",
    HintsAlways: "S8",
    HintsNever: "S8",
    EvictsInSilence: "S8",
    LogsTwice: "S8",
    FirstOut: "S11",
    TouchEmpties: "S11",
    HeadsFirst: "S11",
    Racy: "S9",
}
"""Every mutant and the rule that must be named."""
