"""A component as in production: without any sign of the suite.

engine       a small engine that calls hooks, serves, and writes notes; no suite needed
running      the engine beside the suite, and without it; differences of their notes
surroundings processes and modules without a sign of the suite
sealing      whether code changed kvgraft or Hypothesis during the suite
"""

from __future__ import annotations
