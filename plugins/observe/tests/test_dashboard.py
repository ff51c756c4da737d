"""The dashboard asks for metrics that there are, and shows all but those listed here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from kvgraft_observe.metrics import METRICS, Kind

NOT_SHOWN = {"kvgraft_touches"}

SELECTOR = re.compile(r"(kvgraft_\w+)\{([^}]*)\}")
"""A metric and the labels it is chosen by."""


def dashboard() -> dict[str, Any]:
    text = files("kvgraft_observe").joinpath("grafana.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def exposed() -> dict[str, tuple[str, set[str]]]:
    """By a sample's name, its family's and its labels."""
    found = {}
    for metric in METRICS:
        family, labels = metric.name.replace(".", "_"), {"instance", *metric.labels}
        if metric.kind is Kind.HISTOGRAM:
            found[f"{family}_seconds_bucket"] = (family, {*labels, "le"})
        else:
            found[family + "_total" * (metric.kind is Kind.COUNTER)] = (family, labels)
    return found


def test_every_expression_asks_for_metrics_by_labels_that_they_have() -> None:
    families = exposed()
    for expression in expressions():
        selectors = SELECTOR.findall(expression)
        assert len(selectors) == expression.count("kvgraft_") > 0, expression
        for name, chosen in selectors:
            labels = set(re.findall(r"(\w+)\s*[=!]", chosen))
            assert labels <= families[name][1], expression
            assert 'instance=~"$instance"' in chosen, expression
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            for name, _ in selectors:
                assert set(grouped.split(", ")) <= families[name][1], expression


def test_every_metric_is_shown_or_listed_as_not_shown() -> None:
    families = exposed()
    shown = {families[name][0] for each in expressions() for name, _ in SELECTOR.findall(each)}
    assert {metric.name.replace(".", "_") for metric in METRICS} - shown == NOT_SHOWN


def test_panels_have_places_of_their_own_and_a_data_source_to_choose() -> None:
    taken: set[tuple[int, int]] = set()
    numbers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {
            (at["x"] + right, at["y"] + down) for right in range(at["w"]) for down in range(at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    variables = [each["name"] for each in dashboard()["templating"]["list"]]
    assert variables == ["datasource", "instance"]
