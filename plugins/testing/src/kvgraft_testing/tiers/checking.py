"""Running the clauses on one tier: in a process of its own, and each clause in a fork of that.

The process that asks imports nothing of the tier or of its engine, and goes on when a clause hangs
or its process dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvgraft.errors import ConfigError
from kvgraft_testing.result import Result

__all__ = ["CheckedTier", "check_tier"]

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Of the tier's process, unless they are set: a fork has no threads of the process it came from."""


class CheckedTier:
    """A tier in its process, ready for clauses.

    Args:
        target: `pkg.mod:Class`, or a store's URL.
        options: its options; `{directory}` in them stands for an empty directory, `{capacity}` for
            `capacity_nbytes`.
        capacity_nbytes: bytes of its capacity.
        durable: whether it promises that pages outlive its process.
        log: where the tier and its engine write to; nowhere by default.

    Attributes:
        kind: the kind of tier.
        engine: the engine whose classes drive it, with its version.
        idents: its clauses, in the order of the rules.

    Raises:
        ConfigError: there is no such class, it is no tier, or it cannot be opened.
    """

    def __init__(
        self,
        target: str,
        options: Mapping[str, Any] | None = None,
        *,
        capacity_nbytes: int = 64 << 20,
        durable: bool = False,
        log: Path | None = None,
    ) -> None:
        self.target = target
        with (log or Path(os.devnull)).open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvgraft_testing.tiers.serving"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**ENVIRONMENT, **os.environ},
            )
        try:
            hello = self._ask(
                {
                    "name": target,
                    "options": dict(options or {}),
                    "capacity_nbytes": capacity_nbytes,
                    "is_durable": durable,
                }
            )
        except BaseException:
            self.close()
            raise
        if "refused" in hello:
            self.close()
            raise ConfigError(f"tier {target!r}: {hello['refused']}")
        self.kind: str = hello["kind"]
        self.engine: str = hello["engine"]
        self.idents: tuple[str, ...] = tuple(hello["idents"])

    def decide(self, ident: str) -> Result:
        """One clause."""
        return Result.of_json(self._ask({"decide": ident}))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.terminate()
        self._process.wait()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            status = self._process.wait()
            raise ConfigError(f"tier {self.target!r}: its process ended with status {status}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def check_tier(
    target: str,
    options: Mapping[str, Any] | None = None,
    *,
    capacity_nbytes: int = 64 << 20,
    durable: bool = False,
    log: Path | None = None,
    progress: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run every clause on one tier; minutes.

    Args:
        target: `pkg.mod:Class`, or a store's URL; see `CheckedTier`, as for the others.
        options: its options.
        capacity_nbytes: bytes of its capacity.
        durable: whether it promises that pages outlive its process.
        log: where the tier and its engine write to.
        progress: called with each result as it comes.

    Returns:
        One result per clause.

    Raises:
        ConfigError: as `CheckedTier` says.
    """
    tier = CheckedTier(target, options, capacity_nbytes=capacity_nbytes, durable=durable, log=log)
    results = []
    try:
        for ident in tier.idents:
            results.append(tier.decide(ident))
            progress(results[-1])
    finally:
        tier.close()
    return results
