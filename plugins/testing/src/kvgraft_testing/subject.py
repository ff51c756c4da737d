"""The component under test, and the small caches it is tested in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from kvgraft.assembly import expect_device, parts_of
from kvgraft.cache import Cache
from kvgraft.config import CacheConfig, WritePolicy
from kvgraft.contract import COPY_ON_WRITE, HOST_MIRROR
from kvgraft.devices import SIMULATED, torch_device
from kvgraft.errors import (
    ConfigError,
    ContractViolation,
    KvgraftError,
    PluginError,
    TransferError,
)
from kvgraft.packages.dispatch import Mounted, mount, parse_options
from kvgraft.packages.registry import Plugin
from kvgraft.pools import BuildContext
from kvgraft.pools.component import run_copy
from kvgraft.pools.plan import PoolPlan
from kvgraft.reach import Reach
from kvgraft.terms import Trailing
from kvgraft.transfers import PlaneCopy, TransferEngine
from kvgraft.types import Kind, Tier
from kvgraft_accelerator.protocol import StreamRuntime
from kvgraft_accelerator.streams import StreamTransferEngine
from kvgraft_testing.machine import Drive, Setup, drive, references, setups_for
from kvgraft_testing.machine.accelerators import small_accelerator
from kvgraft_testing.machine.driving import quiet_log
from kvgraft_testing.machine.fitting import LARGER_PAGES, fitting_sizes
from kvgraft_testing.machine.harness import Harness
from kvgraft_testing.machine.judging import Judge, Stopped
from kvgraft_testing.machine.sizes import Sizes
from kvgraft_testing.production.clocks import clocks_moved
from kvgraft_testing.production.running import Run, apart, beside
from kvgraft_testing.profiles import Profile

__all__ = ["PAGE_SIZES", "Subject"]

PAGE_SIZES = (1, 2, 4)
"""Page sizes, in tokens, at which components are tested, if they accept them."""

SHORT = 16
"""Tokens of a reach that sequences of the state machine are longer than."""

NARROW = (5, 8, 16, 64)
"""Tokens that a longer reach is cut to, the first that the component accepts."""

DAY_S = 86_400

DEVICE_S = 60.0
"""Seconds for which copies of some pages are waited for."""

HOST_REACHES = ("cpu", SIMULATED)
"""Devices whose pools are tested on the CPU, except those of the state machine."""


class Subject:
    """One component with its options.

    Args:
        plugin: the component package.
        options: its options, as text or values.
        profile: the effort of the state machine.
        ignored: rules it is known to break; the state machine goes on past them.
        device: the device of the state machine's caches, and of all pools unless it is simulated.

    Attributes:
        name: the component's name.
        replaced: names of kvgraft that its code replaced; empty if none.
    """

    def __init__(
        self,
        plugin: Plugin,
        options: Mapping[str, Any],
        profile: Profile,
        ignored: frozenset[str] = frozenset(),
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.name = plugin.name
        self.plugin = plugin
        self.options = dict(options)
        self.profile = profile
        self.ignored = ignored
        self.replaced = ""

    # -- its declaration

    @property
    def is_state(self) -> bool:
        """Whether it is a state component."""
        return self.plugin.declaration.kind is Kind.STATE

    @property
    def is_mirrored(self) -> bool:
        """Whether it says that it can be backed up and loaded back."""
        return HOST_MIRROR in self.plugin.declaration.capabilities

    @property
    def can_copy(self) -> bool:
        """Whether it says that its states can be copied."""
        return COPY_ON_WRITE in self.plugin.declaration.capabilities

    @property
    def home_is_host(self) -> bool:
        """Whether its canonical copy is on HOST."""
        return self.plugin.declaration.home is Tier.HOST

    @cached_property
    def reach(self) -> Reach:
        """The component's reach, with its options."""
        return self.mount(self.page_size).component.reach

    @property
    def is_window(self) -> bool:
        """Whether it needs the last tokens and nothing else."""
        return len(self.reach.terms) == 1 and isinstance(self.reach.terms[0], Trailing)

    @property
    def unbounded(self) -> str | None:
        """Why its reach has no width in pages; None if it has."""
        if self.is_state:
            return "about windows; the component has states"
        unbounded = math.isinf(self.reach.width_tokens)
        return "about windows; its reach grows with the sequence" if unbounded else None

    def has(self, hook: str) -> bool:
        """Whether it implements a hook."""
        return hasattr(self.plugin.implementation, hook)

    # -- at work

    def expect_device(self) -> None:
        """Refuse a device that is missing here.

        Raises:
            ConfigError: it is missing.
        """
        _ = self.runtime

    def expect_options(self) -> None:
        """Check that the component accepts the options.

        Raises:
            ConfigError: it refuses them.
        """
        try:
            parse_options(self.plugin, self.options)
        except PluginError as error:
            raise ConfigError(str(error)) from error

    def expect_buildable(self) -> None:
        """Refuse a component that cannot be built for the caches it is tested in.

        Raises:
            ConfigError: options that it refuses.
            PluginError: one that cannot be built with any options.
        """
        try:
            for page_size in self.page_sizes:
                self.mount(page_size)
            for setup in self._setups():
                fitting_sizes(replace(setup, device=self.device))
        except ContractViolation:
            return  # a hook broke a rule; that is for its clause to say
        except PluginError as error:
            if self.options and isinstance(error.__cause__, ConfigError):
                raise ConfigError(str(error)) from error
            raise

    @cached_property
    def page_sizes(self) -> tuple[int, ...]:
        """The page sizes at which it is tested: `PAGE_SIZES`, or larger ones if it refuses those.

        Pools are left to the core here, so that options with too few tokens are refused as such.

        Raises:
            PluginError: it refuses all page sizes.
        """
        refused: PluginError | None = None
        for sizes in (PAGE_SIZES, *((larger,) for larger in LARGER_PAGES)):
            accepted = []
            for page_size in sizes:
                try:
                    self._mount(self._without_tokens(), self._context(page_size, 16, 16))
                    accepted.append(page_size)
                except PluginError as error:
                    if not isinstance(error.__cause__, ConfigError):
                        raise
                    refused = refused or error
            if accepted:
                return tuple(accepted)
        assert refused is not None
        raise refused

    @property
    def page_size(self) -> int:
        """The page size at which most clauses test it: 2, or its smallest."""
        return 2 if 2 in self.page_sizes else self.page_sizes[0]

    def _without_tokens(self) -> dict[str, Any]:
        own = self.options.items()
        return {name: value for name, value in own if name not in ("device_tokens", "host_tokens")}

    @cached_property
    def runtime(self) -> StreamRuntime | None:
        """The device of pools that belong to no cache; None for the CPU.

        Raises:
            ConfigError: torch has it not here, or not its streams.
        """
        if self.device in HOST_REACHES:
            return None
        expect_device(self.device)
        if torch_device(self.device).type in ("cpu", "meta"):
            raise ConfigError(
                f"device {self.device!r} is no accelerator; use cpu, simulated, or one such as cuda"
            )
        return small_accelerator(self.device)

    @cached_property
    def _engine(self) -> StreamTransferEngine | None:
        return None if self.runtime is None else StreamTransferEngine(self.runtime)

    def run(self, copies: Iterable[PlaneCopy]) -> None:
        """Run copies between pools that belong to no cache, as an engine of their device does.

        Raises:
            TransferError: they cannot run.
            IndexError: the same, on the CPU; like errors of torch.
        """
        if self._engine is None:
            for copy in copies:
                run_copy(copy)
            return
        ticket = self._engine.submit(list(copies))
        ended = ticket.wait(DEVICE_S)
        if ticket.error is not None:
            raise ticket.error
        if not ended:
            raise TransferError(f"the device did not end them within {DEVICE_S:.0f} s")

    def mount(self, page_size: int, *, pages: int = 16, host_pages: int = 16) -> Mounted:
        """The component on its own, built over fresh pools of about that many pages."""
        return self._mount(self.options, self._context(page_size, pages, host_pages))

    def _mount(self, options: dict[str, Any], context: BuildContext) -> Mounted:
        if self.runtime is None:
            return mount(self.plugin, options, context)
        with PoolPlan(runtime=self.runtime).building(self.name):
            return mount(self.plugin, options, context)

    def _context(self, page_size: int, pages: int, host_pages: int) -> BuildContext:
        device = "cpu" if self.runtime is None else str(self.runtime.device)
        return BuildContext(
            page_size=page_size,
            device=device,
            device_tokens=pages * page_size,
            host_tokens=host_pages * page_size,
            pin_host=self.runtime is not None and self.runtime.device.type == "cuda",
        )

    def open(
        self,
        page_size: int,
        *,
        pages: int = 16,
        host_pages: int = 16,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        transfers: TransferEngine | None = None,
    ) -> Cache:
        """A cache of the component; it always loads back HOST data.

        It is alone, or beside full attention where its reach does not end at every boundary.
        """
        beside = [] if self.reach.ends_at_boundary else [references()[0]]
        config = CacheConfig(
            components={self.name: self.options, **{each.name: {} for each in beside}},
            page_size=page_size,
            device_tokens=pages * page_size,
            host_tokens=host_pages * page_size,
            write_policy=policy,
            load=None,
            device="cpu" if self.runtime is None else self.device,
        )
        parts = parts_of(config)
        if self.runtime is not None:
            parts.runtime = self.runtime
        return Cache(config, plugins=[self.plugin, *beside], transfers=transfers, parts=parts)

    # -- in production

    @cached_property
    def in_production(self) -> Run:
        """The component's run without the suite."""
        return apart(self.plugin, self.options)

    @cached_property
    def in_the_suite(self) -> Run:
        """The component's run beside the suite, with the same calls."""
        return beside(self.plugin, self.options)

    @cached_property
    def in_several_caches(self) -> Run:
        """The component without the suite, built for several caches before any hook is called."""
        return apart(self.plugin, self.options, together=True)

    @cached_property
    def a_day_later(self) -> Run:
        """The same calls once more."""
        with clocks_moved(DAY_S):
            return beside(self.plugin, self.options)

    @cached_property
    def unusable(self) -> ContractViolation | None:
        """Why it cannot be checked: it ends the process or blocks, in either run."""
        found = self.in_production.finding(self.name)
        return found if found is not None else self.in_the_suite.finding(self.name)

    @cached_property
    def refused(self) -> ContractViolation | None:
        """The first hook that raises, or returns a wrong type, in any of the runs."""
        runs = (self.in_the_suite, self.in_production, self.a_day_later)
        refusals = (run.refused(self.name) for run in runs)
        return next((refused for refused in refusals if refused is not None), None)

    @cached_property
    def difference_beside_suite(self) -> str | None:
        """The difference between the runs without and beside the suite; None if there is none."""
        here, there = "beside the suite", "in a process without it"
        return self.in_the_suite.difference(self.in_production, here, there)

    @cached_property
    def difference_beside_caches(self) -> str | None:
        """The difference that other caches in its process make; None if there is none."""
        return self.in_production.difference_by_cache(self.in_several_caches)

    @cached_property
    def difference_when_repeated(self) -> str | None:
        """The difference when all calls are made once more, a day later; None if there is none."""
        there = "asked the same a day later"
        return self.in_the_suite.difference(self.a_day_later, "at first", there)

    @cached_property
    def driven(self) -> Drive:
        """The state machine's findings: the component alone, then beside others.

        The first broken rule ends it.
        """
        return self.drive(self.ignored)

    def drive(self, ignored: frozenset[str]) -> Drive:
        """Run the state machine over every component set; see `driven`."""
        found: Drive | None = None
        for setup in self._setups():
            ran = drive(
                replace(setup, device=self.device),
                settings=self.profile.settings(),
                ignored=ignored,
            )
            found = ran if found is None else found.then(ran)
            if found.violation is not None:
                break
        assert found is not None
        return found

    def serve_with(self, host_pages: int) -> None:
        """Two conversations that go on, in a cache with a small HOST, everything compared.

        Raises:
            ContractViolation: a rule is broken.
        """
        with quiet_log():
            self._serve_with(host_pages)

    def _serve_with(self, host_pages: int) -> None:
        setup = replace(self._setups()[0], device=self.device)
        for page_size, scale in fitting_sizes(setup).items():
            sizes = Sizes(page_size, device=9 * scale, host=host_pages * scale)
            try:
                harness = Harness(setup, sizes, Judge(self.ignored))
            except Stopped:
                continue
            except ContractViolation as violation:
                if violation.rule in ("", "P7"):
                    continue  # it says that this is too little for it
                raise
            for turn in range(1, 5):
                for first in (1, 2):
                    _serve(harness, (first,) * (turn * page_size + 1))
                harness.rooms.squeeze()
            harness.close()

    def _setups(self) -> list[Setup]:
        options = self._options if self.narrow != self.options else self.options
        return setups_for(self.plugin, options, alone=self.reach.ends_at_boundary)

    def _options(self, sizes: Sizes) -> Mapping[str, Any]:
        """As given with the smallest pages, else those of a short reach."""
        smallest = len(self.page_sizes) > 1 and sizes.page_size == min(self.page_sizes)
        return self.options if smallest else self.narrow

    @cached_property
    def narrow(self) -> dict[str, Any]:
        """The options with a reach that ends within some pages, if it is longer by default.

        Whole numbers that were not given are made small, of those that the reach depends on.
        """
        narrow, width = self.options, self.reach.width_tokens
        for name, field in self.plugin.declaration.options.model_fields.items():
            given = name in self.options or type(field.default) is not int
            if given or field.default <= SHORT or not SHORT < width < math.inf:
                continue
            for tokens in NARROW:
                found = self._width_with({**narrow, name: tokens})
                if found is not None and found < width:
                    narrow, width = {**narrow, name: tokens}, found
                if found is not None:
                    break
        return narrow

    def _width_with(self, options: dict[str, Any]) -> float | None:
        """Tokens of the reach with some options; None if it refuses them."""
        try:
            return max(
                self._mount(options, self._context(size, 16, 16)).component.reach.width_tokens
                for size in self.page_sizes
            )
        except KvgraftError:
            return None


def _serve(harness: Harness, tokens: tuple[int, ...]) -> None:
    """One request from match to end, with all its copies."""
    live = harness.begin(None, tokens, 1, None)
    if not harness.admit(live).admitted:
        return harness.abort(live)
    harness.load_back(live)
    harness.rooms.step_all()
    harness.prefill_all(live)
    harness.checkpoint(live)
    harness.finish(live)
    return harness.rooms.step_all()
