"""Additions of a minor version do not reach components written before it (P3, P6).

The contract of `future.py` is loaded by the loader of this core.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from kvgraft import Cache, CacheConfig, ComponentDeclaration, PluginError, TokenKey, hookimpl
from kvgraft.contract import ApiVersion, since
from kvgraft.packages.registry import CURRENT, Plugin, discover, load_plugin, select

from .future import FUTURE, Newer, as_called_by_1_1, with_longer_queries
from .serving import serve
from .surface import breaks, recorded, surface

SETTINGS: dict[str, Any] = {"page_size": 4, "device_tokens": 64, "load": None}


def frozen(name: str) -> Any:
    return import_module(f"kvgraft_frozen.{name.removeprefix('frozen_')}")


def load_frozen(name: str, package: object = None) -> Plugin:
    """A frozen component, or a variant of one, as a core of 1.2 loads it."""
    return load_plugin(name, package or frozen(name), contract=FUTURE)


def open_with(*plugins: Plugin, **settings: Any) -> Cache:
    config = CacheConfig(components={each.name: {} for each in plugins}, **{**SETTINGS, **settings})
    return Cache(config, plugins=plugins)


@pytest.mark.usefixtures("frozen_1_0")
def test_components_of_both_versions_serve_side_by_side_on_a_newer_core() -> None:
    newer = Newer()
    pages, states = load_frozen("frozen_pages"), load_frozen("frozen_states")
    plugins = [pages, states, load_plugin("newer", newer, contract=FUTURE)]
    cache = open_with(*map(as_called_by_1_1, plugins), host_tokens=0)
    key = TokenKey(range(30))
    assert serve(cache, key, decode=[5, 6]).anchor == 0
    assert serve(cache, TokenKey(range(40))).anchor == 28
    cache.check_integrity()
    assert set(newer.tenants) == {"tenant 7"}
    (asked,) = (each.component for each in cache.mounted if each.name == "frozen_pages")
    assert asked.calls["acquire_component_lock"] > 0  # type: ignore[attr-defined]
    assert asked.calls["budget_contribution"] > 0  # type: ignore[attr-defined]
    cache.close()


@pytest.mark.usefixtures("frozen_1_0")
def test_an_older_component_moves_its_data_on_a_newer_core() -> None:
    plugins = [as_called_by_1_1(load_frozen(name)) for name in ("frozen_pages", "frozen_states")]
    cache = open_with(*plugins, host_tokens=128)
    serve(cache, TokenKey(range(24)))
    assert cache.drain()
    for each in cache.mounted:
        cache.evict(each.name, each.component.device.capacity)
    loaded = serve(cache, TokenKey(range(30)))
    assert (loaded.anchor, loaded.device) == (24, 0)
    cache.close()


@pytest.mark.parametrize("name", ["full", "swa", "mamba", "hisparse"])
def test_an_installed_component_reads_its_queries_by_name(name: str) -> None:
    """A component that unpacked them, or counted their fields, would stop at the next minor."""
    (plugin,) = select([name])
    cache = open_with(with_longer_queries(plugin), host_tokens=128)
    serve(cache, TokenKey(range(24)))
    serve(cache, TokenKey(range(30)))
    cache.check_integrity()
    cache.close()


@pytest.mark.usefixtures("frozen_1_0")
def test_an_older_hook_is_given_the_arguments_of_its_version_however_they_are_passed() -> None:
    asked: list[Any] = []
    module = SimpleNamespace(**vars(frozen("frozen_pages")))

    @hookimpl
    def acquire_component_lock(component: Any, query: Any) -> None:
        asked.append((component, query))

    module.acquire_component_lock = acquire_component_lock
    plugin = load_frozen("frozen_pages", module)
    acquire = plugin.implementation.acquire_component_lock  # type: ignore[attr-defined]
    acquire("component", "query", "tenant")
    acquire("component", query="query", tenant="tenant")
    assert asked == [("component", "query")] * 2


@pytest.mark.usefixtures("frozen_1_0")
def test_asked_for_one_of_another_major_version_the_refusal_names_it_once() -> None:
    next_major = dataclasses.replace(CURRENT, version=ApiVersion(2, 0))
    problems = {each.name: each.problem for each in discover(next_major)}
    assert problems["frozen_pages"] == (
        "written for API 1.0, this core has API 2.0; "
        "install a kvgraft with API 1.0 or a matching component"
    )


@pytest.mark.usefixtures("frozen_1_0")
def test_a_function_that_happens_to_have_the_name_of_a_newer_hook_is_left_alone() -> None:
    module = SimpleNamespace(**vars(frozen("frozen_states")))
    module.describe_component = lambda: "my own helper, written before there was such a hook"
    plugin = load_plugin("frozen_states", module, contract=FUTURE)
    assert not hasattr(plugin.implementation, "describe_component")


def changed(**members: Any) -> Newer:
    """The 1.2 component with some members replaced; None removes one."""
    made: Newer = type("Changed", (Newer,), members)()
    return made


def declaring(**fields: Any) -> Any:
    """Its declaration, with other fields."""

    @hookimpl
    def declare_component(self: Newer) -> ComponentDeclaration:
        return dataclasses.replace(Newer().declare_component(), **fields)

    return declare_component


@hookimpl
def acquire_of_1_0(self: Newer, component: Any, query: Any) -> None:
    del self, component, query


REFUSED = {
    "argument list of an older version": (
        {"acquire_component_lock": acquire_of_1_0},
        "acquire_component_lock takes (component, query); it must take (component, query, tenant)",
    ),
    "argument of a newer version": (
        {"declare_component": declaring(api_version="1.0", capabilities=frozenset())},
        "acquire_component_lock takes (component, query, tenant); it must take (component, query)",
    ),
    "hook of a newer version": (
        {
            "declare_component": declaring(api_version="1.0", capabilities=frozenset()),
            "acquire_component_lock": acquire_of_1_0,
        },
        "describe_component is there since API 1.2, this component is written for API 1.0; "
        "declare 1.2",
    ),
    "capability of a newer version": (
        {"declare_component": declaring(api_version="1.0")},
        "unknown capabilities ['storage']; known are ['copy_on_write', 'host_mirror']; "
        "['storage'] came after API 1.0, declare a newer one",
    ),
    "no hook its version requires": (
        {"describe_component": None},
        "describe_component is missing; every component implements it",
    ),
    "no inverse its version requires": (
        {"forget_description": None},
        "describe_component is implemented without its inverse forget_description",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_component_is_held_to_the_version_it_was_written_for(case: str) -> None:
    members, reason = REFUSED[case]
    with pytest.raises(PluginError) as caught:
        load_plugin("newer", changed(**members), contract=FUTURE)
    assert str(caught.value) == f"component 'newer': {reason}"


def test_a_newer_component_is_refused_for_its_version_before_its_hooks_are_looked_at() -> None:
    """Its new hooks and arguments would be called misspelt otherwise."""
    older = dataclasses.replace(CURRENT, version=ApiVersion(1, 1))
    with pytest.raises(PluginError) as caught:
        load_plugin("newer", Newer(), contract=older)
    assert str(caught.value) == (
        "component 'newer': written for API 1.2, this core has API 1.1; "
        "install a kvgraft with API 1.2 or a matching component"
    )


def test_the_next_major_version_refuses_components_of_this_one() -> None:
    next_major = dataclasses.replace(CURRENT, version=ApiVersion(2, 0))
    with pytest.raises(PluginError, match=r"written for API 1\.2, this core has API 2\.0; "):
        load_plugin("newer", Newer(), contract=next_major)


def test_a_component_of_1_0_sees_the_same_names_on_a_newer_core() -> None:
    assert breaks(recorded("1.0"), surface(FUTURE, "1.0")) == []


def test_a_version_is_marked_on_arguments_that_exist() -> None:
    @since("1.2", "tennant")
    def hook(component: object, tenant: str) -> None: ...

    specs = SimpleNamespace(REQUIRED=(), INVERSES=(), hook=FUTURE.specs.hookspec(hook))
    with pytest.raises(ValueError, match=r"hook takes \('component', 'tenant'\)"):
        type(CURRENT).read(specs)


@pytest.mark.parametrize(
    "text", ["", "1", "1.0.0", "1.x", "01.0", "1.00", "1 .0", "+1.0", "1_0.0", "1.٣"]
)
def test_a_version_is_two_plain_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="is not MAJOR"):
        ApiVersion.parse(text)


def test_versions_compare_as_numbers_and_print_as_they_are_written() -> None:
    assert ApiVersion.parse("1.9") < ApiVersion.parse("1.20") < ApiVersion.parse("2.0")
    assert str(ApiVersion.parse("1.20")) == "1.20"
