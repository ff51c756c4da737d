"""The names of the core that components see are recorded for every version of the contract."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvgraft import API_VERSION
from kvgraft.contract import ApiVersion

from .surface import FROZEN, Surface, breaks, changes, recorded, surface

VERSIONS = sorted(ApiVersion.parse(path.name) for path in FROZEN.iterdir())
SAME_MAJOR = [
    str(version) for version in VERSIONS if version.major == ApiVersion.parse(API_VERSION).major
]


def test_the_surface_is_the_one_recorded_for_this_version() -> None:
    assert (FROZEN / API_VERSION).is_dir(), f"record API {API_VERSION}: docs/versioning.md says how"
    found = changes(recorded(API_VERSION), json.loads(json.dumps(surface())))
    assert not found, (
        "the components' view changed: undo it, or raise API_VERSION in kvgraft/contract.py and "
        "record a new surface.json as docs/versioning.md says:\n" + "\n".join(found)
    )


@pytest.mark.parametrize("version", SAME_MAJOR)
def test_nothing_an_older_version_offered_is_broken(version: str) -> None:
    found = breaks(recorded(version), json.loads(json.dumps(surface(version=version))))
    assert not found, (
        f"components written for API {version} would break: undo it, or raise the major version "
        "in kvgraft/contract.py:\n" + "\n".join(found)
    )


def edited(path: str, edit: Callable[[Any], Any]) -> Surface:
    """The recorded surface with the value at a path of keys replaced; None removes it."""
    made = copy.deepcopy(recorded("1.0"))
    *outer, last = path.split("/")
    place: Any = made
    for key in outer:
        place = place[key]
    value = edit(copy.deepcopy(place.get(last)))
    if value is None:
        del place[last]
    else:
        place[last] = value
    return made


SHAPES = "shapes/kvgraft."
BREAKING: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "hook removed": ("contract/hooks/budget_contribution", lambda _: None),
    "argument renamed": ("contract/hooks/finalize_match_result", lambda _: ["component", "match"]),
    "arguments swapped": ("contract/hooks/budget_contribution", lambda was: was[::-1]),
    "argument added for everyone": (
        "contract/hooks/budget_contribution",
        lambda was: [*was, "tenant"],
    ),
    "hook required": ("contract/required", lambda was: [*was, "budget_contribution"]),
    "inverse required": (
        "contract/inverses",
        lambda was: [*was, ["finalize_match_result", "budget_contribution"]],
    ),
    "capability removed": ("contract/capabilities", lambda was: was[1:]),
    "type removed": (f"{SHAPES}MatchView", lambda _: None),
    "field removed": (f"{SHAPES}MatchView/takes", lambda was: was[:-1]),
    "fields reordered": (f"{SHAPES}DemandQuery/takes", lambda was: was[::-1]),
    "field put first": (f"{SHAPES}DemandQuery/takes", lambda was: ["tenant=None", *was]),
    "field without a default": (f"{SHAPES}DemandQuery/takes", lambda was: [*was, "tenant"]),
    "default changed": (f"{SHAPES}ComponentMatch/takes", lambda _: ["limit_pages", "x=None"]),
    "field that moves those of subclasses": (
        f"{SHAPES}pools.Component/takes",
        lambda was: [*was, "tenant=None"],
    ),
    "option removed": (f"{SHAPES}AttentionOptions/takes", lambda was: was[1:]),
    "parameter without a default": (
        f"{SHAPES}pools.paged_pools/takes",
        lambda was: [*was, "tenant"],
    ),
    "tuple no longer a tuple": (f"{SHAPES}Demand/kind", lambda _: "class"),
    "direction removed": (f"{SHAPES}Direction/members", lambda _: {"BACKUP": "backup"}),
    "method removed": (f"{SHAPES}pools.DevicePool/offers/plane", lambda _: None),
    "method takes less": (f"{SHAPES}pools.DevicePool/offers/plane", lambda _: ["layer"]),
    "property became a method": (f"{SHAPES}pools.DevicePool/offers/capacity", lambda _: []),
    "constant changed": (f"{SHAPES}pools.SLOT_BYTES", lambda _: 8),
}


@pytest.mark.parametrize("case", BREAKING)
def test_a_breaking_change_is_seen(case: str) -> None:
    path, edit = BREAKING[case]
    (found,) = breaks(recorded("1.0"), edited(path, edit))
    assert path.split("/")[-1] in found or path.split("/")[1] in found


COMPATIBLE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "type": (f"{SHAPES}WaitQuery", lambda _: {"kind": "tuple", "takes": [], "offers": {}}),
    "field": (f"{SHAPES}MatchView/takes", lambda was: [*was, "tenant=None"]),
    "keyword of a class": (
        f"{SHAPES}pools.Component/takes",
        lambda was: [*was, "*, tenant=None"],
    ),
    "option": (f"{SHAPES}AttentionOptions/takes", lambda was: [*was, "*, sinks=0"]),
    "parameter": (f"{SHAPES}pools.paged_pools/takes", lambda was: [*was, "alignment=64"]),
    "direction": (f"{SHAPES}Direction/members", lambda was: {**was, "STORE": "store"}),
    "method": (f"{SHAPES}pools.DevicePool/offers", lambda was: {**was, "zero": ["slots"]}),
}


@pytest.mark.parametrize("case", COMPATIBLE)
def test_an_addition_is_recorded_for_the_next_version_and_breaks_nothing(case: str) -> None:
    path, edit = COMPATIBLE[case]
    grown = edited(path, edit)
    assert changes(recorded("1.0"), grown)
    assert breaks(recorded("1.0"), grown) == []
