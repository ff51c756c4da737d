"""The benchmark of whole traces; needs vLLM's Python files and `kvgraft-replay`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM's files are not at hand: make test-engine-files")
pytest.importorskip("kvgraft_replay", reason="traces are read by kvgraft-replay")

from plugins.vllm.tests.schedulers import Sizes
from plugins.vllm.tests.scheduling import BLOCK_SIZE, forked, requests_of

from kvgraft_replay.detect import open_workload
from kvgraft_vllm.manager_settings import ManagerSettings


@pytest.mark.parametrize("settings", [None, ManagerSettings()], ids=["vllm", "kvgraft"])
def test_a_conversation_resumes_behind_its_last_answer(
    tmp_path: Path, settings: ManagerSettings | None
) -> None:
    turns = [
        {"timestamp": 0, "input_length": 1024, "output_length": 512, "hash_ids": [0, 1]},
        {"timestamp": 60_000, "input_length": 2048, "output_length": 3, "hash_ids": [0, 1, 2, 3]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, turns)))
    requests, arrivals = requests_of(open_workload(trace), None, None)
    assert len(requests) == len(turns)
    sizes = Sizes(n_blocks=401, block_size=BLOCK_SIZE, step_tokens=1000, max_model_len=4096)
    found = forked(arrivals, sizes, settings)
    computed = 1024 + 512 - 1  # the last token of an answer is not computed
    resumed = computed // BLOCK_SIZE * BLOCK_SIZE
    assert found["hit %"] == pytest.approx(100 * resumed / (1024 + 2048))
    # two chunks, then one, all but the first with a token; each ends with a step of nothing
    assert found["steps"] == (2 + 511 + 1) + (1 + 2 + 1)
    assert found["preemptions"] == 0
