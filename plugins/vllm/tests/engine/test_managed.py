"""kvgraft as the cache manager of a real vLLM on a CPU: answers are those of vLLM's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines")
pytest.importorskip("vllm._custom_ops", reason="this vLLM has no kernels: make test-engines")

from plugins.vllm.tests.engine.managed import KVGRAFT, NONE, OWN, POOLS, Answers, answer
from plugins.vllm.tests.engine.models import FAMILIES, write_model

pytestmark = pytest.mark.filterwarnings("ignore")

Ask = Callable[..., Answers]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Answers by model, manager and blocks; each engine is asked once."""
    models = tmp_path_factory.mktemp("models")

    @cache
    def ask(family: str, manager: str, n_blocks: int, **more: Any) -> Answers:
        return answer(write_model(family, models), family, manager, n_blocks, **more)

    return ask


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_vllms_manager_and_of_no_cache(ask: Ask, family: str) -> None:
    wide, tight = POOLS[family].wide, POOLS[family].tight
    expected = ask(family, NONE, wide).tokens
    for n_blocks in (wide, tight):
        own, mine = ask(family, OWN, n_blocks), ask(family, KVGRAFT, n_blocks)
        assert own.tokens == expected
        assert mine.tokens == expected
        assert mine.cached >= own.cached > 0
        assert mine.counts["prefix_cache_hits"] == mine.cached
        assert mine.counts["num_preemptions"] <= own.counts["num_preemptions"]
    assert ask(family, OWN, tight).cached < ask(family, OWN, wide).cached, "nothing is evicted"


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_answers_with_drafts_by_n_grams_are_those_without(ask: Ask, family: str) -> None:
    mine = ask(family, KVGRAFT, POOLS[family].tight, drafts=True)
    assert mine.tokens == ask(family, NONE, POOLS[family].wide).tokens
    assert mine.cached
    assert mine.counts["spec_decode_num_accepted_tokens"]


def leave_out_copies(scheduler: Any) -> None:
    scheduler.kv_cache_manager.take_kv_cache_block_copies = lambda: ([], [])


def test_answers_are_wrong_if_states_are_not_copied(ask: Ask) -> None:
    family, n_blocks = "qwen3_next", POOLS["qwen3_next"].wide
    mine = ask(family, KVGRAFT, n_blocks, before=leave_out_copies)
    assert mine.cached == ask(family, KVGRAFT, n_blocks).cached
    assert mine.n_equal(ask(family, NONE, n_blocks)) < len(mine.tokens) // 2
