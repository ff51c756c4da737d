"""A state machine that drives components through the real core, against a brute-force model.

    found = drive(setup_for(["mine"], {"mine": {"window": 8}}))
    assert found.violation is None, found.steps

The model is built from a component's declaration and shares no code with the tree.

driving         `drive`: run the machine, get values back
machine         the Hypothesis rules: any order of calls an engine may make
scenes          rules that bring several requests together
picking         which request a rule is about, and how far it gets
drafting        conversations that decode in passes with drafts
constants       examples that do not depend on other imports
examples        one run of it, and how it ended; shrinking makes that small
harness         a call at a time, over leases, steps, donations and rooms
bench           the cache, the model, and the checks after every call
brute_force     which boundary, which hits: from the definition, token by token
defined         numbers that the core derives from its books, against their definitions
deriving        the model of a component, from its declaration
admissions      the expected answers and effects of admission
comparing       requests and pins compared whole
keeping         eviction policies that the model knows
keys            keys of conversations that go on
line            requests that wait, and how often each is overtaken
predicting      the expected result of a match
resuming        where requests can be resumed from, and the data they leave there
pins            prefixes that are pinned, and stay
publishing      data the tree must adopt of it
observing       the tree's content, as plain dictionaries
watching        readers of events, which must match the tree exactly
checks          conditions between two snapshots
legality        whether evictions were allowed, with tiers and recency
payloads        bytes that identify the tokens they were computed from
engines         transfers that run, fail and time out on demand; streams: those of the simulated
                device, accelerators: those of a device of torch's
memory          rows of pools to write and to read, on any device
hooks           hook calls, watched
judging         broken rules as `ContractViolation`
setups          component sets, with sizes, fitting and companions in components
trace           calls and their results, in words
"""

from __future__ import annotations

from kvgraft_testing.machine.components import paged_plugin, references, state_plugin
from kvgraft_testing.machine.driving import Drive, drive, search
from kvgraft_testing.machine.keeping import (
    BY_AGE,
    BY_AGE_UNLEARNT,
    BY_NAMESPACE,
    BY_PRIORITY,
    BY_TERM,
    Keeping,
)
from kvgraft_testing.machine.machine import CacheMachine, machine_for
from kvgraft_testing.machine.setups import Setup, setup_for, setups_for
from kvgraft_testing.machine.sizes import Options, Sizes

__all__ = [
    "BY_AGE",
    "BY_AGE_UNLEARNT",
    "BY_NAMESPACE",
    "BY_PRIORITY",
    "BY_TERM",
    "MACHINE_RULES",
    "CacheMachine",
    "Drive",
    "Keeping",
    "Options",
    "Setup",
    "Sizes",
    "drive",
    "machine_for",
    "paged_plugin",
    "references",
    "search",
    "setup_for",
    "setups_for",
    "state_plugin",
]

FOUND = """
    T1 T2 T3 T4 T5 T6 T7 T8 T9 T10 T11 M1 M2 M3 M4 M5 M7 M8 M9 I1 I2 I4 I6 I7 I8 I9 I10 I11 I12
    L1 L2 L3 L6 L7 E1 E2 E3 E4 E6 B1 B3 B4 B6 R1 R2 R5 R6 R7 R8 A1 A3 A5 A6 A7 A8 A9 A10 A11 A12 A13
    S2 S3 S4 S5 S7 S9 S10 H4 H8 D1 K2 K4 K5 K6 K7 V1 V2 V3 P7 G1 G2 G3 G4 G6
"""
MACHINE_RULES = frozenset(FOUND.split())
"""The rules the machine can find broken, by its own checks or by those of the core."""
