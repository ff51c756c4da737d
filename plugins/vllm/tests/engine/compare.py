"""kvgraft's tier beside vLLM's own `fs` tier: restarts and damaged bytes, as a table.

python -m plugins.vllm.tests.engine.compare llama gemma3_text qwen3_next
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import vllm
from plugins.vllm.tests.engine.lives import Life, live, prompts
from plugins.vllm.tests.engine.models import DTYPES, FAMILIES, write_model

N_PROMPTS = 6


def damage(directory: Path) -> None:
    """Turn the same bit in every block of every file that holds a part of a payload."""
    for path in directory.rglob("*"):
        if path.suffix in (".bin", ".kvseg"):
            stored = path.read_bytes()
            with path.open("r+b") as file:
                for place in range(2003, len(stored), 4096):
                    if stored[place]:
                        file.seek(place)
                        file.write(bytes([stored[place] ^ 0x40]))


def row(family: str, kind: str, what: str, life: Life, expected: Life) -> str:
    right = sum(mine[0] == yours[0] for mine, yours in zip(life.answers, expected.answers))
    counts = " ".join(f"{name}={n}" for name, n in sorted(life.counts.items()) if "get" in name)
    return (
        f"| {family} | {kind} | {what} | {sum(life.hit_tokens)} | {right} of {N_PROMPTS} "
        f"| {life.says_as(expected)} | {life.seconds:.1f} | {counts} |"
    )


def compare(family: str, place: Path) -> None:
    model, dtype = write_model(family, place), DTYPES[family]
    asked = prompts(N_PROMPTS, 1200 if family == "qwen3_next" else 300)
    expected = live(model, dtype, None, asked)
    print(f"| {family} | none | | 0 | | | {expected.seconds:.1f} | |", flush=True)
    for kind in ("kvgraft", "fs"):
        store = Path(tempfile.mkdtemp(dir=place))
        tiers: dict[str, dict[str, Any]] = {
            "kvgraft": {
                "type": "KvgraftTier",
                "module_path": "kvgraft_vllm.tier",
                "path": str(store),
                "capacity": "256MB",
            },
            "fs": {"type": "fs", "root_dir": str(store)},
        }
        first = live(model, dtype, tiers[kind], asked)
        print(row(family, kind, "first", first, expected), flush=True)
        again = live(model, dtype, tiers[kind], asked)
        print(row(family, kind, "restarted", again, expected), flush=True)
        hurt = live(model, dtype, tiers[kind], asked, before=lambda tier, at=store: damage(at))  # type: ignore[misc]
        print(row(family, kind, "damaged", hurt, expected), flush=True)


if __name__ == "__main__":
    print(f"vLLM {vllm.__version__}, {N_PROMPTS} prompts")
    print("| model | tier | life | hit tokens | answers right | log-probabilities | s | loads |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for family in sys.argv[1:] or FAMILIES:
            compare(family, Path(directory))
