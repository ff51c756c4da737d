"""The identity of a replay's payloads, so that replays share a store without mix-ups (S8).

A payload is a function of the tokens before it, and a token is an address of content in one
workload: other workloads use the same numbers for other content. So replays share stored data if
their workloads and the options of their components are equal, and both stamp. Pool sizes, policies
and rates do not matter. Page size and slot layout are in the fingerprint anyway.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np

from kvgraft.config import ComponentOptions
from kvgraft_replay.payload import STAMPS, Verify
from kvgraft_replay.workload import Workload

__all__ = ["identity"]


def identity(
    workload: Workload, components: Mapping[str, Mapping[str, object]], verify: Verify
) -> dict[str, str]:
    """The storage settings that identify a replay's data: model, weights and salt.

    Args:
        workload: the whole workload; how much of it is replayed does not matter.
        components: their options, as given.
        verify: with OFF, payloads have no stamps.
    """
    options = {
        name: {
            field: str(value)
            for field, value in given.items()
            if field not in ComponentOptions.model_fields
        }
        for name, given in components.items()
    }
    return {
        "model": f"kvgraft replay, {'no' if verify is Verify.OFF else STAMPS}",
        "weights": _digest(workload),
        "salt": json.dumps(options, sort_keys=True),
    }


def _digest(workload: Workload) -> str:
    """SHA-256 over the content of every request."""
    found = hashlib.sha256()
    for request in workload.requests:
        header = (request.prompt_tokens, request.output_tokens, len(request.content))
        found.update(np.array([header], dtype="<i8").tobytes())
        found.update(np.array(request.content, dtype="<i8").tobytes())
    return found.hexdigest()
