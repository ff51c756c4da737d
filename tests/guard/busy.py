"""A cache of drawn settings, and an engine that makes any legal call at any time.

`Busy(seed).run(moves)`: every option of a cache is drawn, pools are small, and requests of all
stages move on in any order. Data is stamped and read (`Server`), a reader of events keeps a mirror.
`Busy(seed, strain)` puts one part of the cache under strain: its settings are such that the part is
there, and its calls are made more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from threading import Event
from typing import Any, NamedTuple

from kvgraft import Cache, Chunk, Leading, Reach, TokenKey, Trailing
from kvgraft.config import parse_config
from kvgraft.errors import BudgetError, ConfigError, PluginError
from kvgraft.packages.registry import Plugin, load_plugin
from kvgraft.parts import EventStream
from kvgraft.requests.request import Request
from kvgraft.types import Tier
from kvgraft_observe.events import Residency
from kvgraft_retention.pins import Pin
from kvgraft_storage import Status, Value
from kvgraft_storage.settings import StorageSettings
from kvgraft_storage.tier import Prefetch, StorageTier

from ..mutants.legal import LEGAL
from ..serving.components import PagedPackage, StatePackage
from ..serving.engines import PromptEngine
from ..serving.server import Server
from ..storage_tier.shelf import AT_ONCE, Shelf, step_by_step, until

__all__ = ["STRAINS", "Busy", "drawn"]

SHAPE: dict[str, Any] = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 2}
SHARING: dict[str, dict[str, Any]] = {
    "full": {"n_layers": 1, "n_kv_heads": 2, "head_dim": 64},
    "swa": {"n_layers": 1, "n_kv_heads": 2, "head_dim": 64},
    "mamba": {"n_layers": 1, "conv_dim": 0, "n_heads": 8, "head_dim": 16, "state_dim": 16},
}
"""Options of components that share a budget, with slots of 8 KiB where a page has 16 tokens."""
SLOT_NBYTES = 8192
NAMESPACES: tuple[Any, ...] = (None, None, "a", "a", "b", "")
SETS: tuple[tuple[str, ...], ...] = (
    ("full",),
    ("swa",),
    ("hisparse",),
    ("full", "swa"),
    ("full", "mamba"),
    ("full", "swa", "mamba"),
    ("swa@a", "swa@b"),
    ("full", "swa@a", "swa@b", "mamba"),
    ("swa", "mamba"),
    ("hisparse", "mamba"),
    ("hisparse", "swa"),
    ("full", "sinks"),
    ("full", "chunked", "mamba"),
    ("full", "quartered", "ssm"),
    ("sinks",),
    ("full", "ssm"),
    ("full", "odd"),
    ("odd",),
    ("full", "swa", "odd"),
)
"""Components of drawn caches; `odd` is one of the unusual ones of the suite's mutants."""
TOGETHER = tuple(
    names
    for names in SETS
    if len(names) > 1 and all(name.partition("@")[0] in SHARING for name in names)
)
"""Those that can share a budget."""
WITH_STATES = tuple(names for names in SETS if {"mamba", "ssm"} & {*names})


class Strain(NamedTuple):
    """A part of the cache that is busier than the others.

    Attributes:
        weights: how many times as often some calls are made.
        write_policies: those of its caches; none for any.
        settings: what else each has: `memory` of one budget, a `host`, a `store`, `states`.
        size: pools are so many times as large as others.
    """

    weights: dict[str, float]
    write_policies: tuple[str, ...] = ()
    settings: frozenset[str] = frozenset()
    size: int = 2


STRAINS = {
    "budgets": Strain(
        {"move_memory": 5, "checkpoint": 2, "evict": 0.5, "ask": 1.5},
        settings=frozenset({"memory"}),
    ),
    "loads": Strain(
        {"swap_out": 4, "transfer": 2, "arrive": 2, "ask": 1.5, "go_on": 0.5, "lose_copies": 8},
        write_policies=("write-through", "write-back"),
        settings=frozenset({"host"}),
    ),
    "write-back": Strain(
        {"transfer": 3, "ask": 1.5, "swap_out": 0, "evict": 0.3, "lose_copies": 0, "rush": 2},
        write_policies=("write-back",),
        settings=frozenset({"host"}),
        size=1,
    ),
    "stores": Strain(
        {"prefetch": 8, "swap_out": 2, "arrive": 1.5, "lose": 2},
        write_policies=("write-through", "write-back"),
        settings=frozenset({"host", "store"}),
    ),
    "decoding": Strain(
        {"decode_on": 8, "overtake": 30, "go_on": 1.5, "end": 0.5, "step_all": 2},
        settings=frozenset({"states"}),
    ),
}
"""By name; all of them are played."""


def third_party(name: str, random: Random) -> Plugin:
    """A component that is not installed."""
    if name == "odd":
        traits = [each for each in LEGAL if "head" not in each]
        if random.random() < 0.5:
            traits = [each for each in traits if LEGAL[each].hooks]
        trait = random.choice(traits)
        plugin = load_plugin(name, LEGAL[trait].implementation(name))
        return replace(plugin, distribution=trait)  # for reports
    made = {
        "sinks": PagedPackage("sinks", Reach(Leading(3), Trailing(5))),
        "chunked": PagedPackage("chunked", Reach(Chunk(8))),
        "quartered": PagedPackage("quartered", Reach(Trailing(7)), slots_per_page=4),
        "ssm": StatePackage("ssm", can_copy=random.random() < 0.9),
    }[name]
    return load_plugin(name, made)


def options_of(name: str, random: Random, page: int, factor: int) -> dict[str, Any]:
    """A component's options, drawn; pools are `factor` times as large as they may be at least."""
    kind = name.partition("@")[0]
    if kind == "full":
        return SHAPE
    if kind == "swa":
        window = random.choice([1, 3, 5, page, 2 * page, 3 * page + 1])
        pages = -(-window // page) + factor * random.randint(5, 16)
        return {**SHAPE, "window": window, "device_tokens": pages * page}
    if kind == "mamba":
        interval = random.choice([None, page, 3 * page])
        sizes = {
            "states": factor * random.randint(3, 9),
            "host_states": factor * random.choice([4, 9]),
        }
        return {**sizes, "checkpoint_interval_tokens": interval}
    if kind == "hisparse":
        return {"n_layers": 1, "hot_tokens": 4 * page, "max_running": random.randint(2, 5)}
    if kind == "ssm":
        return {"states": random.randint(3, 9), "host_states": random.choice([4, 9])}
    return {}


def cost_model(random: Random) -> dict[str, float]:
    """Of loading and computing, such that either may be faster."""
    latency_s, bandwidth = random.choice([0.0, 1e-4, 5e-3]), random.choice([1e4, 1e5, 1e6])
    return {"bandwidth_bytes_s": bandwidth, "latency_s": latency_s, "prefill_tokens_s": 5e3}


def drawn(random: Random, strain: Strain | None = None) -> tuple[dict[str, Any], list[Plugin]]:
    """Settings of a cache, as text would give them, and packages that are not installed."""
    has = frozenset[str]() if strain is None else strain.settings
    factor = 1 if strain is None else strain.size
    sets = TOGETHER if "memory" in has else WITH_STATES if "states" in has else SETS
    names = random.choice(sets)
    page = random.choice([1, 2, 3, 4, 8, 16])
    own = [name for name in names if name in ("sinks", "chunked", "quartered", "ssm", "odd")]
    plugins = [third_party(name, random) for name in own]
    if "odd" in names:
        page = 16  # some have pages of multiples
    hosted = "hisparse" in names or "odd" in names
    host = random.choice([0, 8, 20, 40]) if not hosted else random.randint(16, 48)
    if "host" in has:
        host = random.choice([8, 12, 20, 40, 80])
    settings: dict[str, Any] = {
        "components": {name: {**options_of(name, random, page, factor)} for name in names},
        "page_size": page,
        "device_tokens": random.randint(12, 40) * page * factor,
        "host_tokens": host * page,
        "policy": random.choice(["lru", "density"]),
        "write_policy": random.choice(["write-through", "write-back", "write-through-selective"]),
        "pin_share": random.choice([0.1, 0.25, 0.6]),
        "load": random.choice([None, None, cost_model(random)]),
        "cut_tokens": random.choice([0, 0, 2 * page]),
        "decode_interval_tokens": random.choice([0, page, 4 * page, 256]),
        "max_requests": random.choice([None, 12]),
        "guard_full_check": random.choice([1, 7, 40]),
        "transfer_timeout_s": 1e-3,
        "guard": "on",
    }
    if strain is not None and strain.write_policies:
        settings["write_policy"] = random.choice(strain.write_policies)
    if random.random() < 0.3 and "memory" not in has:
        settings["tenants"] = {
            "first": {"namespaces": ["a"], "guarantee": 0.34, "limit": random.choice([0.7, 1.0])},
            "second": {"namespaces": ["b"], "guarantee": random.choice([0, 0.34]), "weight": 2.0},
        }
    elif "memory" in has or (
        all(name.partition("@")[0] in SHARING for name in names) and random.random() < 0.6
    ):
        _share_memory(settings, random, factor)
    if settings["host_tokens"] and ("store" in has or random.random() < 0.3):
        settings["storage"] = StorageSettings.model_validate(
            {
                "model": "m",
                "weights": "w",
                "threshold_tokens": random.choice([1, 2 * page]),
                "store": random.choice(["write-through", "second-touch", "host-eviction"]),
                "prefetch": random.choice(["wait-complete", "best-effort", "timeout"]),
            }
        )
    return settings, plugins


def _share_memory(settings: dict[str, Any], random: Random, factor: int) -> None:
    """One budget for all pools of a tier, or of both: boundaries between them move."""
    settings["page_size"] = 16
    for name, options in settings["components"].items():
        options.update(SHARING[name.partition("@")[0]])
        options.pop("device_tokens", None)
        if "window" in options:
            options["window"] = random.choice([16, 33, 48])
    settings["device_tokens"] = None
    settings["device_memory"] = random.randint(20, 56) * factor * SLOT_NBYTES
    if settings["host_tokens"]:
        settings["host_tokens"] = 40 * 16 * factor
        if random.random() < 0.5:
            settings["host_memory"] = random.randint(20, 56) * factor * SLOT_NBYTES


class _Shelf(Shelf):
    """A store that has lost some payloads, and has no room for some.

    Attributes:
        refused: of so many payloads one, by its key; 0 for none.
    """

    refused = 0

    def _spoilt(self, keys: Sequence[bytes], told: Sequence[Status], by: Status) -> list[Status]:
        spoilt = self.refused
        return [
            by if spoilt and status is Status.OK and key[-1] % spoilt == 0 else status
            for key, status in zip(keys, told)
        ]

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        return self._spoilt(keys, super().get_into(keys, values, deadline_s), Status.MISS)

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        told = self._spoilt(keys, super().set_from(keys, values, deadline_s), Status.FULL)
        self.remove([key for key, status in zip(keys, told) if status is Status.FULL])
        return told


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Busy:
    """One cache and its engine.

    Args:
        seed: of all that is drawn.
        strain: the part of the cache that is busier than others, of `STRAINS`; empty for none.
        changed: settings that are not drawn.

    Attributes:
        cache: the cache.
        settings, plugins: its settings, and packages that are not installed.
        named: whether its engine names the points of its computation.
        leased, running: requests begun, and admitted.
        stepped: tokens of the last step that are not noted yet, by the request's `id()`.
        drafted: requests, by their `id()`, whose tokens of the last step are not known yet.
        log: the calls so far.
    """

    def __init__(self, seed: int | str, strain: str = "", **changed: Any) -> None:
        self.random = random = Random(f"{strain} {seed}" if strain else seed)
        self.aside = Random(seed)  # what it draws moves none of the other calls
        self.strain = STRAINS.get(strain)
        self.engine, self.clock = PromptEngine(), Clock()
        self.named = random.random() < (0.3 if self.strain is None else 0.6)
        self.cache = self._opened(changed)
        self.page = self.cache.config.page_size
        self.shelf = _Shelf(synchronous=True)
        if isinstance(self.cache.storage, StorageTier):
            self.cache.storage.pace = AT_ONCE if random.random() < 0.5 else step_by_step()
            self.cache.storage.attach(self.shelf)
        self.server = Server(self.cache)
        self.reserves = [0, 0, 1, 2 * self.page, 5 * self.page]
        if self.strain is not None and "states" in self.strain.settings:
            self.reserves = [2 * self.page, 5 * self.page, 9 * self.page]
        self.leased: list[Request] = []
        self.running: list[Request] = []
        self.keys: list[TokenKey] = []
        self.pins: list[Pin] = []
        self.prefetches: list[tuple[TokenKey, Prefetch]] = []
        self.stream: EventStream | None = None
        self.mirror = Residency()
        self.log: list[str] = []
        self.fresh = 1000
        length = 3 * self.page + 1
        self.systems = [[s] * (length + s) for s in range(1, 4)]
        self.stepped: dict[int, int] = {}
        self.drafted: set[int] = set()
        self.late: list[Event] = []
        self.events: list[Event] = []

    def _opened(self, changed: dict[str, Any]) -> Cache:
        """A cache of drawn settings; those that are refused are drawn again."""
        while True:
            settings, self.plugins = drawn(self.random, self.strain)
            self.settings = {**settings, **changed}
            try:
                config = parse_config(self.settings)
                return Cache(config, plugins=self.plugins, transfers=self.engine, clock=self.clock)
            except (ConfigError, PluginError):
                continue

    def run(self, moves: int) -> None:
        """Some calls, then the end of everything."""
        choices = [
            (self.arrive, 5), (self.ask, 14), (self.go_on, 20), (self.end, 8), (self.abort, 1),
            (self.evict, 2), (self.transfer, 5), (self.clear, 0.4), (self.swap_out, 3),
            (self.pin, 1), (self.unpin, 1), (self.restart, 1), (self.retract, 2),
            (self.fork, 1), (self.checkpoint, 3), (self.prefetch, 2), (self.read_events, 2),
            (self.look, 1), (self.pass_time, 1), (self.step_all, 3),
            (self.move_memory, 3), (self.drain, 0.5), (self.detach, 0.3), (self.lose, 0.5),
            (self.decode_on, 2),
        ]  # fmt: skip
        if self.strain is not None:
            more = self.strain.weights
            choices += [
                (self.serve, 8),
                (self.overtake, 0.2),
                (self.lose_copies, 0.2),
                (self.rush, 0.2),
            ]
            choices = [(call, n * more.get(call.__name__, 1)) for call, n in choices]
        calls, weights = zip(*choices)
        for call in self.random.choices(calls, weights, k=moves):
            self.log.append(call.__name__)
            call()
        self.close()

    # -- keys

    def key(self) -> TokenKey:
        random, known = self.random, None
        now = [each.key for each in self.running]
        if now and random.random() < 0.25:
            known = random.choice(now)
            tokens = known.tokens().tolist()
        elif self.keys and random.random() < 0.7:
            known = random.choice(self.keys[-6:])
            tokens = known.tokens().tolist()
            if random.random() < 0.3:
                tokens = tokens[: random.randint(1, len(tokens))]
        else:
            tokens = list(random.choice(self.systems))
        self.fresh += 1
        tail = random.randint(0, 3 * self.page)
        tokens = [*tokens, *range(self.fresh * 50, self.fresh * 50 + tail)][: 14 * self.page]
        if self.strain is not None and known is not None and random.random() < 0.85:
            return TokenKey(tokens, known.namespace)
        return TokenKey(tokens, random.choice(NAMESPACES))

    # -- a request's life

    def arrive(self) -> None:
        if len(self.leased) >= 4:
            return
        random = self.random
        options: dict[str, Any] = {}
        if self.prefetches and random.random() < 0.6:
            key, prefetch = self.prefetches.pop(random.randrange(len(self.prefetches)))
            if prefetch.ended or random.random() < 0.7:
                options["prefetch"] = prefetch
        else:
            key = self.key()
        if random.random() < 0.2:
            options["priority"] = random.randint(-2, 2)
        if random.random() < 0.2:
            options["ttl_s"] = random.choice([0, 0.5, 3.0])
        if random.random() < 0.2:
            options["hint"] = random.choice(["continues", "turn-ended", "over"])
        if random.random() < (0.2 if self.strain is None else 0.5):
            options["resume_at"] = random.randint(1, key.n_tokens)
        self.begun(
            self.cache.begin(
                key,
                reserve=random.choice(self.reserves),
                chunk=random.choice([None, self.page, 3 * self.page, 5]),
                max_deferrals=random.choice([0, 0, 3]),
                **options,
            )
        )

    def begun(self, request: Request) -> None:
        self.leased.append(request)

    def ask(self) -> None:
        if not self.leased:
            return
        request = self.random.choice(self.leased)
        decision = self.cache.admit(request)
        if decision.admitted:
            self.leased.remove(request)
            self.running.append(request)
            if self.random.random() < 0.9:
                self.cache.load_back(request)
        elif decision.outcome.value == "never fits" or self.random.random() < 0.4:
            self.leased.remove(request)
            self.cache.abort(request)

    def ready(self) -> list[Request]:
        """Admitted requests that may run."""
        for request in self.running:
            if request.needs_load_back and not request.load_started:
                self.cache.load_back(request)
        return [each for each in self.running if each.ready and not each.load_failed]

    def go_on(self) -> None:
        ready = self.ready()
        if not ready:
            return self.transfer()
        request = self.random.choice(ready)
        for _ in range(self.random.randint(1, 3)):
            if not self.advance(request):
                return None
        return None

    def advance(self, request: Request) -> bool:
        """Compute the next tokens of a request; whether it had any, and room for them."""
        self.note(request)
        if self.strain is not None and self.random.random() < 0.15:
            self.move_memory()
        if request.computed < request.prompt:
            n_tokens = self.cache.next_chunk(request, self.random.choice([None, None, self.page]))
            more = min(self.page, request.prompt - request.computed - n_tokens)
            if n_tokens and more and self.random.random() < 0.05:
                # Past a boundary at which the chunk was to end, in one pass of the model.
                if not self.cache.allocate(request, n_tokens + more):
                    return False
                self._compute(request, n_tokens)
                self._compute(request, more)
                return True
        else:
            beyond = self.random.random() < 0.1
            left = max(0, request.total - request.computed)
            n_tokens = min(self.random.choice([1, 1, 2]), left) + beyond
            if request.key.n_tokens < request.computed + n_tokens:
                lacks = request.computed + n_tokens - request.key.n_tokens
                if request.key.n_tokens > 18 * self.page:
                    return False
                request.key.extend(range(request.key.n_tokens, request.key.n_tokens + lacks))
        if not n_tokens:
            return False
        if not self.cache.allocate(request, n_tokens):
            return False
        self.compute(request, n_tokens)
        return True

    def compute(self, request: Request, n_tokens: int) -> None:
        """All of the tokens that slots are there for, now and then in two parts."""
        first = self.random.randint(1, n_tokens) if self.random.random() < 0.1 else n_tokens
        self._compute(request, first)
        if n_tokens > first:
            self._compute(request, n_tokens - first)

    def _compute(self, request: Request, n_tokens: int) -> None:
        end = request.computed + n_tokens
        self.server.read(request)
        self.server.write(request, end)
        self.cache.computed(request, n_tokens, self.fence())

    def note(self, request: Request) -> None:
        """Tokens that a step gave slots to are computed, before any other call."""
        n_tokens = self.verified(request)
        if n_tokens:
            self.compute_of(request, n_tokens)

    def give_up_pass(self, request: Request) -> None:
        """A request has slots for a pass that never runs."""
        self.stepped.pop(id(request), None)
        self.drafted.discard(id(request))
        if request.computed < request.total:
            self.cache.allocate(request, 1)

    def verified(self, request: Request) -> int:
        """How many tokens of the last step are right; its key has them from here on."""
        n_tokens = self.stepped.pop(id(request), 0)
        if id(request) in self.drafted:
            self.drafted.remove(id(request))
            n_tokens = self.random.randint(1, n_tokens)
            lacks = request.computed + n_tokens - request.key.n_tokens
            request.key.extend(range(request.key.n_tokens, request.key.n_tokens + max(0, lacks)))
        return n_tokens

    def compute_of(self, request: Request, n_tokens: int) -> None:
        self.server.write(request, request.computed + n_tokens)
        self.cache.computed(request, n_tokens, self.fence())

    def fence(self) -> Event | None:
        """Sometimes an event, as of an engine that names its computation; it may come late."""
        if not self.named or self.random.random() < 0.5:
            return None
        event = Event()
        if self.strain is not None and self.events and self.random.random() < 0.4:
            event = self.random.choice(self.events)  # the engine uses it for another point
            event.clear()
        self.events = [*self.events, event][-3:]
        self.late.append(event)
        if self.random.random() < 0.5:
            self.catch_up()
        return event

    def catch_up(self) -> None:
        """The computation reached all points that were named."""
        while self.late:
            self.late.pop().set()

    def decode_on(self) -> None:
        """Several steps without other calls between them."""
        for _ in range(self.random.randint(2, 2 * self.page + 2)):
            self.step_all()
            if self.strain is not None and self.random.random() < 0.15:
                self.overtake()

    def step_all(self) -> None:
        decoding = [
            each
            for each in self.ready()
            if each.computed >= each.prompt and each.key.n_tokens < 18 * self.page
        ]
        if not decoding:
            return
        chosen = self.random.sample(decoding, self.random.randint(1, len(decoding)))
        chosen = [each for each in chosen if self.ends_where_computed(each)][:12]
        if not chosen:
            return
        n_computed = [self.verified(each) for each in chosen]
        for request, n_tokens in zip(chosen, n_computed):
            self.server.write(request, request.computed + n_tokens)
        kind, fence, n_tokens = self.random.random(), self.fence(), 1
        if kind < 0.2:
            self.cache.step(chosen, n_tokens=0, n_computed=n_computed, fence=fence)
            return
        if kind < 0.5:
            n_tokens = self.random.choice([1, 2, 4])
            step = self.cache.step(chosen, n_tokens=n_tokens, n_computed=n_computed, fence=fence)
        else:
            tokens = [each.key.n_tokens for each in chosen]
            step = self.cache.step(chosen, tokens, n_computed=n_computed, fence=fence)
        for request in step.requests:
            self.stepped[id(request)] = n_tokens
            if kind < 0.5:
                self.drafted.add(id(request))
            self.server.read(request)

    def ends_where_computed(self, request: Request) -> bool:
        """Whether its key ends at the tokens computed so far, those of the last step included."""
        given = 0 if id(request) in self.drafted else self.stepped.get(id(request), 0)
        return request.key.n_tokens == request.computed + given

    def checkpoint(self) -> None:
        ready = self.ready()
        if ready:
            request = self.random.choice(ready)
            self.note(request)
            self.cache.checkpoint(request, self.fence())

    def end(self) -> None:
        done = [each for each in self.ready() if each.computed >= each.prompt]
        if not done:
            return
        request = self.random.choice(done)
        if self.aside.random() < 0.3:
            self.give_up_pass(request)
        else:
            self.note(request)
        options: dict[str, Any] = {}
        if self.random.random() < 0.3:
            options["hint"] = self.random.choice(["continues", "turn-ended", "over"])
        if self.random.random() < 0.2:
            options["ttl_s"] = self.random.choice([0, 0.5])
        self.running.remove(request)
        self.cache.finish(request, **options)
        self.keys.append(request.key)

    def retract(self) -> None:
        ready = self.ready()
        if not ready:
            return
        request = self.random.choice(ready)
        self.note(request)
        self.running.remove(request)
        self.cache.retract(request)
        key = request.key
        if len(self.leased) < 4 and self.random.random() < 0.7:
            reserve = max(0, request.total - key.n_tokens)
            self.begun(self.cache.begin(key, reserve=reserve, chunk=request.chunk))

    def abort(self) -> None:
        everybody = self.leased + self.running
        if not everybody:
            return
        request = self.random.choice(everybody)
        self.stepped.pop(id(request), None)
        self.drafted.discard(id(request))
        (self.leased if request in self.leased else self.running).remove(request)
        self.cache.abort(request)

    def restart(self) -> None:
        failed = [each for each in self.running if each.ready and each.load_failed]
        some = failed or [each for each in self.running + self.leased if self.random.random() < 0.2]
        if not some:
            return
        request = self.random.choice(some)
        self.note(request)
        if request in self.running:
            self.running.remove(request)
            self.leased.append(request)
        self.cache.restart(request)

    def fork(self) -> None:
        done = [each for each in self.ready() if each.computed >= each.prompt]
        if not done or len(self.leased) >= 4:
            return
        request = self.random.choice(done)
        self.note(request)
        self.begun(self.cache.fork(request, [self.fresh]))

    # -- everything else

    def evict(self) -> None:
        component = self.random.choice(self.cache.tree.components)
        tier = self.random.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST])
        self.cache.evict(component.name, self.random.randint(1, component.device.capacity), tier)

    def swap_out(self) -> None:
        """Evict all that is unpinned from DEVICE; a request loads some of it back from HOST."""
        self.catch_up()
        self.engine.run_all()
        self.cache.poll()
        for component in self.cache.tree.components:
            self.cache.evict(component.name, component.device.capacity)
        for key in self.random.sample(self.keys, min(2, len(self.keys))):
            if len(self.leased) < 4:
                tokens = key.tokens().tolist()[: 14 * self.page]
                again = TokenKey([*tokens, self.fresh], key.namespace)
                self.begun(self.cache.begin(again, reserve=self.page, chunk=self.page))

    def transfer(self) -> None:
        if self.random.random() < 0.7:
            self.catch_up()
        pending = self.engine.pending
        while pending and self.random.random() < 0.8:
            at = self.random.randrange(len(pending))
            if self.random.random() < 0.1:
                self.engine.fail(at)
            else:
                self.engine.step(at)
        self.engine.failing = self.random.random() < 0.05
        self.engine.stuck = self.random.random() < 0.15
        self.cache.poll()

    def drain(self) -> None:
        self.catch_up()
        self.engine.run_all()
        self.cache.drain()

    def clear(self) -> None:
        if self.random.random() < 0.3:
            self.cache.clear()
        else:
            self.cache.clear(self.random.choice(NAMESPACES))
        self.pins = [pin for pin in self.pins if not pin.cleared]

    def pin(self) -> None:
        key = self.random.choice(self.keys) if self.keys else self.key()
        try:
            most = self.random.choice([None, 3 * self.page])
            self.pins.append(self.cache.pin(key, owner=self.random.choice("ab"), max_tokens=most))
        except BudgetError:
            pass

    def unpin(self) -> None:
        if not self.pins:
            return
        if self.random.random() < 0.2:
            self.cache.unpin_all("a")
            self.pins = [pin for pin in self.pins if pin.owner != "a"]
        else:
            self.cache.unpin(self.pins.pop(self.random.randrange(len(self.pins))))

    def prefetch(self) -> None:
        tier = self.cache.storage
        if not isinstance(tier, StorageTier):
            return
        if self.prefetches and self.random.random() < 0.2:
            tier.cancel(self.prefetches.pop()[1])
            return
        if len(self.prefetches) < 3:
            key = self.key()
            self.prefetches.append((key, tier.prefetch(key)))

    def detach(self) -> None:
        """The store goes and comes back; what was on its way is gone."""
        tier = self.cache.storage
        if isinstance(tier, StorageTier):
            detached = tier.detach()
            until(lambda: detached.done, self.cache)
            tier.attach(self.shelf)

    def lose(self) -> None:
        """The store loses a quarter of its payloads, and has others spoilt from now on."""
        self.shelf.refused = self.random.choice([0, 0, 3, 7])
        self.shelf.remove([key for key in tuple(self.shelf.stored) if key[-2] % 4 == 0])

    def move_memory(self) -> None:
        names = [each.name for each in self.cache.mounted]
        if self.cache.arenas is not None and len(names) > 1:
            giver, taker = self.random.sample(names, 2)
            most = 1 if self.strain is None else self.random.choice([1, 3, 12])
            for _ in range(most):
                if not self.cache.move_memory(giver, taker):
                    break

    def serve(self) -> None:
        """A request goes on until it ends, or stays where it is in one of five cases."""
        random = self.random
        while len(self.leased) > 1:
            self.cache.abort(self.leased.pop(0))
        begun = len(self.leased)
        self.arrive()
        if len(self.leased) == begun or random.random() < 0.05:
            return
        request = self.leased[-1]
        if not self.cache.admit(request).admitted:
            if random.random() < 0.5:
                self.leased.remove(request)
                self.cache.abort(request)
            return
        self.leased.remove(request)
        self.running.append(request)
        self.cache.load_back(request)
        if not request.ready and random.random() < 0.7:
            self.engine.run_all()
            self.cache.poll()
        if not request.ready or request.load_failed:
            return
        while request.computed < request.total and random.random() < 0.97:
            if not self.advance(request):
                return
        if request.computed >= request.prompt and random.random() < 0.9:
            self.note(request)
            self.running.remove(request)
            self.cache.finish(request)
            self.keys.append(request.key)

    def overtake(self) -> None:
        """A request arrives that parts from a running one inside of its prefix, and leaves."""
        if not self.running:
            return
        random, request = self.random, self.random.choice(self.running)
        anchor = request.receipt.anchor.end * self.page
        n_tokens = random.randint(1, request.key.n_tokens)
        if anchor and random.random() < 0.8:
            n_tokens = max(1, anchor - random.randint(1, 4 * self.page))
        tokens = request.key.tokens().tolist()[:n_tokens]
        key = TokenKey([*tokens, *[7] * (self.page + 1)], request.namespace)
        self.cache.abort(self.cache.begin(key))

    def rush(self) -> None:
        """All of a pool is to be free while copies that began a moment ago hold some of it."""
        self.cache.poll()
        component = self.random.choice(self.cache.tree.components)
        self.cache.evict(component.name, component.device.capacity)

    def lose_copies(self) -> None:
        """Two requests want the same data from HOST, and the copy for the first one fails."""
        while self.leased or self.running:
            self.abort()
        self.fresh += 1
        tokens = list(range(self.fresh * 50, self.fresh * 50 + 4 * self.page))
        first = self.cache.begin(TokenKey(tokens))
        if not self.cache.admit(first).admitted:
            return self.cache.abort(first)
        while first.computed < first.prompt and self.advance(first):
            pass
        self.cache.finish(first)
        self.swap_out()
        tokens.append(7)
        requests = []
        for _ in range(2):
            request = self.cache.begin(TokenKey(tokens))
            self.begun(request)
            if not self.cache.admit(request).admitted:
                break
            self.leased.remove(request)
            self.running.append(request)
            requests.append(request)
            if len(requests) == 1:
                self.cache.load_back(request)
        while self.engine.pending and self.random.random() < 0.9:
            if self.random.random() < 0.6:
                self.engine.fail(0)
            else:
                self.engine.step(0)
        self.cache.poll()
        for request in requests[1:]:
            self.cache.load_back(request)
        return None

    def read_events(self) -> None:
        if self.stream is None:
            self.stream = self.cache.events(self.random.choice([5, 400]))
        elif self.random.random() < 0.1:
            self.stream.close()
            self.stream = None
        else:
            self.mirror.apply(self.stream.take())

    def look(self) -> None:
        self.cache.explain(self.key())
        self.cache.stats()

    def pass_time(self) -> None:
        self.clock.now += self.random.choice([0.2, 1.0, 5.0])

    # -- the end

    def close(self) -> None:
        """Everybody ends; what is left is evictable, and nothing is owed."""
        self.ready()
        for request in list(self.running):
            self.engine.run_all()
            self.cache.poll()
            self.running.remove(request)
            if request.load_failed or not request.ready or not self.to_the_end(request):
                self.cache.abort(request)
        for request in self.leased:
            self.cache.abort(request)
        for _, prefetch in self.prefetches:
            if isinstance(self.cache.storage, StorageTier):
                self.cache.storage.cancel(prefetch)
        for pin in self.pins:
            self.cache.unpin(pin)
        self.engine.failing = self.engine.stuck = False
        self.catch_up()
        self.engine.run_all()
        self.cache.drain()
        self.cache.check_integrity()
        self.engine.run_all()
        self.cache.close()

    def to_the_end(self, request: Request) -> bool:
        self.note(request)
        while request.computed < request.total:
            if not self.advance(request):
                return False
        self.cache.finish(request)
        return True
