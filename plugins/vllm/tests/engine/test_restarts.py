"""vLLM on a CPU over kvgraft's stores: killed, started again, and answering as without them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines")
pytest.importorskip("vllm._custom_ops", reason="this vLLM has no kernels: make test-engines")

from plugins.vllm.tests.engine.lives import Life, live, prompts
from plugins.vllm.tests.engine.models import DTYPES, FAMILIES, write_model
from plugins.vllm.tests.engine.value_server import value_server

pytestmark = pytest.mark.filterwarnings("ignore")

ASKED = {"llama": prompts(), "gemma3_text": prompts(), "qwen3_next": prompts(n_tokens=1200)}

Ask = Callable[..., Life]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def alone(models: Path) -> Callable[[str], Life]:
    """The answers of an engine without any tier, by model; asked once."""
    said: dict[str, Life] = {}

    def ask(family: str) -> Life:
        if family not in said:
            said[family] = live(write_model(family, models), DTYPES[family], None, ASKED[family])
        return said[family]

    return ask


@pytest.fixture
def ask(models: Path) -> Ask:
    def ask(tier: dict[str, Any], family: str = "llama", **more: Any) -> Life:
        given = {"type": "KvgraftTier", "module_path": "kvgraft_vllm.tier", **tier}
        place = write_model(family, models)
        return live(place, DTYPES[family], given, ASKED[family], **more)

    return ask


def file_tier(directory: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(directory), "capacity": "64MB", "deadline_s": 1, **more}


@pytest.mark.parametrize("family", FAMILIES)
def test_after_kill_9_hits_come_from_the_store_and_answers_are_the_same(
    family: str, alone: Callable[[str], Life], ask: Ask, tmp_path: Path
) -> None:
    expected = alone(family)
    first = ask(file_tier(tmp_path), family)
    assert first.hit_tokens == [0, 0, 0]
    again = ask(file_tier(tmp_path), family)
    assert min(again.hit_tokens) > 0.8 * len(ASKED[family][0])
    assert again.counts["get.ok"] == first.counts["set.ok"]
    assert first.says_as(expected)
    assert again.says_as(expected)
    assert len([line for line in again.lines if "chunks from the store" in line]) >= 3


def damage(directory: Path) -> None:
    """Turn a bit in every block that holds a part of a payload."""
    for segment in directory.glob("*.kvseg"):
        stored = segment.read_bytes()
        with segment.open("r+b") as file:
            for place in range(2000, len(stored), 4096):
                if stored[place]:
                    file.seek(place)
                    file.write(bytes([stored[place] ^ 1]))


def test_damaged_chunks_are_computed_again(
    alone: Callable[[str], Life], ask: Ask, tmp_path: Path
) -> None:
    ask(file_tier(tmp_path))
    again = ask(file_tier(tmp_path), before=lambda tier: damage(tmp_path))
    assert again.counts["get.corrupt"] > 0
    assert again.says_as(alone("llama"))
    assert any("is damaged" in line for line in again.lines)


def test_a_full_store_keeps_its_size(
    alone: Callable[[str], Life], ask: Ask, tmp_path: Path
) -> None:
    small = file_tier(tmp_path, capacity="1MiB")
    for _ in range(2):
        assert ask(small).says_as(alone("llama"))
    assert sum(each.stat().st_size for each in tmp_path.glob("*.kvseg")) <= 1 << 20


def hang(tier: Any) -> None:
    """From now on no call of the store comes back."""
    backend = tier._tier.storage._attachment.calls.backend

    def never(*given: Any) -> Any:
        time.sleep(600)

    backend.get_into = backend.set_from = backend.exists = never


def test_a_store_that_hangs_costs_a_bounded_time(
    alone: Callable[[str], Life], ask: Ask, tmp_path: Path
) -> None:
    ask(file_tier(tmp_path))
    again = ask(file_tier(tmp_path), before=hang)
    assert again.says_as(alone("llama"))
    assert again.counts["get.timeout"] > 0
    assert "get.ok" not in again.counts


def test_a_store_that_is_taken_away_is_misses(
    alone: Callable[[str], Life], ask: Ask, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    ask(file_tier(store))
    again = ask(file_tier(store), before=lambda tier: shutil.rmtree(store))
    assert again.says_as(alone("llama"))


def test_other_weights_of_the_same_name_are_not_answered_from_the_store(
    ask: Ask, models: Path, tmp_path: Path
) -> None:
    ask(file_tier(tmp_path))
    other = write_model("llama", models / "other", seed=2)
    expected = live(other, "float32", None, ASKED["llama"])
    given = {"type": "KvgraftTier", "module_path": "kvgraft_vllm.tier", **file_tier(tmp_path)}
    said = live(other, "float32", given, ASKED["llama"])
    assert said.hit_tokens == [0, 0, 0]
    assert said.says_as(expected)


def test_valkey_outlives_the_engine_and_its_own_end_is_misses(
    alone: Callable[[str], Life], ask: Ask, tmp_path: Path
) -> None:
    with value_server(tmp_path) as (place, stop):
        tier = {"backend": "valkey", "path": place, "deadline_s": 1}
        ask(tier)
        again = ask(tier)
        assert min(again.hit_tokens) > 200
        assert again.says_as(alone("llama"))
        gone = ask(tier, before=lambda tier: stop())
        assert gone.hit_tokens == [0, 0, 0]
        assert gone.says_as(alone("llama"))
