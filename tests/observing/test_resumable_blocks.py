"""The blocks reported as resumable are those up to which a request would resume."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra kv-events is not installed")

from kvgraft import Cache, ConfigError, Tier, TokenKey, WritePolicy
from kvgraft_observe.events import Pages
from kvgraft_observe.events.pages import Run
from kvgraft_observe.kv_events.resumable import Resumable
from kvgraft_observe.kv_events.translating import Translator
from kvgraft_observe.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored
from tests.serving import life
from tests.serving.setups import Setup, one_of_each_kind

MEDIA = {"GPU": Tier.DEVICE, "CPU": Tier.HOST}


def names_of_pages(cache: Cache, prompt: list[int]) -> list[int]:
    """The names of a prompt's whole pages, as events name them."""
    size = cache.config.page_size
    n_pages = len(prompt) // size
    key = TokenKey(prompt).data[: n_pages * cache.tree.page_bytes]
    run = Run(None, None, bytes(key), cache.tree.page_bytes, 0)
    return [int.from_bytes(each[-8:], "big") for each in Pages(run, 0, n_pages).hashes]


class Mirror:
    """The blocks a router believes in, by tier; it refuses blocks behind unknown ones."""

    def __init__(self) -> None:
        self.blocks: dict[Tier, set[int]] = {Tier.DEVICE: set(), Tier.HOST: set()}
        self.reasons: set[str | None] = set()

    def apply(self, events: Iterator[Any]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for there in self.blocks.values():
                    there.clear()
                continue
            there = self.blocks[MEDIA[event.medium]]
            hashes = event.block_hashes
            assert event.group_idx == 0
            if isinstance(event, BlockStored):
                assert event.kv_cache_spec_kind == "full_attention"
                assert len(event.token_ids) == len(hashes) * event.block_size
                assert event.parent_block_hash is None or event.parent_block_hash in there
                assert there.isdisjoint(hashes)
                there.update(hashes)
            else:
                assert isinstance(event, BlockRemoved)
                assert there.issuperset(hashes)
                there.difference_update(hashes)
                self.reasons.add(event.reason)


def resumable(cache: Cache, prompts: list[list[int]]) -> dict[Tier, set[int]]:
    """The blocks up to which requests with these prompts, and one token more, would resume."""
    found: dict[Tier, set[int]] = {Tier.DEVICE: set(), Tier.HOST: set()}
    for prompt in prompts:
        said, names = cache.explain(TokenKey([*prompt, 0])), names_of_pages(cache, prompt)
        size = cache.config.page_size
        found[Tier.DEVICE].update(names[: said.device_anchor // size])
        found[Tier.HOST].update(names[: said.anchor // size])
    return found


@pytest.mark.one_in(9)
@pytest.mark.parametrize("policy", list(WritePolicy), ids=lambda policy: policy.value)
@pytest.mark.parametrize("setup", one_of_each_kind())
def test_a_router_knows_how_far_each_prompt_would_resume(setup: Setup, policy: WritePolicy) -> None:
    reasons: set[str | None] = set()
    for seed in range(3):
        rng, mirror = Random(seed), Mirror()
        prompts = [[rng.randrange(1, 3) for _ in range(rng.randrange(2, 26))] for _ in range(25)]
        with setup.open(policy=policy, device_tokens=48, host_tokens=64) as cache:
            translator, stream = Translator(cache, report="resumable"), cache.events()
            for number, prompt in enumerate(prompts):
                request = cache.begin(TokenKey(prompt))
                if cache.admit(request).admitted:
                    cache.load_back(request)
                    assert cache.drain()
                    if request.load_failed:
                        cache.abort(request)
                    else:
                        life.prefill(cache, request)
                        cache.finish(request)
                else:
                    cache.abort(request)
                assert cache.drain()
                cache.poll()
                if rng.random() < 0.4:
                    cache.evict(rng.choice(cache.tree.components).name, rng.randrange(1, 12))
                if rng.random() < 0.05:
                    cache.clear()
                mirror.apply(translator.translate(stream.take()))
                assert mirror.blocks == resumable(cache, prompts[: number + 1])
        reasons |= mirror.reasons
    assert reasons & {"deleted", "leaf", "cascade"}


def test_a_cache_without_host_has_blocks_of_the_device_alone() -> None:
    with Cache.open({"full": {}, "mamba": {}}, page_size=2, device_tokens=64) as cache:
        translator, stream, mirror = Translator(cache, report="resumable"), cache.events(), Mirror()
        life.serve(cache, range(20))
        mirror.apply(translator.translate(stream.take()))
    assert len(mirror.blocks[Tier.DEVICE]) == 10
    assert not mirror.blocks[Tier.HOST]


def test_pages_that_left_are_forgotten() -> None:
    with Cache.open({"full": {}, "swa": {"window": 4}}, page_size=2, device_tokens=64) as cache:
        known, stream = Resumable(cache.tree.components, 2), cache.events()
        for first in range(0, 400, 40):
            life.serve(cache, range(first, first + 40))
            for event in stream.take():
                if hasattr(event, "tier"):
                    list(known.apply(event))
            assert len(known) <= 32
        assert len(known) > 0


def test_resumable_blocks_are_of_all_components_or_refused() -> None:
    with Cache.open(["full"], device_tokens=1024) as cache:
        with pytest.raises(ConfigError, match="with report='resumable', which is of all"):
            Translator(cache, ["full"], report="resumable")
        unknown: Any = "everything"
        with pytest.raises(ConfigError, match="report='everything'; give 'components' or 'resum"):
            Translator(cache, report=unknown)
