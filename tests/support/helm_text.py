"""The few expressions of Helm that deploy/helm/make_chart.py writes, evaluated without Helm."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from deploy.helm.make_chart import LOADER

_EXPRESSION = re.compile(r"{{ (.*?) }}")


def render_chart(template: str, values: dict[str, Any], namespace: str) -> list[dict[str, Any]]:
    """Returns the objects of one template; none if it is that of another overlay."""
    first, *lines = template.splitlines(keepends=True)
    [overlay] = re.findall(r'^{{ if eq \.Values\.overlay "(\w+)" }}$', first)
    assert lines.pop() == "{{ end }}\n"
    if overlay != values["overlay"]:
        return []
    text = re.sub(
        r"{{ if \.Values\.createNamespace }}\n(.*?){{ end }}\n",
        lambda found: found[1] if values["createNamespace"] else "",
        "".join(lines),
        flags=re.DOTALL,
    )
    text = _EXPRESSION.sub(lambda found: _evaluate(found[1], values, namespace), text)
    return [one for one in yaml.load_all(text, LOADER) if one]


def _evaluate(expression: str, values: dict[str, Any], namespace: str) -> str:
    if expression == ".Release.Namespace":
        return namespace
    if expression == '"{{"':
        return "{{"
    if expression == 'merge (dict "name" "models") .Values.models | toJson':
        return json.dumps({"name": "models", **values["models"]})
    found: Any = values
    path = re.fullmatch(r"\.Values\.([\w.]+) \| toJson", expression)
    assert path is not None, expression
    for name in path[1].split("."):
        found = found[name]
    return json.dumps(found)
