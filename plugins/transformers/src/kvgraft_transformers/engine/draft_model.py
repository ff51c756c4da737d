"""Drafts of a smaller model with the same tokenizer (assisted decoding).

The draft model has a kvgraft cache of its own. Each call begins a session there: it resumes from
what the calls before left, computes the tokens that are new, decodes the drafts, and is aborted. So
a rejected draft needs no undoing, and requests that the engine retracts or ends need no notice.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvgraft import TokenKey
from kvgraft_transformers.attention import attention_of_pass
from kvgraft_transformers.errors import AdmissionRefusedError
from kvgraft_transformers.memory import ModelMemory
from kvgraft_transformers.probing import cache_argument
from kvgraft_transformers.session import Session
from kvgraft_transformers.session_cache import SessionCache

__all__ = ["DraftModel"]

logger = logging.getLogger("kvgraft.drafts")


class DraftModel:
    """Drafts that a model decodes greedily.

    Args:
        memory: the model and its pools; `close` closes it.
        chunk_tokens: most tokens of one pass.

    It proposes nothing for a sequence that is longer than the model's context or its pools, or that
    has a token outside its vocabulary. A call that fails is logged, and proposes nothing either.

    Cost: for each call the tokens since the last cached page boundary, of a model with states since
    its last kept state (at most `chunk_tokens`), and a pass over one token for each further draft.
    """

    def __init__(self, memory: ModelMemory, chunk_tokens: int = 512) -> None:
        self.memory = memory
        self.chunk_tokens = chunk_tokens
        model = memory.model
        config = model.config.get_text_config(decoder=True)
        self._vocabulary = int(config.vocab_size)
        self._most_tokens = getattr(config, "max_position_embeddings", None) or sys.maxsize
        self._arguments: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._arguments["logits_to_keep"] = 1

    @classmethod
    def open(cls, model: PreTrainedModel, *, chunk_tokens: int = 512, **memory: Any) -> DraftModel:
        """Open pools for a draft model.

        Args:
            model: a decoder with a language-model head and the tokenizer of the engine's model.
            chunk_tokens: most tokens of one pass.
            memory: settings of `ModelMemory.open`. `device_tokens` of all running requests
                together are enough.

        Raises:
            UnsupportedModelError: the model keeps something that no component serves; it is named.
            ConfigError: settings that cannot work.
        """
        opened = ModelMemory.open(model, chunk_tokens=chunk_tokens, **memory)
        return cls(opened, chunk_tokens)

    def propose(self, key: TokenKey, most: int) -> Sequence[int]:
        """The tokens that the model would choose next; see `Drafter`."""
        end = key.n_tokens + most
        if end > self._most_tokens or int(key.tokens().max()) >= self._vocabulary:
            return ()
        memory, known = self.memory, copy.copy(key)
        session: Session | None = None
        try:
            memory.cache.poll()
            chunk = min(self.chunk_tokens, key.n_tokens)
            session = Session(memory, known, reserve=most, chunk=chunk, limit_tokens=end)
            session.open()
            return self._decode(session, most)
        except AdmissionRefusedError:
            return ()
        except Exception as error:  # noqa: BLE001 - a model may raise anything; requests go on
            logger.warning("the draft model proposes nothing: %s", error)
            return ()
        finally:
            if session is not None and not session.ended:
                session.abort()

    def _decode(self, session: Session, most: int) -> list[int]:
        """The next tokens of a session, whose key it extends by all but the last."""
        cache, drafts = self.memory.session_cache([session]), list[int]()
        try:
            with torch.inference_mode(), attention_of_pass(self.memory):
                while len(drafts) < most:
                    left = session.key.n_tokens - session.computed
                    n_new = cache.before_cut(min(left, self.chunk_tokens))
                    token = self._pass(cache, n_new)
                    if n_new == left:
                        drafts.append(token)
                        session.key.extend([token])
        finally:
            cache.release()
        return drafts

    def _pass(self, cache: SessionCache, n_new: int) -> int:
        """Compute the next tokens of the session; the one that is most likely to follow."""
        model = self.memory.model
        named = {cache_argument(model): cache}
        output = model(**cache.inputs(n_new), **named, **self._arguments)
        return int(output.logits[0, -1].argmax())

    def close(self) -> None:
        """Close the pools."""
        self.memory.close()
