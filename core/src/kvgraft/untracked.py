"""Objects that the garbage collector does not visit.

A full collection visits every object that could be part of a cycle: Python takes any object with
attributes, and any tuple of such, for one that could. At a million nodes of three components that
is a pause of a second. So nodes and what they consist of are taken off the collector's list, and
reference counts alone free them. Cells, names of pages and entries of queues are part of no cycle.
Nodes are, with their parents and children: a tree parts those it holds when it goes
(`Tree.__del__`), and a node that leaves it has neither.
"""

from __future__ import annotations

import ctypes
from gc import is_tracked

__all__ = ["untrack"]

_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes = [ctypes.py_object]
_untrack.restype = None


def untrack(objects: tuple[object, ...]) -> None:
    """Take objects off the collector's list, as far as they are on it; about 0.15 µs each."""
    for each in objects:
        if is_tracked(each):
            _untrack(each)
