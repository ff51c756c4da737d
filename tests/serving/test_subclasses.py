"""A cache is a class as any other: its signature is its own, and others derive from it."""

from __future__ import annotations

import inspect
import pydoc
from abc import ABC, abstractmethod

import pytest

from kvgraft import Cache, CacheConfig, TokenKey
from kvgraft.config import GuardMode


class Named(ABC):
    @abstractmethod
    def title(self) -> str:
        """Its name, for a log."""


class TenantCache(Named, Cache):
    """Of one tenant, with sizes of its own."""

    def __init__(self, tenant: str, n_tokens: int, guard: GuardMode) -> None:
        config = CacheConfig(components={"full": {}}, device_tokens=n_tokens, guard=guard)
        super().__init__(config)
        self.tenant = tenant

    def title(self) -> str:
        return f"{self.tenant} of {self.config.device_tokens}"

    def abort(self, request: object) -> None:
        self.tenant += " aborts"
        super().abort(request)


@pytest.mark.plain_build  # the compiler leaves out how arguments are given
def test_the_signature_of_a_cache_names_its_arguments() -> None:
    names = ["config", "plugins", "transfers", "available", "parts", "clock"]
    assert list(inspect.signature(Cache).parameters) == names
    said = pydoc.plain(pydoc.render_doc(Cache)).replace("|", "")
    assert "Cache(config:" in "".join(said.split())  # Python 3.13 gives each argument a line


@pytest.mark.parametrize("guard", GuardMode)
def test_a_subclass_may_take_other_arguments_and_have_abstract_bases(guard: GuardMode) -> None:
    with TenantCache("a", 1024, guard) as cache:
        assert isinstance(cache, TenantCache)
        assert type(cache).__module__ == __name__
        assert cache.title() == "a of 1024"
        cache.abort(cache.begin(TokenKey(range(20))))
        assert cache.title() == "a aborts of 1024"
        assert (cache.guard is None) == (guard is GuardMode.OFF)
        cache.drain()
        if guard is GuardMode.ON:
            assert cache.guard.looked_at == 3
