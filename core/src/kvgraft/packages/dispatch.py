"""The hooks of the loaded components, frozen into a table of plain callables.

pluggy finds and validates; on the hot path a bound call costs a twentieth of a pluggy call. An
entry is None where the component leaves the hook to its reach. The core reads fields of the answers
on its hot path; a wrong type would fail far from the component that returned it, so it is refused
here.

With an observer such as the guard, the entries do go through pluggy: each component's hooks are in
a manager of their own, with the wrappers around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from reprlib import Repr
from typing import Any, NamedTuple, TypeVar

import pluggy
from pydantic import BaseModel, ValidationError

from kvgraft import hookspecs
from kvgraft.contract import COPY_ON_WRITE, HOST_MIRROR
from kvgraft.errors import (
    ConfigError,
    ContractViolation,
    KvgraftError,
    PluginError,
    PluginHookError,
)
from kvgraft.packages.registry import HOOKS, NO_RULE, Plugin
from kvgraft.pools import BuildContext, Component, DevicePool, HostMirror, PrivatePool
from kvgraft.pools.component import PlaneCopy
from kvgraft.pools.planes import PlaneSpec
from kvgraft.reach import Reach
from kvgraft.refusals import first_refusal
from kvgraft.tree.component import ComponentShape
from kvgraft.types import (
    ComponentMatch,
    Demand,
    DemandQuery,
    Kind,
    LockQuery,
    MatchView,
    Span,
    Tier,
    TransferQuery,
)

_SHORT = Repr()
_SHORT.maxother = _SHORT.maxstring = 120


def shown(answer: object) -> str:
    """An answer in a message; long ones are cut, and tensors are not printed in full."""
    return " ".join(_SHORT.repr(answer).split())


class HookResult(NamedTuple):
    """The form of a hook's answers other than None.

    Attributes:
        fits: whether an answer is of that form.
        wanted: the form, in words.
        rule: the rule that an answer of another form breaks.
    """

    fits: Callable[[object], bool]
    wanted: str
    rule: str


def _whole(number: object) -> bool:
    return isinstance(number, Integral)


def _all_whole(numbers: object) -> bool:
    if not isinstance(numbers, (tuple, list)):
        return False
    return all(type(number) is int or _whole(number) for number in numbers)


def _is_match(answer: object) -> bool:
    if not isinstance(answer, ComponentMatch):
        return False
    limit, pages = answer[:2]
    if type(limit) is not int and not _whole(limit):
        return False
    return pages == () or _all_whole(pages)


def are_spans(answer: object) -> bool:
    """Whether a segment to pin is a list of pairs of whole pages.

    Checked where the pin is taken, not where the hook is called: a refused lock is released (L1).
    """
    if not isinstance(answer, (list, tuple)):
        return False
    for span in answer:
        if not isinstance(span, (tuple, list)) or len(span) != 2:
            return False
        start, end = span
        if (type(start) is not int or type(end) is not int) and not all(map(_whole, span)):
            return False
    return True


def _are_copies(answer: object) -> bool:
    # By fields: the type of copies is defined in a room above this module.
    return isinstance(answer, Sequence) and all(
        isinstance(copy, tuple) and hasattr(copy, "target_rows") and _whole(copy[0])
        for copy in answer
    )


def _is_demand(answer: object) -> bool:
    if not isinstance(answer, Demand):
        return False
    now: object = answer.now
    later: object = answer.later
    private: object = answer.private
    if not isinstance(now, int) or not isinstance(later, int):
        return False
    return private == () or _all_whole(private)


HOOK_RESULTS = {
    "finalize_match_result": HookResult(
        _is_match, "ComponentMatch or None, its boundaries in whole pages", "M5"
    ),
    "build_hicache_transfers": HookResult(_are_copies, "a list of PlaneCopy or None", "R2"),
    "budget_contribution": HookResult(_is_demand, "Demand or None, in whole slots", "A1"),
}
"""By hook, where the core reads fields of the answers."""


Query = TypeVar("Query")
Answer = TypeVar("Answer")


class LockHooks(NamedTuple):
    """The hooks of a component that names its own pins.

    Attributes:
        acquire: `acquire_component_lock`.
        release: `release_component_lock`.
    """

    acquire: Callable[[LockQuery], Sequence[Span] | None]
    release: Callable[[Sequence[Span]], None]


class TransferHooks(NamedTuple):
    """The hooks of a component that builds its own copies.

    Attributes:
        build: `build_hicache_transfers`.
        commit: `commit_hicache_transfers`.
        abort: `abort_hicache_transfers`.
    """

    build: Callable[[TransferQuery], Sequence[PlaneCopy] | None]
    commit: Callable[[TransferQuery], None]
    abort: Callable[[TransferQuery], None]


@dataclass(frozen=True, slots=True)
class Mounted:
    """One component built for one cache, and its hooks with the component bound in.

    An exception of a hook is raised as `PluginHookError` with the plugin's name.

    Attributes:
        plugin: the component package.
        component: its pools and reach.
        manager: where its hooks and the wrappers around them are registered, and more wrappers can
            be; None if hooks are called directly.
        finalize_match_result: the hook.
        lock_hooks: the hooks for pins: both, or none.
        transfer_hooks: the hooks for copies: all three, or none.
        budget_contribution: the hook.
    """

    plugin: Plugin
    component: Component
    manager: pluggy.PluginManager | None
    finalize_match_result: Callable[[MatchView], ComponentMatch | None] | None
    lock_hooks: LockHooks | None
    transfer_hooks: TransferHooks | None
    budget_contribution: Callable[[DemandQuery], Demand | None] | None

    @property
    def name(self) -> str:
        """The component's name."""
        return self.plugin.name

    @property
    def shape(self) -> ComponentShape:
        """The component as the tree sees it."""
        declaration = self.plugin.declaration
        return ComponentShape(
            name=self.name,
            reach=self.component.reach,
            home=declaration.home,
            slots_per_page=self.component.slots_per_page,
            can_copy=COPY_ON_WRITE in declaration.capabilities,
        )


def parse_options(plugin: Plugin, options: dict[str, Any]) -> BaseModel:
    """Options as the plugin's own model (P7).

    Raises:
        PluginError: an unknown or impossible option, with the field named.
    """
    try:
        return plugin.declaration.options.model_validate(options)
    except ValidationError as error:
        said = first_refusal(error, plugin.declaration.options, "option")
        raise PluginError(plugin.name, said, "P7") from error


class _Binding(NamedTuple):
    """Binds one component's hooks, each with the signature of its specification."""

    plugin: Plugin
    component: Component
    manager: pluggy.PluginManager | None

    def bind(self, spec: Callable[[Component, Query], Answer]) -> Callable[[Query], Answer] | None:
        """The component's hook with the component bound in; None if it has none."""
        plugin, component, hook = self.plugin, self.component, spec.__name__
        function: Callable[[Component, Query], Answer] | None = getattr(
            plugin.implementation, hook, None
        )
        if function is None:
            return None
        if self.manager is not None:
            function = _called(self.manager, spec)
        bound = function
        expected = HOOK_RESULTS.get(hook)
        fits = expected.fits if expected is not None else None

        def call(query: Query) -> Answer:
            try:
                answer = bound(component, query)
            except ContractViolation:
                raise
            except (Exception, SystemExit) as error:
                raise PluginHookError(plugin.name, hook, error) from error
            if answer is not None and fits is not None and not fits(answer):
                assert expected is not None
                said = f"{hook} returned {shown(answer)}; return {expected.wanted}"
                raise PluginError(plugin.name, said, expected.rule)
            return answer

        return call

    def lock_hooks(self) -> LockHooks | None:
        """The hooks for pins; the registry refuses one without the other."""
        acquire = self.bind(hookspecs.acquire_component_lock)
        release = self.bind(hookspecs.release_component_lock)
        if acquire is None or release is None:
            return None
        return LockHooks(acquire, release)

    def transfer_hooks(self) -> TransferHooks | None:
        """The hooks for copies; the registry refuses any without the others."""
        build = self.bind(hookspecs.build_hicache_transfers)
        commit = self.bind(hookspecs.commit_hicache_transfers)
        abort = self.bind(hookspecs.abort_hicache_transfers)
        if build is None or commit is None or abort is None:
            return None
        return TransferHooks(build, commit, abort)


def _called(
    manager: pluggy.PluginManager, spec: Callable[[Component, Query], Answer]
) -> Callable[[Component, Query], Answer]:
    """A hook called through its manager, by position."""
    caller = getattr(manager.hook, spec.__name__)
    first, second = HOOKS[spec.__name__]

    def call(component: Component, query: Query) -> Answer:
        answer: Answer = caller(**{first: component, second: query})
        return answer

    return call


def mount(
    plugin: Plugin,
    options: dict[str, Any],
    context: BuildContext,
    manager: pluggy.PluginManager | None = None,
) -> Mounted:
    """Build one component and freeze its hooks.

    Args:
        plugin: the component package.
        options: its options.
        context: page size, device and sizes.
        manager: calls its hooks, where observers have wrappers around them; see `Mounted`.

    Raises:
        PluginError: options it refuses, pools that do not fit its declaration, or a failing
            `create_component`.
    """
    parsed = parse_options(plugin, options)
    try:
        component = plugin.implementation.create_component(  # type: ignore[attr-defined]
            options=parsed, context=context
        )
    except ConfigError as error:
        raise PluginError(plugin.name, str(error), NO_RULE) from error
    except KvgraftError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginHookError(plugin.name, "create_component", error) from error
    _check_component(plugin, component)
    binding = _Binding(plugin, component, manager)
    return Mounted(
        plugin,
        component,
        manager,
        finalize_match_result=binding.bind(hookspecs.finalize_match_result),
        lock_hooks=binding.lock_hooks(),
        transfer_hooks=binding.transfer_hooks(),
        budget_contribution=binding.bind(hookspecs.budget_contribution),
    )


def _check_mirror(plugin: Plugin, component: Component) -> None:
    """Refuse a mirror whose planes cannot take the pool's rows as they are."""
    mirrored = component.host.specs if component.host is not None else ()
    partners = {(spec.layer, spec.name): spec for spec in mirrored}
    for spec in component.device.specs:
        partner = partners.get((spec.layer, spec.name), spec)
        if (spec.shape, spec.dtype) != (partner.shape, partner.dtype):
            said = (
                f"plane {spec.name!r} of layer {spec.layer} is {_plane(spec)} on DEVICE and "
                f"{_plane(partner)} in the host mirror; give both the same, or copy it in "
                "build_hicache_transfers"
            )
            raise PluginError(plugin.name, said, NO_RULE)


def _plane(spec: PlaneSpec) -> str:
    return f"{spec.shape} {str(spec.dtype).removeprefix('torch.')}"


FIELDS: dict[str, type | tuple[type, ...]] = {
    "reach": Reach,
    "device": DevicePool,
    "host": (HostMirror, type(None)),
    "slots_per_page": int,
    "private": tuple,
}
"""Types of a component's fields."""


def _check_fields(plugin: Plugin, component: Component) -> None:
    """Refuse a component whose fields are something else than it says."""
    for field, kind in FIELDS.items():
        held = getattr(component, field)
        if not isinstance(held, kind):
            said = f"create_component returned a Component whose {field} is {shown(held)}"
            raise PluginError(plugin.name, said, NO_RULE)
    pools: tuple[object, ...] = component.private
    for pool in pools:
        if not isinstance(pool, PrivatePool):
            said = f"create_component returned a private pool that is {shown(pool)}"
            raise PluginError(plugin.name, said, NO_RULE)


def _check_component(plugin: Plugin, component: object) -> None:
    #   kind STATE <=> reach is a state          host pool => HOST_MIRROR is declared
    #   home HOST => pages, and a host pool      private pools => budget_contribution
    declaration = plugin.declaration
    if not isinstance(component, Component):
        said = f"create_component returned {type(component).__name__}, not a Component"
        raise PluginError(plugin.name, said, NO_RULE)
    _check_fields(plugin, component)
    if component.reach.is_state is not (declaration.kind is Kind.STATE):
        raise PluginError(
            plugin.name,
            f"declared kind {declaration.kind.value} but its reach is {component.reach}",
            "P8",
        )
    if component.slots_per_page < 1:
        said = (
            f"slots_per_page is {component.slots_per_page}; it is at least 1: for one slot to hold "
            "more tokens than a page, the page must be larger (context.slots_per_page says so)"
        )
        raise PluginError(plugin.name, said, NO_RULE)
    if component.host is not None and HOST_MIRROR not in declaration.capabilities:
        raise PluginError(
            plugin.name,
            f"has a host mirror without the capability {HOST_MIRROR!r}; declare it",
            "P8",
        )
    if component.private and not hasattr(plugin.implementation, "budget_contribution"):
        raise PluginError(
            plugin.name,
            "has private pools but no budget_contribution; implement it",
            "H7",
        )
    pools = [pool.name for pool in component.private]
    if len({*pools, "device", "host"}) < len(pools) + 2:
        said = f"private pools {pools}: names differ, and none is 'device' or 'host'"
        raise PluginError(plugin.name, said, NO_RULE)
    if not hasattr(plugin.implementation, "build_hicache_transfers"):
        _check_mirror(plugin, component)
    if declaration.home is Tier.HOST and declaration.kind is Kind.STATE:
        said = "a state component is at home on DEVICE; HOST is for pages"
        raise PluginError(plugin.name, said, NO_RULE)
    if declaration.home is Tier.HOST and component.host is None:
        said = "its home is HOST but there is no host pool; give the cache host_tokens"
        raise PluginError(plugin.name, said, NO_RULE)
