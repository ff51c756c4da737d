"""A reference engine: requests in, tokens out, over one model's memory.

generation   a request and its progress
sampling     from logits to a token
line         waiting requests, by priority
schedule     which requests run next, and which make room
settings     limits and counts
drafting     drafts of tokens to come, which passes verify
draft_model  drafts of a smaller model
latencies    how long requests wait
engine       the loop around the model

Read `engine.Engine.step` first: it is the order of calls an engine on kvgraft makes.
"""

from __future__ import annotations

from kvgraft_transformers.engine.draft_model import DraftModel
from kvgraft_transformers.engine.drafting import Drafter, PromptLookup
from kvgraft_transformers.engine.engine import Engine
from kvgraft_transformers.engine.generation import (
    FinishReason,
    Generation,
    GenerationRequest,
    NewToken,
)
from kvgraft_transformers.engine.latencies import Latencies
from kvgraft_transformers.engine.sampling import (
    Choice,
    Constraint,
    Sampler,
    Sampling,
    TokenLogprob,
)
from kvgraft_transformers.engine.scoring import PromptToken
from kvgraft_transformers.engine.settings import EngineSettings, EngineTotals

__all__ = [
    "Choice",
    "Constraint",
    "DraftModel",
    "Drafter",
    "Engine",
    "EngineSettings",
    "EngineTotals",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "Latencies",
    "NewToken",
    "PromptLookup",
    "PromptToken",
    "Sampler",
    "Sampling",
    "TokenLogprob",
]
