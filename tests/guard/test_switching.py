"""Off, nothing of the guard is there; on, others can look on beside it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from inspect import getdoc
from typing import Any

import pytest

from kvgraft import Cache, ConfigError, ContractViolation, Demand, TokenKey, hookimpl
from kvgraft.config import GuardMode, parse_config
from kvgraft.requests.eviction import Evictor
from kvgraft.transfers import Journal
from kvgraft.tree.tree import Tree
from kvgraft_guard import HookGuard
from kvgraft_guard.managing import BOUND_HOOKS
from kvgraft_guard.operations import guarded_operations

from ..serving.own_parts import override, own_parts
from .scene import PROMPT, Scene

SETTINGS: dict[str, Any] = {"components": {"full": {}}, "device_tokens": 1024}


def test_off_the_table_holds_the_hooks_themselves() -> None:
    scene = Scene(mode=GuardMode.OFF)
    for each in scene.cache.mounted:
        assert each.manager is None
        lock, transfer = each.lock_hooks, each.transfer_hooks
        assert lock is not None
        assert transfer is not None
        bound = (each.finalize_match_result, *lock, *transfer, each.budget_contribution)
        for spec, hook in zip(BOUND_HOOKS, bound, strict=True):
            cells = [cell.cell_contents for cell in hook.__closure__]  # type: ignore[union-attr]
            assert getattr(each.plugin.implementation, spec.__name__) in cells


def test_off_every_part_is_a_plain_one() -> None:
    cache = Scene(mode=GuardMode.OFF).cache
    parts = (cache, cache.evictor, cache.journal, cache.tree)
    assert [type(each) for each in parts] == [Cache, Evictor, Journal, Tree]
    assert cache.guard is None


def test_off_the_guard_is_not_even_loaded() -> None:
    code = (
        "import sys; from kvgraft import Cache\n"
        "Cache.open(['full'], device_tokens=1024).close()\n"
        "assert not any(name.startswith('kvgraft_guard') for name in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", [GuardMode.SAMPLED, GuardMode.ON])
def test_on_every_operation_and_hook_is_wrapped(mode: GuardMode) -> None:
    scene = Scene(mode=mode)
    assert isinstance(scene.cache, Cache)
    assert {name for name in vars(guarded_operations(Cache)) if hasattr(Cache, name)} >= {
        *("begin", "admit", "load_back", "restart", "next_chunk", "allocate", "computed"),
        *("checkpoint", "finish", "abort", "poll", "drain", "evict", "close"),
    }
    for each in scene.cache.mounted:
        assert each.manager is not None
        assert any(isinstance(plugin, HookGuard) for plugin in each.manager.get_plugins())
    assert getdoc(scene.cache.finish) == getdoc(Cache.finish)


def test_a_class_that_wants_arguments_of_its_subclasses_can_be_guarded() -> None:
    """It hears of those that somebody wrote, before and after; not of the class the guard makes."""
    heard: list[str] = []

    class Mixed:
        """A base beside the cache."""

    class Named(Mixed, Cache):
        def __init_subclass__(cls, *, title: str) -> None:
            heard.append(title)

    class Titled(Named, title="first"):
        """Titled."""

    for opened in (Titled, Named):
        with opened(parse_config({**SETTINGS, "guard": "on"})) as cache:
            assert isinstance(cache, opened)
            assert type(cache) is not opened
            assert cache.guard is not None
            cache.drain()
            assert cache.guard.looked_at == 1

    class Later(Titled, title="second"):
        """Titled later."""

    assert heard == ["first", "second"]
    assert "__init_subclass__" not in vars(Titled)


class Listener:
    """A third party's own wrapper."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    @hookimpl(wrapper=True)
    def budget_contribution(self, query: Any) -> Generator[None, Any, Any]:
        answer = yield
        self.heard.append((query, answer))
        return answer


def test_anyone_can_register_wrappers_beside_the_guard() -> None:
    scene = Scene()
    listener = Listener()
    scene.mounted("window").manager.register(listener)
    scene.window.answers["budget_contribution"] = lambda query: Demand(10, 0)
    scene.cache.abort(scene.admitted(PROMPT))
    ((query, answer),) = listener.heard
    assert (query.prompt, answer) == (len(PROMPT), Demand(10, 0))
    scene.close()


def test_a_guard_prints_its_sample_and_its_counts() -> None:
    scene = Scene(full_check=2)
    for _ in range(5):
        scene.cache.drain()
    assert repr(scene.cache.guard) == (
        "<Guard of every operation: 5 looked at, 2 full checks, one after 2>"
    )


def looked_at(sample: float) -> list[bool]:
    """Whether each of ten drains was looked at."""
    cache = Cache.open(["full"], device_tokens=1024, guard="sampled", guard_sample=sample)
    guard, seen = cache.guard, []
    assert guard is not None
    for _ in range(10):
        before = guard.looked_at
        cache.drain()
        seen.append(guard.looked_at > before)
    cache.close()
    return seen


def test_a_sampled_guard_looks_at_every_nth_operation_of_a_kind() -> None:
    assert looked_at(1.0) == [True] * 10
    assert looked_at(0.5) == [False, True] * 5
    assert looked_at(0.2) == [False] * 4 + [True] + [False] * 4 + [True]
    assert looked_at(0.2) == looked_at(0.2)


def test_a_guard_that_does_not_look_lets_a_defect_pass() -> None:
    """So that tests of the sampled guard mean something."""
    settings = {"device_tokens": 256, "guard": "sampled", "guard_sample": 0.5}
    config = parse_config({"components": ["full"], **settings})
    cache = Cache(config, parts=own_parts(config))
    override(cache.evictor, evict=lambda self, component, n_slots, tier: 0)
    request = cache.begin(TokenKey(range(192)))
    assert cache.admit(request).admitted
    assert cache.allocate(request, 192)
    cache.computed(request, 192)
    cache.finish(request)
    assert cache.evict("full", 4) == 0
    with pytest.raises(ContractViolation, match="E6"):
        cache.evict("full", 4)


def test_a_poll_with_nothing_in_flight_is_not_looked_at() -> None:
    scene = Scene(host_tokens=64)
    guard = scene.cache.guard
    assert guard is not None
    scene.cache.poll()
    assert guard.looked_at == 0
    scene.cache.finish(scene.computed(PROMPT))
    before = guard.looked_at
    scene.cache.poll()
    assert guard.looked_at == before + 1
    scene.close()


def test_books_touched_between_operations_are_found_at_the_next_one() -> None:
    scene = Scene()
    scene.cached(PROMPT)
    (ledger,) = scene.component("base").devices
    ledger.evictable -= 1
    with pytest.raises(ContractViolation, match="T8: component 'base': device ledger does not"):
        scene.cache.drain()


def test_all_books_are_recomputed_every_so_many_operations() -> None:
    scene = Scene(full_check=5)
    guard = scene.cache.guard
    assert guard is not None
    for _ in range(13):
        scene.cache.drain()
    assert guard.full_checks == 2
    scene.cache.close()
    assert guard.full_checks == 3


def test_after_a_violation_closing_is_not_in_the_way() -> None:
    scene = Scene()
    scene.cached(PROMPT)
    scene.component("base").devices[0].evictable -= 1
    with pytest.raises(ContractViolation):
        scene.cache.drain()
    scene.cache.close()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("guard", "sometimes"), ("guard_sample", 0), ("guard_sample", 1.5), ("guard_full_check", 0)],
)
def test_a_setting_that_cannot_work_is_named(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"setting {setting}={value!r}"):
        parse_config({**SETTINGS, setting: value})
