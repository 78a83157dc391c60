"""Checks PromQL against what `/metrics` really says: by kind and label, without values.

Strict: whatever the dashboards do not use is refused, so nothing passes because it was not understood.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
VARIABLES = {"$__rate_interval": "1m", "$group": ".*"}
"""What Grafana fills in."""


class QueryError(Exception):
    """What is wrong with a query."""


@dataclass(frozen=True)
class Vector:
    """The label sets of a result, and what its values are: gauge, counter, buckets or rate."""

    kind: str
    series: frozenset[Labels]

    def label_names(self) -> set[str]:
        """Labels that every series has."""
        return set.intersection(*({name for name, _ in labels} for labels in self.series))


class Page:
    """The text of a `/metrics`."""

    def __init__(self, text: str) -> None:
        self._kinds: dict[str, str] = {}
        self._series: dict[str, set[Labels]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._kinds[sample.name] = _kind(family.type, sample.name)
                self._series.setdefault(sample.name, set()).add(frozenset(sample.labels.items()))

    @property
    def names(self) -> set[str]:
        """All sample names."""
        return set(self._series)

    def check(self, query: str) -> Vector:
        """What the query gives. Raises `QueryError`."""
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        try:
            tree = promql.parse(query)
        except ValueError as exc:
            raise QueryError(f"{query}: {exc}") from exc
        found = self._evaluate(tree)
        if not isinstance(found, Vector) or found.kind not in ("gauge", "rate"):
            raise QueryError(f"{query}: is a {getattr(found, 'kind', 'number')}")
        return found

    def _evaluate(self, tree: Any) -> Vector | float:
        match tree:
            case promql.NumberLiteral():
                return float(tree.val)
            case promql.ParenExpr():
                return self._evaluate(tree.expr)
            case promql.VectorSelector():
                return self._select(tree)
            case promql.Call():
                return self._call(tree)
            case promql.AggregateExpr():
                return self._aggregate(tree)
            case promql.BinaryExpr():
                return self._combine(tree)
        raise QueryError(f"{tree}: is not used here, and not checked")

    def _select(self, tree: Any) -> Vector:
        if tree.name not in self._series:
            raise QueryError(f"{tree.name}: there is no such metric")
        found = self._series[tree.name]
        for matcher in tree.matchers.matchers:
            if not any(matcher.name in dict(labels) for labels in found):
                raise QueryError(f"{tree.name}: has no label {matcher.name}")
            found = {labels for labels in found if _matches(matcher, dict(labels).get(matcher.name, ""))}
        if not found:
            raise QueryError(f"{tree}: selects nothing")
        return Vector(self._kinds[tree.name], frozenset(found))

    def _call(self, tree: Any) -> Vector:
        if tree.func.name == "rate":
            found = self._select(tree.args[0].vector_selector)
            if found.kind not in ("counter", "buckets"):
                raise QueryError(f"{tree}: the rate of a {found.kind}")
            return Vector("rate" if found.kind == "counter" else "buckets", found.series)
        if tree.func.name == "histogram_quantile":
            share, found = (self._evaluate(argument) for argument in tree.args)
            if not isinstance(share, float) or not 0 < share < 1:
                raise QueryError(f"{tree}: the quantile {share}")
            if not isinstance(found, Vector) or found.kind != "buckets" or "le" not in found.label_names():
                raise QueryError(f"{tree}: not of buckets with le")
            if ("le", "+Inf") not in frozenset().union(*found.series):
                raise QueryError(f"{tree}: buckets without an end")
            return Vector("rate", _project(found, found.label_names() - {"le"}))
        raise QueryError(f"{tree.func.name}: is not used here, and not checked")

    def _aggregate(self, tree: Any) -> Vector:
        found = self._evaluate(tree.expr)
        if str(tree.op) not in ("sum", "max", "count") or not isinstance(found, Vector):
            raise QueryError(f"{tree}: is not used here, and not checked")
        if found.kind == "counter":
            raise QueryError(f"{tree}: of a counter")
        by = set(tree.modifier.labels) if tree.modifier is not None else set()
        if tree.modifier is not None and tree.modifier.type != promql.AggModifierType.By:
            raise QueryError(f"{tree}: is not used here, and not checked")
        if missing := by - found.label_names():
            raise QueryError(f"{tree}: by {', '.join(sorted(missing))}, which is no label of it")
        return Vector(found.kind, _project(found, by))

    def _combine(self, tree: Any) -> Vector | float:
        sides = [self._evaluate(tree.lhs), self._evaluate(tree.rhs)]
        vectors = [side for side in sides if isinstance(side, Vector)]
        if str(tree.op) not in ("+", "-", "*", "/") or tree.modifier is not None or not vectors:
            raise QueryError(f"{tree}: is not used here, and not checked")
        if any(vector.kind not in ("gauge", "rate") for vector in vectors):
            raise QueryError(f"{tree}: of a counter or of buckets")
        series = frozenset.intersection(*(vector.series for vector in vectors))
        if not series:
            raise QueryError(f"{tree}: no series of the left has its like on the right")
        return Vector("gauge", series)


def _kind(family: str, sample: str) -> str:
    if family == "histogram":
        return "buckets" if sample.endswith("_bucket") else "counter"
    return family


def _matches(matcher: Any, value: str) -> bool:
    if matcher.op == promql.MatchOp.Equal:
        return bool(value == matcher.value)
    if str(matcher.op) == "MatchOp.Re":
        return re.fullmatch(matcher.value, value) is not None
    raise QueryError(f"{matcher}: is not used here, and not checked")


def _project(vector: Vector, names: set[str]) -> frozenset[Labels]:
    return frozenset(frozenset(pair for pair in labels if pair[0] in names) for labels in vector.series)
