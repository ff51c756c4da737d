"""A reference engine: requests in, tokens out, over one model's memory.

generation   a request and its progress
sampling     from logits to a token
schedule     which requests run next, and which make room
settings     limits and counts
engine       the loop around the model

Read `engine.Engine.step` first: it is the order of calls an engine on kvgraft makes.
"""

from __future__ import annotations

from kvgraft_transformers.engine.engine import Engine
from kvgraft_transformers.engine.generation import (
    FinishReason,
    Generation,
    GenerationRequest,
    NewToken,
)
from kvgraft_transformers.engine.sampling import Sampler, Sampling
from kvgraft_transformers.engine.settings import EngineSettings, EngineTotals

__all__ = [
    "Engine",
    "EngineSettings",
    "EngineTotals",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "NewToken",
    "Sampler",
    "Sampling",
]
