"""Profiles: the effort of the state machine."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import HealthCheck, Verbosity, settings

from kvgraft.errors import ConfigError

__all__ = ["PROFILES", "Profile", "profile_named"]


class Profile(NamedTuple):
    """Examples per component set, calls per example, and whether every run is the same."""

    name: str
    examples: int
    steps: int
    repeatable: bool

    def settings(self) -> settings:
        """As Hypothesis settings; nothing is stored and nothing printed."""
        return settings(
            max_examples=self.examples,
            stateful_step_count=self.steps,
            derandomize=self.repeatable,
            deadline=None,
            database=None,
            print_blob=False,
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("dev", examples=6, steps=40, repeatable=True),
        Profile("ci", examples=60, steps=50, repeatable=True),
        Profile("nightly", examples=1500, steps=60, repeatable=False),
    )
}


def profile_named(name: object) -> Profile:
    """A profile.

    Raises:
        ConfigError: no such profile.
    """
    if not isinstance(name, str) or name not in PROFILES:
        raise ConfigError(f"profile {name!r} is not one of {', '.join(PROFILES)}")
    return PROFILES[name]
