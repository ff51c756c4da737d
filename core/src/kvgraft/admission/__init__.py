"""Admission: demand vectors compared with headroom, pool by pool.

promises    where slots are promised to a request, or refused
decision    admitted, deferred, never fits; slots a request will need, derived from reach
"""

from __future__ import annotations

from kvgraft.admission.decision import Decision, Outcome, Shortage, Waiting

__all__ = ["Decision", "Outcome", "Shortage", "Waiting"]
