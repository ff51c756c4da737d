"""Finds a model and its tokenizer before anything large is read, and reads it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import click

from kvgraft import ConfigError

__all__ = [
    "check_device",
    "expect_same_tokens",
    "find_checkpoint",
    "load_tokenizer",
    "load_weights",
    "one_line",
]

HUB_TIMEOUT_S = 5.0
"""Longest wait for the hub's first answer; its client would retry for half a minute."""


def one_line(error: BaseException) -> str:
    """An error's text without line breaks, shortened if it is long."""
    return textwrap.shorten(str(error), 300, placeholder=" ...")


def check_device(device: str) -> None:
    """Refuse a device that cannot run a model here, before anything is loaded.

    Raises:
        ConfigError: torch does not know it, does not find it, or it holds no data.
    """
    import torch

    try:
        on = torch.empty(1, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].removesuffix(".") if str(error) else "cannot be used"
        if reason.startswith("Expected one of"):  # and lists twenty devices
            reason = "torch knows no such device"
        raise ConfigError(
            f"--device {device!r}: {textwrap.shorten(reason, 120, placeholder=' ...')}; give cpu, "
            "or a device of this machine"
        ) from error
    if on.type == "meta":
        raise ConfigError(f"--device {device!r} holds no data; give cpu or cuda")


def find_checkpoint(model: str) -> bool:
    """Look for a model in a directory or on the hub.

    Returns:
        Whether all its files are on this machine, so that the hub is not needed.

    Raises:
        ConfigError: it is neither there nor in the hub's cache.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    path = Path(model)
    if path.is_absolute() or model.startswith(".") or path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model {model!r}: no config.json there; give a checkpoint's directory"
            )
        return True
    try:
        cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError as error:
        raise ConfigError(
            f"model {model!r} is no directory here and cannot be a name on the hub; give a "
            "checkpoint's directory, or a name such as Qwen/Qwen3-0.6B"
        ) from error
    problem = "is not asked, as HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        problem = _ask_hub(model)
    if problem and not cached:
        raise ConfigError(
            f"model {model!r} is no directory here and not in Hugging Face's "
            f"download cache, and {constants.ENDPOINT} "
            f"{problem}; give a checkpoint's directory, or another name"
        )
    if problem:
        click.echo(f"{constants.ENDPOINT} {problem}; taking {model} from the cache", err=True)
    return bool(problem)


def _ask_hub(model: str) -> str:
    """Why the hub does not have a model, as text behind the hub's address; "" if it does."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError as error:
        status = error.response.status_code
        return f"answers {status} (it has no such model, or wants you to log in: hf auth login)"
    except Exception as error:  # noqa: BLE001 - of the client's own HTTP library, which may change
        return f"cannot be reached ({one_line(error)})"
    return ""


def load_tokenizer(model: str, *, local: bool) -> Any:
    """A model's tokenizer, as transformers loads it.

    Args:
        model: a directory or a name on the hub.
        local: do not ask the hub.

    Raises:
        ConfigError: there is none, or it cannot encode text. For some families transformers makes
            such a tokenizer if files are missing.
    """
    from transformers import AutoTokenizer

    advice = "save the model's own beside its weights (tokenizer.save_pretrained)"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=local)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ConfigError(
            f"model {model!r} has no tokenizer that can be loaded; {advice}: {one_line(error)}"
        ) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ConfigError(f"model {model!r} has no tokenizer: it has only special tokens; {advice}")
    return tokenizer


def expect_same_tokens(draft_model: str, drafts: Any, model: str, tokenizer: Any) -> None:
    """Refuse a draft model whose tokenizer is not the model's.

    Args:
        draft_model: its directory or name.
        drafts: its tokenizer.
        model: directory or name of the model.
        tokenizer: the model's.

    Raises:
        ConfigError: it names a token that differs.
    """
    own, other = tokenizer.get_vocab(), drafts.get_vocab()
    if own == other:
        return
    token = min(text for text, number in own.items() ^ other.items())
    numbers = [each.get(token, "none") for each in (other, own)]
    raise ConfigError(
        f"--draft-model {draft_model!r}: token {token!r:.40} has the number {numbers[0]}, and "
        f"{numbers[1]} in {model!r}; give a model with the same tokenizer, or leave it out for "
        "prompt lookup"
    )


def load_weights(model: str, device: str, dtype: str, *, local: bool) -> Any:
    """A model with its weights, ready to run.

    Args:
        model: a directory or a name on the hub.
        device: where it runs.
        dtype: of its weights, or "auto".
        local: do not ask the hub.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    click.echo(f"loading {model} ...", err=True)
    try:
        weights = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=local)
        return weights.to(device).eval()
    except (OSError, ValueError, RuntimeError, AttributeError, AssertionError) as error:
        raise ConfigError(f"model {model!r}: {one_line(error)}") from error
