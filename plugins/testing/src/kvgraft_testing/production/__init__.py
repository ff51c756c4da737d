"""A component as it is in production: where nothing of the suite can be seen.

engine       a small engine that asks and serves, and writes notes; no suite needed
running      the engine beside the suite, and without it; differences of their notes
surroundings processes and modules without a sign of the suite
sealing      whether code changed kvgraft or Hypothesis under the suite's feet
"""

from __future__ import annotations
