from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvgraft_transformers import ModelMemory, Session

if importlib.util.find_spec("kvgraft_transformers") is None:
    collect_ignore_glob = ["test_*.py"]  # not installed on Python 3.10

PAGE = 16
CHUNK = 32

Runner = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads split sums differently from run to run of another shape, and are slower here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def _model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    from kvgraft_transformers.tiny import build_tiny_model

    return build_tiny_model(family, dtype=dtype)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., PreTrainedModel]:
    def build(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        return _model(family, dtype)

    return build


@pytest.fixture
def open_memory() -> Iterator[Callable[..., ModelMemory]]:
    """Small pools under the guard; every book is recomputed at the end."""
    from kvgraft_transformers import ModelMemory

    opened: list[ModelMemory] = []

    def build(model: PreTrainedModel, **settings: Any) -> ModelMemory:
        defaults: dict[str, Any] = {
            "page_size": PAGE,
            "chunk_tokens": CHUNK,
            "device_tokens": 512,
            "host_tokens": 1024,
            "guard": "on",
            "load": None,
            "probe_tokens": 0,  # the oracles open every family with it
        }
        memory = ModelMemory.open(model, **{**defaults, **settings})
        opened.append(memory)
        return memory

    yield build
    for memory in opened:
        memory.cache.drain()
        memory.cache.check_integrity()
        memory.close()


@pytest.fixture
def poison() -> Callable[[ModelMemory], None]:
    """Fill free slots with NaN, on both tiers: a read of one shows."""

    def fill(memory: ModelMemory) -> None:
        for each in memory.cache.mounted:
            component = each.component
            free = component.device.allocator.free_slots()
            for plane in component.device.planes:
                plane[free] = torch.nan
            if component.host is not None:
                free = component.host.allocator.free_slots()
                for spec in component.host.specs:
                    component.host.plane(spec.layer, spec.name)[free] = torch.nan

    return fill


@pytest.fixture
def run() -> Runner:
    """Logits of `tokens` from `start` on, one pass per chunk, with a session or a plain cache."""
    from kvgraft_transformers.probing import cache_argument, plain_cache

    def compute(
        model: PreTrainedModel,
        tokens: Sequence[int],
        session: Session | None = None,
        *,
        cuts: Sequence[int] = (),
        after: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        cache = plain_cache(model) if session is None else session.cache
        start = 0 if session is None else session.computed
        ends = [*cuts] or [*range(CHUNK, len(tokens), CHUNK), len(tokens)]
        logits = []
        for end in ends:
            if end <= start:
                continue
            ids = torch.tensor(tokens[start:end])[None]
            positions = torch.arange(start, end)[None]
            with torch.no_grad():
                output = model(
                    input_ids=ids,
                    position_ids=positions,
                    use_cache=True,
                    **{cache_argument(model): cache},
                )
            logits.append(output.logits[0])
            start = end
            after()
        return torch.cat(logits)

    return compute


@pytest.fixture
def tokens() -> Callable[..., list[int]]:
    def draw(n: int, seed: int = 1) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [int(token) for token in torch.randint(3, 500, (n,), generator=generator)]

    return draw


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local checkpoint in double precision, so that batches round nothing away."""
    from kvgraft_transformers.tiny_tokenizer import build_tiny_tokenizer

    directory = tmp_path_factory.mktemp("models") / "tiny-gemma"
    _model("gemma3_text", torch.float64).save_pretrained(directory)
    build_tiny_tokenizer().save_pretrained(directory)
    return directory


def evict_device(memory: ModelMemory) -> None:
    """Everything that is backed up leaves the device."""
    assert memory.cache.drain()
    for each in memory.cache.mounted:
        memory.cache.evict(each.name, each.component.device.capacity)


@pytest.fixture
def to_host() -> Callable[[ModelMemory], None]:
    return evict_device
