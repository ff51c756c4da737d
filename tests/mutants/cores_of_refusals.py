"""More cores with one defect each: steps that have no room for all requests."""

from __future__ import annotations

from kvgraft_scheduling.stepping import Stepper

from .cores import Patch, mutant
from .cores_held_out import edited

__all__: list[str] = []


@mutant("everything", "A5", "T9", "A7", "L2")
def a_refused_request_counts_its_step_as_computed(patch: Patch) -> None:
    edited(
        Stepper.end,
        "self.rows.given[refusing] = self.rows.length[refusing]",
        "self.rows.given[refusing] = self.rows.length[refusing] + batch.n_tokens",
    )(patch)


@mutant("everything", "A5", "T11")
def a_refused_requests_key_gets_the_token(patch: Patch) -> None:
    edited(Stepper.end, "self._append(batch, given)", "self._append(batch, [*given, *refused])")(
        patch
    )


@mutant("everything", "G2", "A5", "T9", "A7")
def a_refused_request_keeps_the_tokens_of_its_last_pass(patch: Patch) -> None:
    edited(Stepper.end, "self.rows.given[refusing] = self.rows.length[refusing]", "pass")(patch)
