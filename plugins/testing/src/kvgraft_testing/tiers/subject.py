"""The tier under test: a directory for it, and processes that open it.

A process that has opened a tier has threads, so a clause forks lives before it opens one.
"""

from __future__ import annotations

import os
import pickle
import random
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from kvgraft.errors import ContractViolation
from kvgraft_testing.tiers.driver import Key, Kind, OpenTier, Setting, Target

__all__ = ["Life", "TierSubject"]

T = TypeVar("T")

LIFE_S = 60.0
"""Seconds after which a process that does not end is a failure."""

N_PAGES = 96
"""Pages of memory above a tier."""


class Life:
    """A forked process that runs one function, and its result.

    Args:
        work: runs there.
        clean: called when it was killed.
    """

    def __init__(self, work: Callable[[], Any], clean: Callable[[int], None]) -> None:
        self._clean = clean
        read, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(read)
            _run(work, write)
        os.close(write)
        self._read = read

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._read)
        self._clean(self.pid)

    def result(self, rule: str, name: str) -> Any:
        """Its result.

        Raises:
            ContractViolation: it raised that, or did not end; it is killed then.
            RuntimeError: it ended without a result.
        """
        end, received = time.monotonic() + LIFE_S, bytearray()
        while True:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self.kill()
                raise ContractViolation(rule, name, f"it did not end within {LIFE_S:.0f} s")
            more = os.read(self._read, 1 << 20)
            if not more:
                break
            received += more
        os.close(self._read)
        _, status = os.waitpid(self.pid, 0)
        if not received:
            self._clean(self.pid)
            raise RuntimeError(f"its process ended with status {os.waitstatus_to_exitcode(status)}")
        outcome, value = pickle.loads(received)
        if outcome == "broken":
            raise ContractViolation(*value)
        if outcome == "raised":
            raise RuntimeError(value)
        return value


def _run(work: Callable[[], Any], write: int) -> None:
    """Run a function in a fork, write its outcome and end without the parent's clean-up."""
    try:
        outcome = ("ok", work())
    except ContractViolation as violation:
        outcome = ("broken", (violation.rule, violation.component, violation.evidence))
    except BaseException as error:  # noqa: BLE001 - the parent tells it
        outcome = ("raised", f"{type(error).__name__}: {' '.join(str(error).split())}")
    with os.fdopen(write, "wb") as stream:
        stream.write(pickle.dumps(outcome))
    os._exit(0)


class TierSubject:
    """One tier, as clauses see it.

    Args:
        target: the tier.
        kind: its kind.
    """

    def __init__(self, target: Target, kind: Kind) -> None:
        self.target = target
        self.kind = kind
        self.name = target.name

    @contextmanager
    def place(self) -> Iterator[Path]:
        """An empty directory."""
        with tempfile.TemporaryDirectory(
            prefix="kvgraft-tier-", ignore_cleanup_errors=True
        ) as made:
            yield Path(made)

    @contextmanager
    def open(
        self, directory: Path, setting: Setting | None = None, n_pages: int = N_PAGES
    ) -> Iterator[OpenTier]:
        """The tier of a directory, shut down afterwards."""
        tier = self.kind.open(self.target, directory, setting or Setting(), n_pages)
        try:
            yield tier
        except BaseException:
            with suppress(Exception):  # the first failure is the one to report
                tier.close()
            raise
        tier.close()

    def begin(self, work: Callable[[], Any]) -> Life:
        """Run a function in a process of its own, beside this one."""
        return Life(work, self.kind.clean)

    def life(self, rule: str, work: Callable[[], T]) -> T:
        """Run a function in a process of its own and wait for its result."""
        result: T = self.begin(work).result(rule, self.name)
        return result

    def storing(
        self, directory: Path, *batches: Mapping[Key, bytes], setting: Setting | None = None
    ) -> Callable[[], list[bool]]:
        """A life that stores batches and shuts down."""

        def work() -> list[bool]:
            with self.open(directory, setting) as tier:
                return tier.store(*batches)

        return work

    def loading(
        self, directory: Path, *batches: list[Key], setting: Setting | None = None
    ) -> Callable[[], dict[Key, bytes]]:
        """A life that loads batches and shuts down."""

        def work() -> dict[Key, bytes]:
            with self.open(directory, setting) as tier:
                return tier.load(*batches)

        return work

    def expect(self, condition: object, rule: str, evidence: str) -> None:
        """Raise `ContractViolation` unless the condition holds."""
        if not condition:
            raise ContractViolation(rule, self.name, evidence)

    def expect_right(
        self, rule: str, found: Mapping[Key, bytes], right: Mapping[Key, bytes], when: str
    ) -> None:
        """Pages that were loaded hold their bytes."""
        names = list(right)
        wrong = [name for name in found if found[name] != right.get(name)]
        if wrong:
            told = f"page {names.index(wrong[0])}" if wrong[0] in right else "another page"
            self.expect(
                not wrong,
                rule,
                f"{when}: {len(wrong)} of {len(found)} loaded pages hold other bytes than were "
                f"stored, {told} the first",
            )

    def expect_found(
        self, rule: str, found: Mapping[Key, bytes], right: Mapping[Key, bytes], when: str
    ) -> None:
        """Pages are found, all of them, and hold their bytes."""
        self.expect_right(rule, found, right, when)
        self.expect(
            len(found) == len(right), rule, f"{when}: {len(found)} of {len(right)} pages are found"
        )

    def random(self, seed: str) -> random.Random:
        """Numbers that are equal in every run."""
        return random.Random(f"{self.name} {seed}")
