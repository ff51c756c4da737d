"""Ctrl-C, where it must wait."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["UninterruptedImport", "uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C counts at the block's end; on other threads than the main one this does nothing.

    Raises:
        KeyboardInterrupt: it was pressed meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


class UninterruptedImport(MetaPathFinder):
    """Lets Ctrl-C wait while a module is imported, whoever imports it first.

    Torch is such a module: an exception in its initialization aborts the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @classmethod
    def install(cls, name: str) -> None:
        """Watch for the import of `name`, if it has not been imported."""
        if name not in sys.modules:
            sys.meta_path.insert(0, cls(name))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that cannot be interrupted; once."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with uninterrupted():
                load(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
