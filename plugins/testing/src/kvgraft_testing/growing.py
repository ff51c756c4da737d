"""Queries as a later minor version of the contract would pass them to hooks."""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple, TypeVar

__all__ = ["grown"]

Query = TypeVar("Query", bound=NamedTuple)


def grown(query: Query) -> Query:
    """The query with one more field at its end; by name it reads as before."""
    kind = type(query)
    fields = {
        "__slots__": (),
        "_fields": (*kind._fields, "added_later"),
        "added_later": property(itemgetter(len(query))),
    }
    longer: type[Query] = type(kind.__name__, (kind,), fields)
    return tuple.__new__(longer, (*query, "new"))
