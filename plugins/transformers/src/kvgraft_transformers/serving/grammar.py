"""`response_format`: answers that follow a JSON schema, with llguidance.

llguidance is an optional dependency, the extra `grammar`. Without it a request with a format is
refused.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kvgraft_transformers.engine import Constraint
from kvgraft_transformers.serving.protocol import ApiError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Grammar", "Grammars"]

MOST_BLANKS = 16
"""Most blanks between two parts of a JSON text: a model must not continue them forever."""

LONGEST_REASON = 200
"""Most characters of llguidance's reason that the client gets."""


class Grammars:
    """Compiles response formats.

    Args:
        tokenizer: a transformers tokenizer with a `tokenizers` backend.
        end_tokens: the model's end-of-sequence tokens.

    Any thread may call it. The first format takes about a second, for the vocabulary.
    """

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = sorted(end_tokens)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def compile(self, schema: Mapping[str, Any]) -> Grammar:
        """The grammar of a JSON schema.

        Raises:
            ApiError: llguidance is not installed, or cannot follow the schema or read the
                tokenizer.
        """
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise ApiError(
                "response_format needs llguidance, which this server does not have; its operator "
                "can install kvgraft-transformers[grammar]",
                param="response_format",
            ) from error
        blanks = rf"[\x20\x0A\x0D\x09]{{0,{MOST_BLANKS}}}"
        vocabulary = self._read_vocabulary()
        text = LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_pattern": blanks}
        )
        reason = LLMatcher.validate_grammar(text, vocabulary)
        if reason:
            line = " ".join(reason.split())[:LONGEST_REASON]
            raise ApiError(
                f"response_format: no grammar for this schema: {line}", param="response_format"
            )
        return Grammar(LLMatcher(vocabulary, text))

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = from_tokenizer(
                        self._tokenizer, eos_token=self._end_tokens or None
                    )
                except ValueError as error:
                    raise ApiError(
                        f"response_format is not served for this model's tokenizer: {error}",
                        param="response_format",
                    ) from error
            return self._vocabulary


class Grammar(Constraint):
    """The grammar's state in one answer.

    Args:
        matcher: a matcher at the answer's start.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Grammar:
        """A copy for another answer, in the same state."""
        return Grammar(self._matcher.deep_copy())

    def allowed(self) -> torch.Tensor:
        """As in `Constraint`."""
        weights = bytearray(self._matcher.compute_logit_bias())
        self._check()
        return torch.frombuffer(weights, dtype=torch.uint8) > 0

    def accept(self, token: int) -> None:
        """As in `Constraint`.

        Raises:
            ValueError: the grammar does not allow the token.
        """
        self._matcher.consume_token(token)
        self._check()

    @property
    def ended(self) -> bool:
        """As in `Constraint`."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the grammar failed: {self._matcher.get_error()}")
