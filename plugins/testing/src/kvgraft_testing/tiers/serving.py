"""The process of a tier: `python -m kvgraft_testing.tiers.serving`, questions and answers as JSON.

It imports the tier and its engine once, and never opens it: every clause is a fork.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import time
from typing import IO, Any

from kvgraft.errors import ConfigError, ContractViolation
from kvgraft_testing.result import Result, Status
from kvgraft_testing.tiers.clause import TIER_CLAUSES, NotApplicable, TierClause
from kvgraft_testing.tiers.clauses import register_settings
from kvgraft_testing.tiers.driver import Kind, Target
from kvgraft_testing.tiers.subject import TierSubject

__all__ = ["load_target"]

CLAUSE_S = 240.0
"""Seconds after which a clause that does not end has failed."""

BASES = {
    "vllm.v1.kv_offload.tiering.base.SecondaryTierManager": ("vllm", "VllmKind"),
    "sglang.srt.mem_cache.hicache_storage.HiCacheStorage": ("sglang", "SglangKind"),
    "kvgraft_storage.backend.StorageBackend": ("stores", "StoreKind"),
}
"""Modules and names of kinds, by the class that a tier must extend."""


def load_target(name: str, **given: Any) -> tuple[Target, Kind]:
    """The class or store of a name, and its kind; the rest is for `Target`.

    Raises:
        ConfigError: there is no such module or class, or it is no tier.
    """
    path, colon, attribute = name.partition(":")
    is_class = colon and attribute.isidentifier() and all(map(str.isidentifier, path.split(".")))
    if not is_class:
        if not colon:
            raise ConfigError("it is neither PACKAGE.MODULE:CLASS nor a store's URL")
        return Target(name, None, **given), _kind("stores", "StoreKind")
    loaded = _load(path, attribute)
    lineage = [f"{each.__module__}.{each.__qualname__}" for each in loaded.__mro__]
    for base, place in BASES.items():
        if base in lineage:
            return Target(name, loaded, **given), _kind(*place)
    raise ConfigError(f"it extends none of {', '.join(BASES)}")


def _load(path: str, attribute: str) -> type:
    if importlib.util.find_spec("sglang") and not importlib.util.find_spec("sgl_kernel"):
        from kvgraft_testing.tiers.stand_ins import install

        install()
    try:
        loaded = getattr(importlib.import_module(path), attribute, None)
    except ImportError as error:
        raise ConfigError(f"module {path} cannot be imported: {error}") from error
    if not isinstance(loaded, type):
        raise ConfigError(f"module {path} has no class {attribute}")
    return loaded


def _kind(module: str, name: str) -> Kind:
    kind: Kind = getattr(importlib.import_module(f"kvgraft_testing.tiers.{module}"), name)()
    return kind


def _clause(subject: TierSubject, entry: TierClause) -> dict[str, Any]:
    """One clause, decided in this process."""
    try:
        entry.check(subject)
    except ContractViolation as violation:
        return {"status": "failed", "rule": violation.rule, "evidence": violation.evidence}
    except NotApplicable as reason:
        return {"status": "not applicable", "evidence": str(reason)}
    except BaseException as error:  # noqa: BLE001 - a tier's is a finding
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return {"status": "failed", "evidence": f"it raised {told:.400}"}
    return {"status": "passed"}


def _forked(subject: TierSubject, entry: TierClause, longest_s: float = CLAUSE_S) -> dict[str, Any]:
    """One clause, decided in a fork that is ended with all that it started."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        os.close(read)
        with os.fdopen(write, "w") as stream:
            json.dump(_clause(subject, entry), stream)
        os._exit(0)
    os.close(write)
    received, end = bytearray(), time.monotonic() + longest_s
    while select.select([read], [], [], max(0.0, end - time.monotonic()))[0]:
        more = os.read(read, 1 << 16)
        if not more:
            break
        received += more
    else:
        received[:] = json.dumps(
            {"status": "failed", "evidence": f"it did not end within {longest_s:.0f} s"}
        ).encode()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(read)
    subject.kind.clean(pid)
    if not received:
        ended = f"its process ended with status {os.waitstatus_to_exitcode(status)}"
        return {"status": "failed", "evidence": ended}
    told: dict[str, Any] = json.loads(received)
    return told


def _opened(subject: TierSubject) -> None:
    with subject.place() as directory, subject.open(directory):
        pass


def serve(questions: IO[str], answers: IO[str]) -> None:
    """Answer questions until there are no more."""

    def answer(told: dict[str, Any]) -> None:
        answers.write(json.dumps(told) + "\n")
        answers.flush()

    given = json.loads(questions.readline())
    try:
        target, kind = load_target(**given)
    except ConfigError as error:
        answer({"refused": str(error)})
        return
    register_settings(dict(kind.settings))
    subject = TierSubject(target, kind)
    opened = _forked(subject, TierClause("O11", "opens", "It can be opened.", _opened), 60.0)
    if opened["status"] != "passed":
        answer({"refused": f"it cannot be opened and shut down: {opened['evidence']}"})
        return
    order = sorted(TIER_CLAUSES.values(), key=lambda each: int(each.rule[1:]))
    idents = [each.ident for each in order]
    answer({"kind": kind.name, "engine": kind.version(), "idents": idents})
    for line in questions:
        entry = TIER_CLAUSES[json.loads(line)["decide"]]
        start = time.monotonic()
        told = {"rule": entry.rule, "evidence": "", **_forked(subject, entry)}
        result = Result(
            target.name,
            entry.ident,
            told["rule"],
            entry.sentence,
            Status(told["status"]),
            told["evidence"],
            seconds=round(time.monotonic() - start, 3),
        )
        answer(result.as_json())


if __name__ == "__main__":
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines write to standard output as well
    serve(sys.stdin, stream)
