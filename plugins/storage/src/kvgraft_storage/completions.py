"""A queue of finished tickets, so that a scheduler polls it instead of every ticket."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from kvgraft.errors import ConfigError
from kvgraft_storage.ticket import STEP_S, StorageTicket

__all__ = ["Completions"]


class Completions:
    """Returns watched tickets when they are done: each once, in the order in which they ended.

    Any thread may call any method. Made by `Storage.completions`; a storage may have several.

        done = storage.completions()
        done.watch(storage.get(addresses, buffers), tag=job_id)
        for ticket in done.take():  # in every step; never blocks
            finish(ticket.tag, ticket.statuses)

    `fileno` makes it usable with `select`, `epoll` and event loops: the descriptor is readable
    while a ticket can be taken. Only `take` and `wait` check deadlines, so wait for the descriptor
    with a timeout.

    Args:
        poll: enforces deadlines, without blocking.
    """

    def __init__(self, poll: Callable[[], None]) -> None:
        self._poll = poll
        self._done: deque[StorageTicket] = deque()
        self._n_watched = 0
        self._changed = threading.Condition()
        self._fd = -1
        self._closed = False

    def __len__(self) -> int:
        """Tickets that can be taken now."""
        return len(self._done)

    @property
    def n_pending(self) -> int:
        """Tickets watched and not taken yet."""
        return self._n_watched

    def watch(self, ticket: StorageTicket, tag: object = None) -> StorageTicket:
        """Return this ticket from `take` when it is done; at once if it is done already.

        Args:
            ticket: of a call of the same storage.
            tag: kept as `ticket.tag`, such as an engine's own job.

        Returns:
            The ticket.

        Raises:
            ConfigError: the ticket is watched already, or this queue was closed.
        """
        with self._changed:
            if self._closed:
                raise ConfigError("storage completions: closed; make new ones to watch a ticket")
            self._n_watched += 1
        try:
            ticket.watch(self._add, tag)
        except ConfigError:
            with self._changed:
                self._n_watched -= 1
            raise
        return ticket

    def take(self, limit: int | None = None) -> list[StorageTicket]:
        """Take the tickets that are done, oldest first; never blocks.

        Args:
            limit: most tickets to take; None for all.
        """
        self._poll()
        with self._changed:
            n = len(self._done) if limit is None else min(limit, len(self._done))
            taken = [self._done.popleft() for _ in range(n)]
            self._n_watched -= n
            if self._fd >= 0 and taken and not self._done:
                os.eventfd_read(self._fd)
        return taken

    def wait(self, timeout_s: float) -> bool:
        """Wait until a ticket can be taken, at most `timeout_s` seconds; whether there is one."""
        end = time.monotonic() + timeout_s
        while True:
            self._poll()
            with self._changed:
                left = end - time.monotonic()
                if self._done or left <= 0 or self._closed:
                    return bool(self._done)
                self._changed.wait(min(left, STEP_S))

    def fileno(self) -> int:
        """A descriptor that is readable while a ticket can be taken; closed by `close`.

        Raises:
            ConfigError: this queue was closed.
            OSError: the process has no descriptor left.
        """
        with self._changed:
            if self._closed:
                raise ConfigError("storage completions: closed; make new ones for a descriptor")
            if self._fd < 0:
                self._fd = os.eventfd(int(bool(self._done)), os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._fd

    def close(self) -> None:
        """Close the descriptor and end every `wait`; tickets that are done can still be taken."""
        with self._changed:
            self._closed = True
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
            self._changed.notify_all()

    def _add(self, ticket: StorageTicket) -> None:
        with self._changed:
            self._done.append(ticket)
            if self._fd >= 0 and len(self._done) == 1:
                os.eventfd_write(self._fd, 1)
            self._changed.notify_all()
