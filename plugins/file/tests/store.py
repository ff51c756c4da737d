"""Stores of the file backend."""

from __future__ import annotations

from pathlib import Path

from kvgraft_file import FileBackend, FileOptions

__all__ = ["open_store", "segments"]


def open_store(
    directory: Path,
    capacity: int = 1 << 20,
    segment: int = 1 << 17,
    refresh_s: float = 0,
    max_open_files: int | None = None,
) -> FileBackend:
    """A small store."""
    given = {
        "capacity": capacity,
        "segment": segment,
        "refresh_s": refresh_s,
        "max_open_files": max_open_files,
    }
    return FileBackend(directory, FileOptions.model_validate(given))


def segments(directory: Path) -> list[Path]:
    """Its segment files, oldest first."""
    return sorted(directory.glob("*.kvseg"))
