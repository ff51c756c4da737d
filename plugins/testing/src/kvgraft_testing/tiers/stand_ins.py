"""Stand-ins for packages that SGLang imports and that a CPU does not have, such as triton.

Nothing that moves or keeps pages is replaced: HiCache's classes are SGLang's own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

__all__ = ["install"]

NAMES = frozenset(
    {
        "IPython",
        "compressed_tensors",
        "cuda",
        "deep_ep",
        "deep_gemm",
        "flash_attn",
        "flashinfer",
        "gguf",
        "partial_json_parser",
        "sentencepiece",
        "sgl_kernel",
        "tilelang",
        "torchaudio",
        "torchvision",
        "traitlets",
        "triton",
        "tvm_ffi",
    }
)


class _Nothing:
    """Takes the place of a function, a decorator or a value."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if decorates else _Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Class(type):
    """Takes the place of a class, an enum among them."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Class(name, (), {}) if name[0].isupper() else _Nothing()
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Stand in for what is not installed, behind torch and transformers, which ask for it too."""
    import torch._inductor.runtime.triton_compat
    import torch.utils.flop_counter  # noqa: F401
    import transformers.image_utils
    import transformers.modeling_utils  # noqa: F401

    sys.meta_path.append(_Finder())
