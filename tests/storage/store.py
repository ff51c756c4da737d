"""Stores of the file backend."""

from __future__ import annotations

from pathlib import Path

from kvgraft.storage.file import FileBackend, FileOptions

__all__ = ["open_store", "segments"]


def open_store(
    directory: Path, capacity: int = 1 << 20, segment: int = 1 << 17, refresh_s: float = 0
) -> FileBackend:
    """A small store."""
    options = FileOptions.model_validate(
        {"capacity": capacity, "segment": segment, "refresh_s": refresh_s}
    )
    return FileBackend(directory, options)


def segments(directory: Path) -> list[Path]:
    """Its segment files, oldest first."""
    return sorted(directory.glob("*.kvseg"))
