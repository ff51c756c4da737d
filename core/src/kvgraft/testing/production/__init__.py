"""A component as it is in production: where nothing of the suite can be seen.

engine       a small engine that asks and serves, and writes down what it sees; no suite needed
running      the engine beside the suite, and where there is none; what their notes say
surroundings processes and modules without a sign of the suite
sealing      whether code changed kvgraft or Hypothesis under the suite's feet
"""

from __future__ import annotations
