"""Limits of a backend's calls, and of its failures."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SupervisionLimits"]


@dataclass(frozen=True)
class SupervisionLimits:
    """Bounds of supervision.

    Attributes:
        deadline_s: longest time for a call of the backend, from when it begins, unless the call
            says otherwise.
        queue_timeout_s: longest time for which a ticket waits in line while nothing of it is
            served.
        n_workers: threads for calls; while one checks its data, others wait for the disk.
        max_abandoned: threads that may hang in calls before they are no longer replaced.
        batch_nbytes: most payload that goes into one backend call; more is cut into several.
        batch_keys: most keys, the same.
        failure_limit: failing calls in a row that open the breaker.
        cooldown_s: seconds to the first trial; doubles with each that fails.
        cooldown_limit_s: longest time to a trial.
        hinted_keys: keys whose last answer `probably_has` remembers; 0.2 KiB each after its first
            use.
        hint_absent_s: seconds for which it remembers that a key was not there.
        lend_memory: a synchronous backend reads into the caller's memory; if a call outlasts its
            deadline, the ticket is not `done` until it returns. False: it reads into `Storage`'s
            own, at the cost of a copy, and a ticket is `done` at its deadline, even if a call
            hangs.
    """

    deadline_s: float = 5.0
    queue_timeout_s: float = 60.0
    n_workers: int = 8
    max_abandoned: int = 4
    batch_nbytes: int = 8 << 20
    batch_keys: int = 256
    failure_limit: int = 3
    cooldown_s: float = 1.0
    cooldown_limit_s: float = 60.0
    hinted_keys: int = 65_536
    hint_absent_s: float = 1.0
    lend_memory: bool = True
