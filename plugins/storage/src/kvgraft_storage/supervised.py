"""A store for a scheduler: calls return at once and tickets end in time.

A backend runs on worker threads behind a circuit breaker. It may fail, stall, return wrong data or
be detached while the cache serves; callers see only misses and counters (S9, S10, S11).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from kvgraft.errors import ConfigError
from kvgraft_storage.attachment import Attachment
from kvgraft_storage.backend import Capabilities, StorageBackend
from kvgraft_storage.breaker import Access, BreakerState
from kvgraft_storage.calls import BackendFailure
from kvgraft_storage.canonical import Plain
from kvgraft_storage.completions import Completions
from kvgraft_storage.counters import Counters
from kvgraft_storage.events import Change, EventLog
from kvgraft_storage.fair_queue import TicketCalls
from kvgraft_storage.hints import Hints
from kvgraft_storage.keys import Address, Fingerprint
from kvgraft_storage.limits import SupervisionLimits
from kvgraft_storage.memory import Buffers, Memory, address_of, as_bytes, nbytes_of
from kvgraft_storage.status import WRONG, Status
from kvgraft_storage.ticket import Job, StorageTicket
from kvgraft_storage.workers import Staging

__all__ = ["Storage"]


class Storage:
    """A supervised store; every method but `close` returns at once.

    Any thread may call any method, and look at, wait for and cancel any ticket. Several calls of
    one thread may be carried out in another order; wait for a ticket where that matters.

    A buffer is anything contiguous with the buffer protocol, or a list or tuple of those: parts of
    one payload, in their order. Buffers must stay as they are until their ticket is done.

    Args:
        fingerprint: of the model that computes the data; data of another one is never returned.
        backend: the first store to attach, already open.
        limits: bounds of supervision; the defaults if None.
        clock: monotonic, in seconds.

    Attributes:
        counters: numbers of keys, by verb and status.
        store_number: counts the stores attached so far, and so identifies the current one.
    """

    def __init__(
        self,
        fingerprint: Fingerprint,
        backend: StorageBackend | None = None,
        limits: SupervisionLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fingerprint = fingerprint
        self.limits = limits or SupervisionLimits()
        self.counters = Counters()
        self.store_number = 0
        self._clock = clock
        self._lock = threading.RLock()
        self._events: EventLog | None = None
        self._hints: Hints | None = None
        self._registered: list[memoryview] = []
        self._attachment: Attachment | None = None
        if backend is not None:
            self.attach(backend)

    # -- attaching and detaching (S11)

    @property
    def attached(self) -> bool:
        """Whether there is a store that takes calls."""
        return self._attachment is not None and self._attachment.detaching is None

    @property
    def closed(self) -> bool:
        """Whether there is no store now, so that one can be attached."""
        return self._attachment is None or self._attachment.closed

    @property
    def state(self) -> BreakerState | None:
        """The stricter state of both breakers; None without a store."""
        return None if self._attachment is None else self._attachment.state

    def state_of(self, access: Access) -> BreakerState | None:
        """The state of the breaker for reads, or for writes; None without a store."""
        return None if self._attachment is None else self._attachment.breakers[access].state

    @property
    def last_error(self) -> str | None:
        """The store's last error, for people."""
        return None if self._attachment is None else self._attachment.last_error

    @property
    def n_abandoned(self) -> int:
        """Threads that hang in a call of the store."""
        return 0 if self._attachment is None else self._attachment.pool.n_abandoned

    def attach(self, backend: StorageBackend) -> None:
        """Use an open store from now on; it is closed when it is detached.

        Raises:
            ConfigError: it is no store or has invalid capabilities, there is one already, or one is
                still being detached.
        """
        if not isinstance(backend, StorageBackend):
            raise ConfigError(
                f"storage: a store is an open StorageBackend, not a {type(backend).__name__}; "
                "open one with kvgraft_storage.open_storage(url)"
            )
        with self._lock:
            if self._attachment is not None:
                self._attachment.poll()
                if not self._attachment.closed:
                    doing = "attached" if self.attached else "still being detached"
                    raise ConfigError(f"storage: a store is {doing}; detach it and wait until done")
            self._attachment = Attachment(
                backend, self.fingerprint.digest, self.limits, self.counters, self._clock
            )
            self.forget_store()
            if self._events is not None:
                self._observe(self._attachment, self._events)
            for memory in self._registered:
                self._register(self._attachment, memory)

    def detach(self, deadline_s: float | None = None) -> StorageTicket:
        """Refuse new calls, end the queued ones, and close the store.

        Returns:
            A ticket, done when the store is closed or the deadline has passed; `value` is True if
            it was closed in time. Without a store the ticket is done at once.
        """
        attachment = self._attachment
        if attachment is None:
            return self._ticket(0)
        return attachment.detach(self._seconds(deadline_s))

    def forget_store(self) -> None:
        """Count the store as a new one from now on, since its content will change."""
        with self._lock:
            self.store_number += 1
            if self._hints is not None:
                self._hints.clear()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Detach and wait, at the end of a process; whether the store was closed in time."""
        ticket = self.detach(timeout_s)
        return ticket.wait(timeout_s + 1.0) and (self._attachment is None or bool(ticket.value))

    def poll(self) -> None:
        """Enforce deadlines, retry a failed store, go on detaching; call it in every step."""
        if self._attachment is not None:
            self._attachment.poll()

    # -- names, and how calls end

    def address(self, digest: bytes, group: str = "kv", namespace: Plain = None) -> Address:
        """The address of data that an engine names by a hash of its own; see `Address.foreign`.

        Raises:
            ConfigError: see there.
        """
        return Address.foreign(self.fingerprint, digest, group, namespace)

    def completions(self) -> Completions:
        """A new queue that returns tickets when they are done, for one poll a step."""
        return Completions(self.poll)

    # -- calls

    def get(
        self,
        addresses: Sequence[Address],
        buffers: Sequence[object] | Buffers,
        deadline_s: float | None = None,
    ) -> StorageTicket:
        """Fetch payloads into buffers of exactly their length; OK means fully verified (S9).

        Wrong values are removed and counted. Lazy addresses and `Buffers` are made on a worker's
        thread, call by call.

        Args:
            addresses: the payloads' names.
            buffers: one each, or `Buffers`.
            deadline_s: longest time for one call of the store.

        Raises:
            ConfigError: unequal numbers of addresses and buffers, or a buffer that cannot be used.
        """
        views = _views("get", addresses, buffers, writable=True)

        def run(attachment: Attachment, job: Job, staging: Staging) -> list[Status] | None:
            mine = addresses[job.first : job.last]
            statuses = attachment.calls.get(job, staging, mine, views[job.first : job.last])
            self._note(attachment, "get", [each.key for each in mine], statuses)
            wrong = [each.key for each, told in zip(mine, statuses or ()) if told in WRONG]
            if wrong and job.call(self._clock()):
                self._discard(attachment, wrong)
            return statuses

        batches = self._batches(views.sizes(), self._capabilities.batch_get_nbytes)
        return self._submit("get", Access.READ, len(addresses), batches, run, deadline_s)

    def set(
        self,
        addresses: Sequence[Address],
        buffers: Sequence[object] | Buffers,
        deadline_s: float | None = None,
        *,
        only_missing: bool = False,
    ) -> StorageTicket:
        """Store payloads; OK means readable, and durable after the next `flush`.

        Args:
            addresses: the payloads' names.
            buffers: one each, or `Buffers`.
            deadline_s: longest time for one call of the store.
            only_missing: skip keys that `exists` reports; they are OK.

        Raises:
            ConfigError: unequal numbers of addresses and buffers, or a buffer that cannot be used.
        """
        views = _views("set", addresses, buffers, writable=False)
        can = self._capabilities
        longest = can.max_payload_nbytes

        def run(attachment: Attachment, job: Job, staging: Staging) -> list[Status] | None:
            mine, memory = addresses[job.first : job.last], views[job.first : job.last]
            if longest is not None and any(nbytes_of(each) > longest for each in memory):
                return [Status.TOO_LARGE] * job.n_keys
            known: frozenset[int] = frozenset()
            if only_missing:
                known = self._known(attachment, job, mine)
                self.counters.add("set.known", len(known))
            missing = [number for number in range(job.n_keys) if number not in known]
            if not missing:
                return [Status.OK] * job.n_keys
            job.asks, job.access = "set", Access.WRITE
            told = attachment.calls.set(
                job,
                staging,
                [mine[number] for number in missing],
                [memory[number] for number in missing],
            )
            if told is None:
                return None
            self._note(attachment, "set", [mine[number].key for number in missing], told)
            fresh = iter(told)
            return [Status.OK if number in known else next(fresh) for number in range(job.n_keys)]

        batches = self._batches(views.sizes(), can.batch_set_nbytes, longest)
        return self._submit("set", Access.WRITE, len(addresses), batches, run, deadline_s)

    def _known(
        self, attachment: Attachment, job: Job, addresses: Sequence[Address]
    ) -> frozenset[int]:
        """The keys of a job that the store says it has: a hint; its failure counts as a read's."""
        if not attachment.breakers[Access.READ].lets_pass:
            return frozenset()
        job.asks, job.access = "exists", Access.READ
        try:
            hints = attachment.calls.exists(job, addresses) or ()
        except BackendFailure as failure:
            attachment.note_failure(job, str(failure))
            hints = ()
        return frozenset(number for number, hint in enumerate(hints) if hint is Status.OK)

    def exists(
        self, addresses: Sequence[Address], deadline_s: float | None = None
    ) -> StorageTicket:
        """Whether keys are probably there (OK) or probably not (MISS): a hint."""

        def run(attachment: Attachment, job: Job, staging: Staging) -> list[Status] | None:
            mine = addresses[job.first : job.last]
            statuses = attachment.calls.exists(job, mine)
            self._note(attachment, "exists", [each.key for each in mine], statuses)
            return statuses

        n_keys = len(addresses)
        batches = self._batches(itertools.repeat(0, n_keys))
        return self._submit("exists", Access.READ, n_keys, batches, run, deadline_s)

    @property
    def evicts(self) -> bool:
        """Whether there is a store that takes calls and makes room by itself."""
        return self.attached and self._capabilities.evicts

    @property
    def touches(self) -> bool:
        """Whether there is a store that takes calls and uses `touch`."""
        attachment = self._attachment
        return self.attached and attachment is not None and attachment.calls.capabilities.touch

    def touch(self, addresses: Sequence[Address], deadline_s: float | None = None) -> StorageTicket:
        """Notify the store that payloads were used elsewhere: a hint, so that they stay.

        Args:
            addresses: in the order of use, the last one most recently. A sequence's pages are
                touched from its end to its start: a page is worth no more than those before it.
            deadline_s: longest time for one call of the store.

        Returns:
            OK for keys the store was notified of. A store without `Capabilities.touch` is not
            called.
        """
        if self.attached and not self.touches:
            ticket = self._ticket(len(addresses))
            ticket.refuse("touch", Status.OK)
            return ticket

        def run(attachment: Attachment, job: Job, staging: Staging) -> list[Status] | None:
            return attachment.calls.touch(job, addresses[job.first : job.last])

        n_keys = len(addresses)
        batches = self._batches(itertools.repeat(0, n_keys))
        return self._submit("touch", Access.READ, n_keys, batches, run, deadline_s)

    def remove(
        self, addresses: Sequence[Address], deadline_s: float | None = None
    ) -> StorageTicket:
        """Remove payloads; OK or MISS."""
        keys = [address.key for address in addresses]

        def run(attachment: Attachment, job: Job, staging: Staging) -> list[Status] | None:
            mine = keys[job.first : job.last]
            statuses = attachment.calls.remove(job, mine)
            self._note(attachment, "remove", mine, statuses)
            return statuses

        batches = self._batches(itertools.repeat(0, len(keys)))
        return self._submit("remove", Access.WRITE, len(keys), batches, run, deadline_s)

    def clear(self, deadline_s: float | None = None) -> StorageTicket:
        """Remove all of the store's data; `value` is True once that is done."""

        def clear(backend: StorageBackend) -> None:
            backend.clear()
            if self._hints is not None:
                self._hints.clear()
            if self._events is not None and not backend.capabilities.events:
                self._events.clear()

        return self.ask("clear", clear, deadline_s, access=Access.WRITE)

    def flush(self, deadline_s: float | None = None) -> StorageTicket:
        """Make the data of completed tickets durable; `value` is True if it is."""
        return self.ask("flush", lambda backend: backend.flush(), deadline_s, access=Access.WRITE)

    def ask(
        self,
        verb: str,
        question: Callable[[StorageBackend], object],
        deadline_s: float | None = None,
        *,
        access: Access = Access.READ,
    ) -> StorageTicket:
        """A call without keys, such as `ask("stats", lambda store: store.stats())`.

        Args:
            verb: its name in the counters.
            question: the call to make, on a worker's thread.
            deadline_s: longest time for the call.
            access: whether it reads or writes.

        Returns:
            A ticket whose `value` is the answer, True for None; it stays None without an answer.
        """
        return self._ask(verb, question, deadline_s, access, self._ticket(0))

    def _ask(
        self,
        verb: str,
        question: Callable[[StorageBackend], object],
        deadline_s: float | None,
        access: Access,
        ticket: StorageTicket,
    ) -> StorageTicket:
        def run(attachment: Attachment, job: Job, staging: Staging) -> list[Status] | None:
            answers = attachment.calls.ask(job, question)
            if answers is None:
                return None
            job.answer(True if answers[0] is None else answers[0])
            return []

        return self._submit(verb, access, 0, iter([(0, 0)]), run, deadline_s, ticket)

    # -- the store's content, without a call

    def probably_has(self, addresses: Sequence[Address]) -> list[bool | None]:
        """Whether payloads are there, from data in memory: at once, a microsecond or two a key.

        A hint, and it may be out of date: a True key may be evicted, and is then a miss of `get`; a
        False one may be stored by another process. While the breaker stops reads
        (`state_of(Access.READ)`), all keys are False. The last answers about
        `SupervisionLimits.hinted_keys` keys are remembered from the first call on; some backends,
        `file` among them, know all of their keys.

        Args:
            addresses: the payloads' names.

        Returns:
            Per address: True, probably there; False, probably not; None, not known, so ask
            `exists`, after which it is.
        """
        attachment = self._attachment
        if attachment is None or attachment.detaching is not None:
            return [False] * len(addresses)
        if not attachment.breakers[Access.READ].lets_pass:
            return [False] * len(addresses)
        hints = self._hints
        if hints is None:
            with self._lock:
                limits = self.limits
                made = Hints(limits.hinted_keys, limits.hint_absent_s, self._clock)
                hints = self._hints = self._hints or made
        told = attachment.calls.probably_has([address.key for address in addresses])
        return [
            hints.of(address.key) if hint is None else hint
            for address, hint in zip(addresses, told)
        ]

    def events(self, limit: int | None = None) -> EventLog:
        """The log of keys stored and dropped from the first call on; one per storage.

        It begins with `CLEARED` if another store is attached later. It has other processes' changes
        as far as the backend notices them.

        Args:
            limit: most events that wait to be taken; counts in the first call, 65,536 by default.
        """
        with self._lock:
            if self._events is None:
                self._events = EventLog() if limit is None else EventLog(limit)
                if self._attachment is not None:
                    self._observe(self._attachment, self._events)
            return self._events

    # -- memory

    def register(self, buffer: object) -> StorageTicket:
        """Announce memory that payloads will lie in, for this store and later ones.

        A backend with `Capabilities.registers` prepares it, such as for RDMA, and stores payloads
        from there without a copy; for others this does nothing. The memory must not be freed before
        the ticket of `unregister` is done. Register a whole pool at once.

        Returns:
            A ticket whose `value` is True once the memory is registered, False if that failed
            (`error` says why; calls work without) or no store is attached.

        Raises:
            ConfigError: no contiguous memory.
        """
        memory = _view("register", 0, buffer, writable=False)
        with self._lock:
            self._registered.append(memory)
            return self._register(self._attachment, memory)

    def unregister(self, buffer: object) -> StorageTicket:
        """Undo `register` of the same memory, after the tickets of its payloads are done.

        Raises:
            ConfigError: it is not registered.
        """
        memory = _view("unregister", 0, buffer, writable=False)
        place = address_of(memory), len(memory)
        with self._lock:
            known = [each for each in self._registered if (address_of(each), len(each)) == place]
            if not known:
                raise ConfigError(
                    f"storage unregister: {len(memory)} bytes at {place[0]:#x} are not registered; "
                    "give the memory that was given to register"
                )
            self._registered.remove(known[0])
            attachment = self._attachment
        if attachment is None or not attachment.calls.capabilities.registers:
            return self._answered(value=True)
        attachment.calls.registered.remove(memory)
        return self.ask("unregister", lambda backend: backend.unregister(known[0]))

    # -- inside

    @property
    def _capabilities(self) -> Capabilities:
        attachment = self._attachment
        return Capabilities() if attachment is None else attachment.calls.capabilities

    def _answered(self, *, value: bool) -> StorageTicket:
        ticket = self._ticket(0)
        ticket.value = value
        return ticket

    def _register(self, attachment: Attachment | None, memory: memoryview) -> StorageTicket:
        if attachment is None or not attachment.calls.capabilities.registers:
            return self._answered(value=attachment is not None)
        ticket = self._ticket(0)

        def register(backend: StorageBackend) -> bool:
            try:
                attachment.calls.register(memory)
            except BackendFailure as failure:  # no fault of calls for data
                ticket.error = f"register: {failure}"
                self.counters.add("register.errors")
                return False
            return True

        return self._ask("register", register, None, Access.WRITE, ticket)

    def _observe(self, attachment: Attachment, events: EventLog) -> None:
        events.clear()
        attachment.calls.observe(events)

    def _note(
        self,
        attachment: Attachment,
        verb: str,
        keys: Sequence[bytes],
        statuses: Sequence[Status] | None,
    ) -> None:
        """Record a call's answers, for `probably_has` and `events`."""
        if statuses is None:
            return
        if self._hints is not None:
            self._hints.note(verb, keys, statuses)
        if self._events is None or attachment.calls.capabilities.events:
            return
        change = {"set": Change.STORED, "remove": Change.REMOVED}.get(verb)
        if change is not None:
            done = [key for key, status in zip(keys, statuses) if status is Status.OK]
            self._events.add(change, done)

    def _seconds(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return self.limits.deadline_s
        if not isinstance(deadline_s, (int, float)):
            raise ConfigError(f"storage: a deadline is a number of seconds, not {deadline_s!r:.40}")
        return deadline_s

    def _ticket(self, n_keys: int) -> StorageTicket:
        if self._attachment is not None:
            return self._attachment.ticket(n_keys)
        return StorageTicket(n_keys, self.poll, self.counters.add_statuses)

    def _submit(
        self,
        verb: str,
        access: Access,
        n_keys: int,
        batches: Iterator[tuple[int, int]],
        run: Callable[[Attachment, Job, Staging], list[Status] | None],
        deadline_s: float | None,
        ticket: StorageTicket | None = None,
    ) -> StorageTicket:
        self.poll()
        ticket = ticket or self._ticket(n_keys)
        attachment = self._attachment
        if attachment is None or attachment.detaching is not None:
            ticket.refuse(verb, Status.DOWN)
            return ticket
        call = partial(run, attachment)
        attachment.submit(
            TicketCalls(ticket, verb, access, batches, call, self._seconds(deadline_s))
        )
        return ticket

    def _discard(self, attachment: Attachment, keys: Sequence[bytes]) -> None:
        """Remove damaged data before its ticket ends, so that the next write of the key stays."""
        try:
            told = attachment.calls.discard(keys)
        except BackendFailure as failure:
            attachment.last_error = f"discard: {failure}"
            self.counters.add("discard.errors")
        else:
            self.counters.add_statuses("discard", told)
            self._note(attachment, "remove", keys, told)

    def _batches(
        self, sizes: Iterable[int], most: int | None = None, longest: int | None = None
    ) -> Iterator[tuple[int, int]]:
        most = self.limits.batch_nbytes if most is None else min(most, self.limits.batch_nbytes)
        return _cut(sizes, most, self.limits.batch_keys, longest)


def _cut(
    sizes: Iterable[int], most: int, most_keys: int, longest: int | None
) -> Iterator[tuple[int, int]]:
    """Runs of keys for one call each; a payload that is too long is alone."""
    first, total, number = 0, 0, -1
    for number, size in enumerate(sizes):
        alone = longest is not None and size > longest
        full = total + size > most or number - first >= most_keys
        if number > first and (full or alone):
            yield first, number
            first, total = number, 0
        total += size
        if alone:
            yield first, number + 1
            first, total = number + 1, 0
    if first <= number:
        yield first, number + 1


class _Views(Buffers):
    """Buffers that are there."""

    def __init__(self, views: list[Memory]) -> None:
        self._views = views

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, part: slice) -> list[Memory]:
        return self._views[part]

    def sizes(self) -> Iterable[int]:
        return map(nbytes_of, self._views)


def _views(
    verb: str,
    addresses: Sequence[Address],
    buffers: Sequence[object] | Buffers,
    *,
    writable: bool,
) -> Buffers:
    if len(addresses) != len(buffers):
        raise ConfigError(
            f"storage {verb}: {len(addresses)} addresses and {len(buffers)} buffers; "
            "give one buffer per address"
        )
    if isinstance(buffers, Buffers):
        return buffers
    views: list[Memory] = []
    for number, buffer in enumerate(buffers):
        if isinstance(buffer, (list, tuple)) and len(buffer) != 1:
            parts = tuple(_view(verb, number, each, writable=writable) for each in buffer)
            if not parts:
                raise ConfigError(f"storage {verb}: buffer {number} has no parts; give memory")
            views.append(parts)
        else:
            whole = buffer[0] if isinstance(buffer, (list, tuple)) else buffer
            views.append(_view(verb, number, whole, writable=writable))
    return _Views(views)


def _view(verb: str, number: int, buffer: object, *, writable: bool) -> memoryview:
    try:
        view = as_bytes(buffer)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"storage {verb}: buffer {number} is a {type(buffer).__name__}: {error}; "
            "give contiguous memory"
        ) from None
    if not len(view) or (writable and view.readonly):
        fault = "read-only" if len(view) else "empty"
        raise ConfigError(f"storage {verb}: buffer {number} is {fault}; give other memory")
    return view
