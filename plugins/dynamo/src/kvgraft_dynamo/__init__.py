"""kvgraft's engine for transformers as a worker of NVIDIA Dynamo.

command    `kvgraft dynamo-worker`
worker     the engine behind Dynamo's interface for engines
handing    the hand-over between workers that prefill and workers that decode
requests   Dynamo's requests and answers, in the engine's words

Modules that import Dynamo, torch or transformers are imported only when a worker starts.
"""

from __future__ import annotations

__all__: list[str] = []
