"""Evaluates the PromQL of the documents over two scrapes of a collector.

It knows what they use: selectors, `rate`, `sum` with and without `by`, arithmetic and numbers.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvgraft_observe.prometheus import CacheCollector

__all__ = ["Labels", "Series", "evaluate", "scrape"]

Labels = frozenset[tuple[str, str]]
"""A series' labels and their values."""

Value = dict[Labels, float] | float
Scrape = Mapping[str, Mapping[Labels, float]]

WORD = re.compile(r'\s*([a-z_]+|\d+(?:\.\d+)?[a-z]?|"[^"]*"|[=!]~|!=|[-+*/(){}\[\],=])')
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
MATCHES: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "=~": lambda value, pattern: re.fullmatch(pattern, value) is not None,
    "!~": lambda value, pattern: re.fullmatch(pattern, value) is None,
}


class Series(NamedTuple):
    """The two scrapes between which rates are taken."""

    before: Scrape
    after: Scrape


def scrape(collector: CacheCollector) -> Scrape:
    """Every sample now, by name and labels, through Prometheus' text and its parser."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def evaluate(expression: str, series: Series) -> Value:
    """The expression's value at the second scrape.

    Rates are those between the two, as if they were a second apart.
    """
    parser = _Parser(WORD.findall(expression), series)
    value = parser.sum_of_terms()
    assert not parser.words, f"not understood: {parser.words}"
    return value


class _Parser:
    def __init__(self, words: Sequence[str], series: Series) -> None:
        self.words = list(words)
        self._series = series

    def _take(self, *expected: str) -> str:
        word = self.words.pop(0)
        assert not expected or word in expected, f"{word!r} is not one of {expected}"
        return word

    def _is_next(self, *words: str) -> bool:
        return bool(self.words) and self.words[0] in words

    def sum_of_terms(self) -> Value:
        value = self._product()
        while self._is_next("+", "-"):
            value = _apply(self._take(), value, self._product())
        return value

    def _product(self) -> Value:
        value = self._atom()
        while self._is_next("*", "/"):
            value = _apply(self._take(), value, self._atom())
        return value

    def _atom(self) -> Value:
        word = self._take()
        if word == "(":
            value = self.sum_of_terms()
            self._take(")")
            return value
        if word[0].isdigit():
            return float(word)
        if word == "sum":
            return self._sum()
        if word == "rate":
            self._take("(")
            name, matchers = self._selector(self._take())
            self._take("[")
            self._take("5m")
            self._take("]")
            self._take(")")
            before, after = (_chosen(each, name, matchers) for each in self._series)
            return {labels: value - before.get(labels, 0.0) for labels, value in after.items()}
        return _chosen(self._series.after, *self._selector(word))

    def _sum(self) -> Value:
        by = self._names() if self._is_next("by") and self._take() else ()
        self._take("(")
        summed = self.sum_of_terms()
        self._take(")")
        assert isinstance(summed, dict)
        found: dict[Labels, float] = {}
        for labels, value in summed.items():
            group = frozenset(each for each in labels if each[0] in by)
            found[group] = found.get(group, 0.0) + value
        return found

    def _names(self) -> list[str]:
        self._take("(")
        names = []
        while not self._is_next(")"):
            names.append(self._take())
            if self._is_next(","):
                self._take()
        self._take(")")
        return names

    def _selector(self, name: str) -> tuple[str, list[tuple[str, str, str]]]:
        matchers = []
        if self._is_next("{"):
            self._take("{")
            while not self._is_next("}"):
                label, match, value = self._take(), self._take(*MATCHES), self._take()
                matchers.append((label, match, value.strip('"')))
                if self._is_next(","):
                    self._take()
            self._take("}")
        return name, matchers


def _chosen(
    scraped: Scrape, name: str, matchers: list[tuple[str, str, str]]
) -> dict[Labels, float]:
    return {
        labels: value
        for labels, value in scraped.get(name, {}).items()
        if all(MATCHES[match](dict(labels).get(label, ""), to) for label, match, to in matchers)
    }


def _apply(word: str, left: Value, right: Value) -> Value:
    """Numbers with numbers or with each series; series with the one that has the same labels."""
    apply = OPERATORS[word]
    if isinstance(left, dict) and isinstance(right, dict):
        return {labels: apply(left[labels], right[labels]) for labels in left.keys() & right.keys()}
    if isinstance(left, dict):
        assert not isinstance(right, dict)
        return {labels: apply(value, right) for labels, value in left.items()}
    if isinstance(right, dict):
        return {labels: apply(left, value) for labels, value in right.items()}
    return float(apply(left, right))
