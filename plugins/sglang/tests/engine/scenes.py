"""Scenes of SGLang's scheduling with kvgraft's tree, each in a process of its own.

    echo '{"scene": "random", "kind": "full", "seeds": [0, 1]}' |
        python -m plugins.sglang.tests.engine.scenes

Each line is a scene; it prints a JSON list, and when it has ended the exit status.
"""

from __future__ import annotations

import json
import os
import random as chance
import sys
from collections.abc import Sequence
from typing import Any

from plugins.sglang.tests.engine.scheduling import Scheduler, WrongSlotsError
from sglang.srt.mem_cache import base_prefix_cache, kv_cache_configurator, registry
from sglang.srt.mem_cache.allocator import paged, swa, token

from kvgraft import KvgraftError
from kvgraft_sglang import tree as tree_module
from kvgraft_sglang.allocator import PagesOfCache
from kvgraft_sglang.interface import TREE_INTERFACE
from kvgraft_sglang.tree_settings import VARIABLE

KINDS: dict[str, dict[str, Any]] = {
    "full": {"tokens": 1600, "page_size": 16, "chunk": 160},
    "tokens": {"tokens": 1600, "page_size": 1, "chunk": 160},
    "windows": {"tokens": 1920, "page_size": 16, "chunk": 160} | {"window": 64},
    "window tokens": {"tokens": 1920, "page_size": 1, "chunk": 160} | {"window": 48},
}
"""Pools of a server by kind: too small for the requests of a scene."""

N_REQUESTS = 24

ALPHABET = 5
"""Few tokens, so that prompts have beginnings in common."""


def opened(kind: str, tree: str | None = "lru", *, guard: str = "off", **more: Any) -> Scheduler:
    """A server with kvgraft's tree of a policy, or with SGLang's own (None)."""
    os.environ[VARIABLE] = json.dumps({"policy": tree or "lru", "guard": guard})
    given = {"window_tokens": 1280, **KINDS[kind], **more}
    return Scheduler("kvgraft" if tree else None, **given)


def play(scheduler: Scheduler, seed: int, n_requests: int = N_REQUESTS) -> dict[str, int]:
    """Prompts that share beginnings, chunked prefill, retractions, and clients that leave."""
    random = chance.Random(seed)
    bases = [
        [random.randrange(ALPHABET) for _ in range(random.randrange(50, 600))] for _ in range(6)
    ]
    aborted = 0
    for number in range(n_requests):
        base = random.choice(bases)
        own = [random.randrange(ALPHABET) for _ in range(random.randrange(1, 150))]
        prompt = base[: random.randrange(1, len(base) + 1)] + own
        scheduler.add(f"r{seed}.{number}", prompt, random.choice((1, 20, 300)))
        for _ in range(random.randrange(12)):
            scheduler.step()
        present = [*scheduler.waiting, *scheduler.running]
        if scheduler.chunked is not None:
            present.append(scheduler.chunked)
        if random.random() < 0.15 and present:
            scheduler.abort(random.choice(present))
            aborted += 1
    scheduler.run()
    return {
        "asked": scheduler.asked,
        "hits": scheduler.hits,
        "retractions": scheduler.retractions,
        "aborted": aborted,
        "ended": len(scheduler.ended),
        "chunks": scheduler.chunks,
    }


def random(kind: str, seeds: Sequence[int], tree: str | None = "lru", **more: Any) -> list[Any]:
    """Runs of several seeds: every slot that is read holds its token, and no memory is lost."""
    found = []
    for seed in seeds:
        scheduler = opened(kind, tree, **more)
        found.append(play(scheduler, seed))
        if tree is not None:
            scheduler.tree.sanity_check()
        scheduler.close()
    return found


def flushed(kind: str) -> list[Any]:
    """A flush of the idle server forgets everything, and it serves on."""
    scheduler = opened(kind)
    play(scheduler, 1, 10)
    scheduler.add("before", [1] * 100, 2)
    scheduler.run()
    hits = []
    for name in ("with", "without", "again"):
        if name == "without":
            scheduler.tree.reset()
            scheduler.rows.clear()
            scheduler.allocator.clear()
        before = scheduler.hits
        scheduler.add(name, [1] * 100, 2)
        scheduler.run()
        hits.append(scheduler.hits - before)
    return hits


def broken(kind: str, defect: str) -> list[str]:
    """A tree with a defect; the first complaint about it."""
    tree: Any = tree_module.KvgraftTree
    if defect == "rows are not repointed":
        tree._repoint = lambda *given: None
    elif defect == "windows are not mapped":
        tree._map_windows = lambda *given: None
    elif defect == "the next slots":
        plain = tree._tokens
        tree._tokens = lambda self, slots: plain(self, (slots + 1) % 60)
    elif defect == "a page is lost":
        pool: Any = PagesOfCache
        give_back = pool.give_back
        pool.give_back = lambda self, pages: give_back(self, pages[1:])
    try:
        for seed in range(20):
            scheduler = opened(kind)
            play(scheduler, seed)
            scheduler.close()
    except (WrongSlotsError, AssertionError, KvgraftError) as error:
        return [type(error).__name__, str(error)]
    return []


def refused(kind: str = "full", **options: Any) -> list[str]:
    """The reason for which a server does not start."""
    try:
        opened(kind, **options)
    except KvgraftError as error:
        return [str(error)]
    return []


def drift() -> list[str]:
    """How SGLang's prefix cache and allocators differ from those relied on."""
    modules = (base_prefix_cache, kv_cache_configurator, registry, paged, swa, token)
    return TREE_INTERFACE.differences(
        {name: each for at in modules for name, each in vars(at).items()}
    )


SCENES = {each.__name__: each for each in (random, flushed, broken, refused, drift)}


def main() -> None:
    for line in sys.stdin:
        given = json.loads(line)
        child = os.fork()
        if not child:
            sys.stdout.write(json.dumps(SCENES[given.pop("scene")](**given)) + "\n")
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
