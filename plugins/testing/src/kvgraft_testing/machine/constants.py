"""Examples that do not depend on other imports.

Hypothesis sometimes draws a number from the source of an imported module, unless that module is
below `site-packages`; for example, how many rules an example leaves out. Equal searches then differ
between a checkout and an installed kvgraft, alone and among other tests, and reading the sources
takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis.internal.conjecture import providers

__all__ = ["constants_of_modules_left_out"]

ASKED = "_get_local_constants"
"""The function of Hypothesis that collects them."""

NEEDED = frozenset({ASKED, "Constants", "CONSTANTS_CACHE"})
"""Names of Hypothesis that 6.131 has; a version without them draws other constants."""


@contextmanager
def constants_of_modules_left_out() -> Iterator[None]:
    """Let Hypothesis draw no constants from the source of modules while the block runs."""
    known: Any = vars(providers)
    if not known.keys() >= NEEDED:
        yield
        return
    none, permitted = known["Constants"](), known["CONSTANTS_CACHE"].cache
    ask, known[ASKED] = known[ASKED], lambda: none
    permitted.clear()
    try:
        yield
    finally:
        known[ASKED] = ask
        permitted.clear()
