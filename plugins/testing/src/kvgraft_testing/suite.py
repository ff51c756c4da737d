"""The common interface of all ways of running the clauses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvgraft_testing.result import BROKEN, Result, Status

__all__ = ["Suite"]


class Suite:
    """The clauses over one component.

    Attributes:
        idents: the clauses, in the contract's order.
    """

    idents: tuple[str, ...]

    def decide(self, ident: str) -> Result:
        """One clause."""
        raise NotImplementedError

    def verdict(self) -> list[Result]:
        """Results beside clauses: other rules found broken, and expectations."""
        raise NotImplementedError

    def finding(self) -> Result | None:
        """The finding that leaves clauses undecided, as a result; None if there is none."""
        raise NotImplementedError

    def told_by(self) -> str | None:
        """The clause that reports why others are undecided, if one is asked."""
        raise NotImplementedError

    def close(self) -> None:
        """End the suite."""

    def run(self, progress: Callable[[Result], None] = lambda result: None) -> list[Result]:
        """Every clause, then the verdict."""
        results = []
        for result in self._results():
            progress(result)
            results.append(result)
        return results

    def _results(self) -> Iterator[Result]:
        results = []
        for ident in self.idents:
            results.append(self.decide(ident))
            yield results[-1]
        for result in self.verdict():
            results.append(result)
            yield result
        undecided = [each for each in results if each.status is Status.UNDECIDED]
        if undecided and not any(each.status in BROKEN for each in results):
            yield replace(undecided[0], status=Status.FAILED)
