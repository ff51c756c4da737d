"""The names that engines use are recorded, with what they take and offer."""

from __future__ import annotations

import json

from .engine_names import RECORDED, engine_names
from .surface import changes


def test_the_names_that_engines_use_are_those_recorded() -> None:
    found = changes(json.loads(RECORDED.read_text()), json.loads(json.dumps(engine_names())))
    assert not found, (
        "what engines use changed: undo it, or record it as tests/versioning/engine_names.py says, "
        "with a fragment in changes/:\n" + "\n".join(found)
    )
