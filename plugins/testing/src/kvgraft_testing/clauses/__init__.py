"""The clauses by family; importing this package registers them.

pools        slots and the bytes in them                        T
matching     data a component adds to a match                   M
reaching     the reach's description of itself                  M E A
locking      pages it pins                                      L
moving       copies between DEVICE and HOST                     B R
budgeting    slots it asks of admission                         A
hosting      components at home on HOST                         H
packaging    how the package presents itself                    P
production   where there is no suite, and how hooks answer      P D
versions     whether it works with later minor versions         P
driving      results of the state machine                       all of them
"""

from __future__ import annotations

from kvgraft_testing.clauses import (
    budgeting,
    driving,
    hosting,
    locking,
    matching,
    moving,
    packaging,
    pools,
    production,
    reaching,
    versions,
)

__all__ = [
    "budgeting",
    "driving",
    "hosting",
    "locking",
    "matching",
    "moving",
    "packaging",
    "pools",
    "production",
    "reaching",
    "versions",
]
