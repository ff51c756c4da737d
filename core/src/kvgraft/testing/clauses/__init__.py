"""The clauses by family; importing this package registers them.

pools        slots and the bytes in them                        T
matching     what a component adds to a match                   M
reaching     what its reach says of itself                      M E A
locking      what it pins                                       L
moving       copies between DEVICE and HOST                     B R
budgeting    what it asks of admission                          A
hosting      components at home on HOST                         H
packaging    how the package presents itself                    P
production   where there is no suite, and how hooks answer      P D
versions     whether it works with later minor versions         P
driving      everything the state machine compares              all of them
"""

from __future__ import annotations

from kvgraft.testing.clauses import (
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
