"""Checks the shape of the product's code: sizes of functions, and that no class name stands for two things.

Kernels (functions under `triton.jit`) take one argument for each tensor, size and stride, and are excepted.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("disagg", "kernels", "staging", "transport", "prefill_node", "decode_node", "deploy")
MAX_PARAMETERS = 8
MAX_LINES = 60


def main() -> int:
    """Prints each finding on a line. Returns the exit status."""
    root = Path(__file__).resolve().parent.parent
    classes: defaultdict[str, list[str]] = defaultdict(list)
    findings: list[str] = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = str(path.relative_to(root))
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append(f"{name}:{node.lineno}")
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    findings += [
                        f"{name}:{node.lineno}: {node.name} {fault}" for fault in faults_of(node, package)
                    ]
    findings += [
        f"{', '.join(places)}: the class name {name} stands for {len(places)} things"
        for name, places in sorted(classes.items())
        if len(places) > 1
    ]
    print("\n".join(findings) or "shape: no function is too large, no class name is used twice")
    return 1 if findings else 0


def faults_of(function: ast.FunctionDef | ast.AsyncFunctionDef, package: str) -> Iterator[str]:
    """Yields each bound that a function exceeds."""
    if any("jit" in ast.dump(decorator) for decorator in function.decorator_list):
        return
    parameters = parameters_of(function)
    if parameters > MAX_PARAMETERS and package != "kernels":
        yield f"has {parameters} parameters, more than {MAX_PARAMETERS}: pass a struct"
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if lines > MAX_LINES:
        yield f"has {lines} lines, more than {MAX_LINES}: split it"


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Counts the parameters, without `self` and `cls`."""
    arguments = function.args
    names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    own = bool(names) and names[0].arg in ("self", "cls")
    return len(names) - own + (arguments.vararg is not None) + (arguments.kwarg is not None)


if __name__ == "__main__":
    sys.exit(main())
