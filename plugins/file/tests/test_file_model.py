"""The file backend against a dictionary: it serves only stored data."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvgraft_storage import Status, Storage
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, settled, stored

from .store import open_store, segments

PLACES = addresses(40)
SIZES = [1 + 997 * number for number in range(40)]
NUMBERS = st.lists(st.integers(0, 39), min_size=1, max_size=8)
CAPACITY, SEGMENT = 1 << 19, 1 << 16


class FileMachine(RuleBasedStateMachine):
    """Stores, fetches, removes, clears, reopens; with more data than fits, so that it evicts."""

    @initialize(roomy=st.booleans())
    def open(self, *, roomy: bool) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvgraft-model-"))
        self.capacity = 16 * CAPACITY if roomy else CAPACITY
        self.roomy = roomy
        self.there: set[int] = set()
        self._open()

    def _open(self) -> None:
        self.storage = Storage(FINGERPRINT, open_store(self.directory, self.capacity, SEGMENT))

    @rule(numbers=NUMBERS)
    def store(self, numbers: list[int]) -> None:
        for number in numbers:
            told = stored(self.storage, [PLACES[number]], SIZES[number])
            assert told == [Status.OK]
            self.there.add(number)

    @rule(numbers=NUMBERS)
    def fetch(self, numbers: list[int]) -> None:
        for number in numbers:
            (status,) = fetched(self.storage, [PLACES[number]], SIZES[number])
            if number in self.there and self.roomy:
                assert status is Status.OK
            elif number in self.there:
                assert status in (Status.OK, Status.MISS)
            else:
                assert status is Status.MISS

    @rule(numbers=NUMBERS)
    def remove(self, numbers: list[int]) -> None:
        settled(self.storage.remove([PLACES[number] for number in numbers]))
        self.there -= set(numbers)

    @rule()
    def clear(self) -> None:
        ticket = self.storage.ask("clear", lambda store: store.clear())
        assert ticket.wait(20)
        assert ticket.value is True
        self.there.clear()
        assert not segments(self.directory)

    @rule()
    def reopen(self) -> None:
        assert self.storage.close()
        self._open()

    @rule()
    def open_without_closing(self) -> None:
        self.abandoned = self.storage
        self._open()
        assert self.abandoned.close()

    @precondition(lambda self: hasattr(self, "storage"))
    @invariant()
    def keeps_to_its_capacity_and_is_undamaged(self) -> None:
        ticket = self.storage.ask("look", lambda store: (store.stats(), store.verify()))
        assert ticket.wait(20)
        answer: Any = ticket.value
        stats, report = answer
        assert stats.nbytes <= self.capacity
        assert report.damaged == ()
        assert report.n_records == stats.n_records

    def teardown(self) -> None:
        if hasattr(self, "storage"):
            assert self.storage.close()
            shutil.rmtree(self.directory)


TestFileMachine = FileMachine.TestCase
TestFileMachine.settings = settings(max_examples=12, stateful_step_count=25)
