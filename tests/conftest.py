"""Hypothesis profiles: dev while writing, ci before merging, nightly and fuzz for long runs."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

COMMON = settings(
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

settings.register_profile("dev", COMMON, max_examples=15, stateful_step_count=40)
settings.register_profile(
    "ci", COMMON, max_examples=40, stateful_step_count=50, derandomize=True, print_blob=True
)
settings.register_profile("nightly", COMMON, max_examples=1000, stateful_step_count=100)
settings.register_profile(
    "fuzz", COMMON, max_examples=250, stateful_step_count=100, print_blob=True
)
settings.load_profile(os.environ.get("KVGRAFT_HYPOTHESIS_PROFILE", "dev"))
