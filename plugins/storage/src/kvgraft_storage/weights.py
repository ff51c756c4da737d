"""An identity of a model's weights, read from the files in a fraction of a second.

A digest of all of a large model's files would take minutes. This one takes the first bytes of every
tensor: fine-tuning, merging an adapter and quantizing change those.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["model_files", "weights_of"]

SAMPLE_NBYTES = 4096
"""Bytes of each tensor."""

N_SAMPLES = 256
"""Samples of a file whose tensors are not known, spread evenly."""

HEADER_LIMIT_NBYTES = 100 << 20
"""Longest header of a safetensors file."""

PATTERNS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
"""Files of weights; the first kind that exists counts."""


def weights_of(model: Path) -> str | None:
    """A digest of the weights in a directory, or of one file of weights; None if there are none.

    Raises:
        OSError: a file cannot be read.
    """
    if model.is_file():
        files = [model]
    else:
        kinds = (sorted(model.glob(pattern)) for pattern in PATTERNS)
        files = next((found for found in kinds if found), [])
    if not files:
        return None
    digest = hashlib.sha256(b"kvgraft weights 1\0")
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        for sample in _samples(path):
            digest.update(sample)
    return f"sampled:{digest.hexdigest()}"


def model_files(model: str, revision: str | None = None) -> Path | None:
    """Where a model's files are: a path, or a name in the cache of huggingface_hub.

    Returns:
        None if they are not on this machine; nothing is downloaded.
    """
    given = Path(model)
    if given.exists():
        return given
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # no name that a model can have
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _samples(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        size = path.stat().st_size
        text = file.read(_safetensors_header(file.read(8), size))
        yield text
        places = [8 + len(text) + start for start in _tensor_starts(text)]
        for place in places or sorted({size * each // N_SAMPLES for each in range(N_SAMPLES)}):
            file.seek(place)
            yield file.read(SAMPLE_NBYTES)


def _safetensors_header(start: bytes, nbytes: int) -> int:
    """Bytes of the header of a safetensors file; 0 for another file."""
    if len(start) != 8:  # the length of the header
        return 0
    (length,) = struct.unpack("<Q", start)
    return int(length) if 0 < length <= min(HEADER_LIMIT_NBYTES, nbytes - 8) else 0


def _tensor_starts(header: bytes) -> list[int]:
    try:
        tensors = json.loads(header)
        return sorted(
            int(tensor["data_offsets"][0])
            for name, tensor in tensors.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return []
