"""Runs replays in parallel processes: a replay keeps one CPU busy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from kvgraft.errors import ConfigError, KvgraftError
from kvgraft_replay.planning.worker import Done, Progress, Refused, replay_one
from kvgraft_replay.replay import ReplaySettings
from kvgraft_replay.workload import Workload

__all__ = ["Replays", "usable_processors"]

# Not the working directory: its files are no modules of ours.
START = (
    "import sys; sys.path[:] = [each for each in sys.path if each];"
    "from kvgraft_replay.planning.worker import main; main(int(sys.argv[1]))"
)

STOP_S = 10.0
"""Longest wait for a process to stop."""


@dataclass(slots=True)
class _Worker:
    """A process, our end of its pipe, and its current replay."""

    process: subprocess.Popen[bytes]
    connection: Connection
    task: int = -1


def usable_processors() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


class Replays:
    """Replays one workload at sizes that become known one by one.

    Its processes run until it is closed, so each loads torch once.

    Args:
        workload: the same for all.
        settings: the same for all, except the cache's.
        n_processes: concurrent replays; for one no process is started.
    """

    def __init__(self, workload: Workload, settings: ReplaySettings, n_processes: int) -> None:
        self._workload, self._settings = workload, settings
        self._n_processes = n_processes
        self._workers: list[_Worker] = []

    def run(
        self, caches: Sequence[dict[str, Any]], progress: Callable[[int, float], None]
    ) -> list[Mapping[str, Any]]:
        """Replay the workload with each cache, several at a time; results in order.

        Args:
            caches: settings of each cache.
            progress: called with the index of a replay and its finished share.

        Raises:
            ConfigError: a replay that cannot be run; the processes are ended then.
            KvgraftError: a process that ended before its replay did; the same.
        """
        n_workers = min(self._n_processes, len(caches))
        if n_workers == 1 and not self._workers:
            return [
                replay_one(
                    self._workload,
                    replace(self._settings, cache=cache),
                    _share_of(task, progress),
                )
                for task, cache in enumerate(caches)
            ]
        try:
            return self._run(caches, n_workers, progress)
        except BaseException:
            self.close()
            raise

    def _run(
        self,
        caches: Sequence[dict[str, Any]],
        n_workers: int,
        progress: Callable[[int, float], None],
    ) -> list[Mapping[str, Any]]:
        left = deque(range(len(caches)))
        done: dict[int, Mapping[str, Any]] = {}
        while len(self._workers) < n_workers:
            worker = _started()
            self._workers.append(worker)
            _send(worker, (self._workload, self._settings))
        busy = self._workers[:n_workers]
        for worker in busy:
            _next(worker, left, caches)
        while busy:
            ready = wait([worker.connection for worker in busy])
            for worker in [each for each in busy if each.connection in ready]:
                message = _received(worker)
                if isinstance(message, Refused):
                    raise ConfigError(message.message)
                if isinstance(message, Progress):
                    progress(worker.task, message.ended / message.expected)
                    continue
                progress(worker.task, 1.0)
                done[worker.task] = message.result
                if left:
                    _next(worker, left, caches)
                else:
                    busy.remove(worker)
        return [done[task] for task in range(len(caches))]

    def close(self) -> None:
        """End the processes."""
        while self._workers:
            _stop(self._workers.pop())


def _share_of(task: int, progress: Callable[[int, float], None]) -> Callable[[int, int], None]:
    """Tells `progress` the share of one replay that is done."""
    return lambda ended, expected: progress(task, ended / expected)


def _started() -> _Worker:
    ours, theirs = Pipe()
    with theirs:
        # A new session: Ctrl-C reaches the command, which stops its workers.
        process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    return _Worker(process, ours)


def _next(worker: _Worker, left: deque[int], caches: Sequence[dict[str, Any]]) -> None:
    worker.task = left.popleft()
    _send(worker, caches[worker.task])


def _send(worker: _Worker, message: object) -> None:
    try:
        worker.connection.send(message)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise _lost(worker) from error


def _received(worker: _Worker) -> Progress | Done | Refused:
    try:
        message: Progress | Done | Refused = worker.connection.recv()
    except (EOFError, ConnectionResetError) as error:
        raise _lost(worker) from error
    return message


def _lost(worker: _Worker) -> KvgraftError:
    status = worker.process.wait(STOP_S)
    reason = f"signal {-status}" if status < 0 else f"status {status}"
    return KvgraftError(
        f"a process that replays ended with {reason}; give fewer --processes if memory is short"
    )


def _stop(worker: _Worker) -> None:
    worker.connection.close()
    worker.process.terminate()
    try:
        worker.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        worker.process.wait()
