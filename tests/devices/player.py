"""An engine that plays its model as kernels of a simulated device, and waits for next to nothing.

Every layer of a step is one kernel: it reads the rows that attention would read, checks their
stamps as it runs, and writes new rows. Every other load is read behind the event of each layer.
The host waits only where the cache does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvgraft import CacheConfig, Tier, TokenKey, WritePolicy
from kvgraft.assembly import parts_of
from kvgraft.cache import Cache
from kvgraft.config import GuardMode
from kvgraft.devices import SIMULATED
from kvgraft.requests.request import Request
from kvgraft.tree.component import TreeComponent
from kvgraft_accelerator import Accelerator
from kvgraft_accelerator.streams import StreamTicket
from kvgraft_testing.simulated import SimulatedDevice

__all__ = ["COMPONENTS", "Draw", "Player"]

COMPONENTS = {
    "full": {"head_dim": 16},
    "swa": {"window": 6, "head_dim": 16},
    "mamba": {"states": 9, "host_states": 9},
    "hisparse": {"hot_tokens": 4, "max_running": 8},
}
"""Two planes of a page are 64 bytes each, so that a backup gathers them."""

PROMPTS = 4
"""Conversations that share prefixes."""

MOST = 4
"""Requests at a time."""

Draw = Callable[[int], int]
"""Draws one of `n`."""


class Player:
    """Serves requests on a simulated device.

    Args:
        device: where.
        names: components.
        policy: when data is backed up.
        name: the cache's name of the device.
        pages: of each pool on DEVICE.
        guard: whether the guard checks every call.

    Attributes:
        wrong: reads of other bytes than those computed.
        operations: calls made so far.
    """

    def __init__(
        self,
        device: SimulatedDevice | Accelerator,
        names: Sequence[str] = ("full",),
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        *,
        name: str = SIMULATED,
        pages: int = 24,
        guard: GuardMode = GuardMode.OFF,
    ) -> None:
        config = CacheConfig(
            components={name: COMPONENTS[name] for name in names},
            page_size=2,
            device_tokens=2 * pages,
            host_tokens=3 * pages,
            write_policy=policy,
            device=name,
            transfer_timeout_s=60.0,
            guard=guard,
            guard_full_check=20,
        )
        parts = parts_of(config)
        parts.runtime = device
        if isinstance(device, SimulatedDevice):
            self.device = device
        self.cache = Cache(config, parts=parts)
        self.live: list[Request] = []
        self.wrong: list[str] = []
        self.operations = 0
        self._n_begun = 0
        self._layers = sorted(
            {spec.layer for each in self.cache.mounted for spec in each.component.device.specs}
        )

    # -- a request's life

    def begin(self, tokens: Iterable[int], reserve: int = 0) -> Request | None:
        """Match and admit; None if there is no room now."""
        request = self.cache.begin(TokenKey(tokens), reserve=reserve, chunk=4)
        if not self.cache.admit(request).admitted:
            self.cache.abort(request)
            return None
        self._n_begun += 1
        for transfer in self.cache.load_back(request):
            ticket = transfer.ticket
            assert isinstance(ticket, StreamTicket)
            for layer in ticket.layers if self._n_begun % 2 else ():
                self._read_arrival(ticket, layer)
        self.live.append(request)
        return request

    def _read_arrival(self, ticket: StreamTicket, layer: int) -> None:
        """A kernel reads a layer of a load, behind the layer's event."""
        event = ticket.layer_event(layer)
        assert event is not None
        self.device.compute().wait(event)
        for copy in ticket.copies:
            if copy.layer == layer:
                wanted = copy.source[copy.source_rows].clone()

                def check(
                    rows: torch.Tensor,
                    index: torch.Tensor = copy.target_rows,
                    wanted: object = wanted,
                ) -> None:
                    if not torch.equal(rows[index], wanted):  # type: ignore[arg-type]
                        self.wrong.append(f"layer {layer} of a load")

                self.device.launch(
                    f"attention over a load, layer {layer}",
                    check,
                    reads=[(copy.target, copy.target_rows)],
                )

    def step(self, request: Request) -> bool:
        """Compute the next chunk, or decode one token; false if it must wait."""
        if not request.ready:
            self.cache.poll()
            if not request.ready:
                return False
        if request.load_failed:
            self.end(request, finish=False)
            return True
        if request.computed < request.prompt:
            n_tokens = self.cache.next_chunk(request)
        else:
            request.key.extend([request.computed + 10_000])
            n_tokens = 1
        if not n_tokens or not self.cache.allocate(request, n_tokens):
            return False
        self._forward(request, n_tokens)
        self.cache.computed(request, n_tokens)
        return True

    def end(self, request: Request, *, finish: bool) -> None:
        """Finish or abort."""
        self.live.remove(request)
        if finish and request.ready:
            self.cache.finish(request)
        else:
            self.cache.abort(request)

    def serve(self, tokens: Iterable[int], decode: int = 0) -> Request:
        """A whole life, alone."""
        request = self.begin(tokens, decode)
        assert request is not None
        for transfer in list(request.waits):
            assert transfer.ticket.wait(60)
        end = request.prompt + decode
        while request.computed < end:
            assert self.step(request)
            self.cache.checkpoint(request)
        self.end(request, finish=True)
        return request

    def empty_device(self) -> None:
        """Evict everything that nobody pins, once its copies have ended."""
        assert self.cache.drain()
        for component in self.cache.tree.components:
            self.cache.evict(component.name, component.device.capacity)

    def close(self) -> None:
        """End everything; all bytes were right, and all accesses in order."""
        for request in list(self.live):
            self.end(request, finish=True)
        assert self.cache.drain()
        self.cache.check_integrity()
        self.cache.close()
        self.finish()
        assert self.wrong == []

    def finish(self) -> None:
        """Everything that was submitted has run, in order."""
        self.device.finish()

    # -- random requests

    def play(self, draw: Draw, n_operations: int) -> None:
        """Calls in any order an engine may make them."""
        for _ in range(n_operations):
            self.operations += 1
            kind = draw(10)
            if kind == 0 and len(self.live) < MOST:
                prompt, length = draw(PROMPTS), 3 + draw(20)
                begun = self.begin([prompt] * 4 + list(range(length)), draw(4))
                if begun is not None and draw(4) == 3:
                    self.end(begun, finish=False)  # its load goes on
            elif kind == 1:
                self.cache.poll()
            elif kind == 2:
                components = self.cache.tree.components
                component = components[draw(len(components))]
                self.cache.evict(component.name, 1 + draw(4))
            elif self.live:
                request = self.live[draw(len(self.live))]
                if kind == 3:
                    self.end(request, finish=False)
                elif kind == 4 and request.ready and request.computed:
                    self.cache.checkpoint(request)
                elif request.computed >= request.total:
                    self.end(request, finish=True)
                else:
                    self.step(request)

    # -- kernels

    def _forward(self, request: Request, n_tokens: int) -> None:
        """One kernel for each layer."""
        start, end = request.computed, request.computed + n_tokens
        size = self.cache.tree.page_size
        for layer in self._layers:
            reads: list[tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.int64]]] = []
            writes: list[tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.int64]]] = []
            for component in self.cache.tree.components:
                boundary = -(-start // size)
                old = [
                    page for span in component.reach_pages.spans(boundary) for page in range(*span)
                ]
                new = range(start // size, -(-end // size))
                for pages, upto, into in ((old if start else [], start, reads), (new, end, writes)):
                    for tier, slots, wanted in self._rows(request, component, pages, upto):
                        mounted = self.cache.mounted[component.index].component
                        pool = mounted.device if tier is Tier.DEVICE else mounted.host
                        assert pool is not None
                        for spec, lanes in zip(pool.specs, pool.lanes):
                            if spec.layer == layer:
                                stamps = self._stamps((component.name, *spec[:2]), wanted)
                                into.append((lanes, torch.tensor(slots), stamps))
            self._launch(f"forward of {start}..{end}, layer {layer}", reads, writes)

    def _launch(self, label: str, reads: list, writes: list) -> None:  # type: ignore[type-arg]
        def run(*rows: torch.Tensor) -> None:
            for plane, (_, slots, stamps) in zip(rows, reads):
                if not (plane[slots].numpy() == stamps[:, None]).all():
                    self.wrong.append(label)
            for plane, (_, slots, stamps) in zip(rows[len(reads) :], writes):
                plane.numpy()[slots.numpy()] = stamps[:, None]

        self.device.launch(
            label,
            run,
            reads=[(lanes, slots) for lanes, slots, _ in reads],
            writes=[(lanes, slots) for lanes, slots, _ in writes],
        )

    def _rows(
        self, request: Request, component: TreeComponent, pages: Iterable[int], end: int
    ) -> Iterator[tuple[Tier, list[int], list[tuple[bytes, int]]]]:
        """Per tier, slots and the tokens that each was computed from."""
        data, size, pages = bytes(request.key.data), self.cache.tree.page_size, list(pages)
        if not pages:
            return
        if component.is_state:
            slot = self.cache.state_slot(request, component.name)
            yield Tier.DEVICE, [slot], [(data[: end * 4], 0)]
            return
        tables = {Tier.DEVICE: self.cache.table(request, component.name)}
        if component.home_is_host:
            tables[Tier.HOST] = self.cache.host_table(request, component.name)
        per_page = component.slots_per_page
        for tier, table in tables.items():
            found = [
                (int(table[page * per_page + sub]), (data[: min(end, (page + 1) * size) * 4], sub))
                for page in pages
                for sub in range(per_page)
                if page * per_page + sub < len(table)
            ]
            yield tier, [slot for slot, _ in found], [wanted for _, wanted in found]

    def _stamps(
        self, plane: tuple[object, ...], wanted: list[tuple[bytes, int]]
    ) -> npt.NDArray[np.int64]:
        seed = zlib.crc32(repr(plane).encode())
        return np.array([zlib.crc32(data, seed + sub) % 30_000 + 1 for data, sub in wanted])
