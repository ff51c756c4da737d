"""Errors of this package, beside the core's own.

KvgraftError
├── ConfigError
│   └── UnsupportedModelError    a model, or a layer of it, that no component can serve
├── AdmissionRefusedError        a sequence that does not fit, with the pool and the numbers
└── SessionError                 a call the session cannot serve: another prompt, beams, cropping
    └── PassError                a pass of which the cache cannot take all tokens; has its output
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvgraft import ConfigError, Decision, KvgraftError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["AdmissionRefusedError", "PassError", "SessionError", "UnsupportedModelError"]


class UnsupportedModelError(ConfigError):
    """A model keeps something that no component serves.

    Attributes:
        model_type: the model's own name for its family.
    """

    def __init__(self, model: PreTrainedModel, reason: str) -> None:
        self.model_type = str(model.config.model_type)
        super().__init__(f"model {type(model).__name__} ({self.model_type}): {reason}")


class AdmissionRefusedError(KvgraftError):
    """A sequence's slots cannot be promised, now or ever.

    Attributes:
        decision: the decision of admission, with the pools that are short.
        open_sessions: sessions that hold memory.
    """

    def __init__(self, decision: Decision, open_sessions: int) -> None:
        self.decision = decision
        self.open_sessions = open_sessions
        hint = f"; {open_sessions} open sessions hold memory until they finish or abort"
        super().__init__(f"{decision}{hint if open_sessions else ''}")


class SessionError(KvgraftError):
    """A session cannot serve a call, or not in this order."""


class PassError(SessionError):
    """A pass over several sessions was computed, but the cache could not take the tokens of some.

    These have an `error` and can only be aborted; the others continue.

    Attributes:
        output: what the model returned.
    """

    def __init__(self, errors: Sequence[KvgraftError], n_sessions: int, output: Any) -> None:
        self.output = output
        super().__init__(
            f"{len(errors)} of {n_sessions} sessions failed after a pass: {errors[0]}; abort those "
            "with an `error`, the others go on"
        )
