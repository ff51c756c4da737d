"""A byte-level tokenizer, trained on the standard library's sources without a download."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvgraft_transformers.tiny import VOCABULARY

__all__ = ["CHAT_TEMPLATE", "build_tiny_tokenizer"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template with marked turns, as in most chat models."""

SPECIAL = ["<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
SOURCES = ("abc.py", "argparse.py", "ast.py", "dataclasses.py", "typing.py", "urllib/parse.py")


def build_tiny_tokenizer(vocabulary: int = VOCABULARY) -> Any:
    """Build a tokenizer for models of `build_tiny_model`, with a chat template.

    Args:
        vocabulary: its size, including special tokens and 256 bytes.

    Takes under a second.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    tokenizer.train([str(library / name) for name in SOURCES], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
