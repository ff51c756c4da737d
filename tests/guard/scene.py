"""A guarded cache, and a test's calls."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType
from typing import Any, Protocol

import pytest

from kvgraft import (
    Cache,
    CacheConfig,
    Everything,
    LoadModel,
    Reach,
    Span,
    TokenKey,
    Trailing,
    WritePolicy,
)
from kvgraft.config import GuardMode
from kvgraft.packages.registry import Plugin, load_plugin, select
from kvgraft.requests.request import Request
from kvgraft.transfers import PlaneCopy, pair_planes
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft.types import LockQuery, TransferQuery
from kvgraft_storage.settings import StorageSettings
from kvgraft_testing.stepped import SteppedTransferEngine

from ..packages.switchable import Package
from ..serving import life
from ..serving.components import PagedPackage, StatePackage
from ..serving.own_parts import override, own_parts

__all__ = ["LONGER", "PAGE", "PROMPT", "WINDOW", "Patch", "Patched", "Scene", "Unpatched"]

PAGE = 4
WINDOW = 8
PROMPT = list(range(32))
LONGER = [*PROMPT, *range(100, 108)]
NEVER = 1_000_000


class Patch(Protocol):
    """Puts a defect in: into the parts of a scene's cache, a module's function, or the books."""

    def into(self, part: object, **methods: object) -> None: ...

    def setattr(self, target: object, name: str, value: object) -> None: ...

    def setitem(self, dic: Any, name: Any, value: Any) -> None: ...


class Patched:
    """Puts defects in.

    Args:
        patch: undoes those that are not in a part.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.setitem = patch.setitem

    def setattr(self, target: object, name: str, value: object) -> None:
        """Replace an attribute; skips the test where compiled code would not ask for it."""
        if is_code(target, name) and is_from_extension(target):
            pytest.skip("needs the plain build: patches the core")
        self.patch.setattr(target, name, value)

    def into(self, part: object, **methods: object) -> None:
        """Override methods of one part of a scene's cache."""
        override(part, **methods)


def is_code(target: object, name: str) -> bool:
    """Whether the attribute is a function or a constant that others call or read by name."""
    return isinstance(target, (ModuleType, type)) or callable(getattr(target, name))


def is_from_extension(target: object) -> bool:
    """Whether a module is compiled, or the class of an object, or a class itself."""
    if not isinstance(target, ModuleType):
        kind = target if isinstance(target, type) else type(target)
        target = sys.modules[kind.__module__]
    return str(target.__file__).endswith(tuple(EXTENSION_SUFFIXES))


class Unpatched:
    """Puts no defect in, so that the same scene runs without it."""

    def into(self, part: object, **methods: object) -> None:
        assert all(callable(getattr(part, name)) for name in methods)

    def setattr(self, target: object, name: str, value: object) -> None:
        assert hasattr(target, name)

    def setitem(self, dic: Any, name: Any, value: Any) -> None:
        pass


class Windowed(Package):
    """A window that pins exactly its reach."""

    def __init__(self) -> None:
        super().__init__("window", Reach(Trailing(WINDOW)))
        self.answers["acquire_component_lock"] = window_of


def window_of(query: LockQuery) -> list[Span]:
    """The pages of the last `WINDOW` tokens before a boundary."""
    if not query.boundary:
        return []
    return [Span(max(0, query.boundary - WINDOW // query.page_size), query.boundary)]


class Scene:
    """A guarded cache of a base component, a window and others, over pools of 16 pages.

    Args:
        plain: let base and window leave every hook to their reach.
        state, home: add a state component, one at home on HOST.
        host_tokens: size of the host mirrors.
        window_tokens: size of the window's device pool.
        policy: the write policy.
        full_check: operations between two recomputations of all books.
        storage: settings of a storage tier.
        load: the choice between loading and computing; None always loads.
        max_drafts: most drafts of a request in a pass; states are kept every two pages then.

    Attributes:
        base, window: packages with every hook, which a test makes misbehave.
        engine: copies run when they are told to.
        cache: made of parts that a defect can be put into, if it is guarded.
    """

    def __init__(
        self,
        *,
        plain: bool = False,
        state: bool = False,
        home: bool = False,
        host_tokens: int = 0,
        window_tokens: int = 64,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        mode: GuardMode = GuardMode.ON,
        full_check: int = NEVER,
        storage: StorageSettings | None = None,
        load: LoadModel | None = None,
        max_drafts: int = 0,
    ) -> None:
        self.base = Package("base", Reach(Everything()))
        self.window = Windowed()
        plugins: list[Plugin] = [self.base.plugin, self.window.plugin]
        if plain:
            plugins = [
                load_plugin(each.name, PagedPackage(each.name, each.reach))
                for each in (self.base, self.window)
            ]
        options: dict[str, dict[str, Any]] = {
            "base": {},
            "window": {"device_tokens": window_tokens},
        }
        if state:
            plugins.append(load_plugin("state", StatePackage("state")))
            options["state"] = {}
        if home:
            plugins += select(["hisparse"])
            options["hisparse"] = {"hot_tokens": PAGE, "max_running": 4}
        self.engine = SteppedTransferEngine()
        config = CacheConfig(
            components=options,
            page_size=PAGE,
            device_tokens=64,
            host_tokens=host_tokens,
            write_policy=policy,
            load=load,
            max_drafts=max_drafts,
            decode_interval_tokens=2 * PAGE,
            transfer_timeout_s=1e-3,
            guard=mode,
            guard_sample=1.0,
            guard_full_check=full_check,
            storage=storage,
        )
        parts = None if mode is GuardMode.OFF else own_parts(config)
        self.cache = Cache(config, plugins=plugins, transfers=self.engine, parts=parts)

    # -- requests

    def begin(self, tokens: Sequence[int], **options: Any) -> Request:
        return self.cache.begin(TokenKey(tokens), **options)

    def admitted(self, tokens: Sequence[int], **options: Any) -> Request:
        request = self.begin(tokens, **options)
        decision = self.cache.admit(request)
        assert decision.admitted, decision
        return request

    def loaded(self, tokens: Sequence[int], **options: Any) -> Request:
        """Admitted, with its HOST data loaded to DEVICE."""
        request = self.admitted(tokens, **options)
        self.cache.load_back(request)
        self.settle()
        assert request.ready
        return request

    def computed(self, tokens: Sequence[int], **options: Any) -> Request:
        """A request whose prompt is computed and not shared yet."""
        request = self.loaded(tokens, **options)
        life.prefill(self.cache, request)
        return request

    def cached(self, tokens: Sequence[int]) -> None:
        """A whole life; the tokens are in the tree afterwards, and on HOST where there is one."""
        self.cache.finish(self.computed(tokens))
        self.settle()

    def on_host_only(self, tokens: Sequence[int]) -> None:
        self.cached(tokens)
        for component in self.cache.tree.components:
            self.cache.evict(component.name, component.device.capacity)
        self.settle()

    def settle(self) -> None:
        """Run every copy and take it in, also those that begin then."""
        self.engine.run_all()
        self.cache.poll()
        if self.engine.pending:
            self.settle()

    def close(self) -> None:
        """End the remaining requests."""
        for request in list(self.cache.requests.values()):
            self.cache.abort(request)
        self.settle()
        self.cache.close()

    # -- answers of a component that moves its own data

    def copies(self, query: TransferQuery) -> list[PlaneCopy]:
        """The copies that move the window's data, rightly."""
        return pair_planes(self.mounted("window").component, query)

    def mounted(self, name: str) -> Any:
        (found,) = (each for each in self.cache.mounted if each.name == name)
        return found

    def component(self, name: str) -> TreeComponent:
        return self.cache.tree.by_name[name]

    @property
    def nodes(self) -> list[Node]:
        """The tree's nodes, from the root on."""
        return sorted(self.cache.tree.nodes(), key=lambda node: node.end)
