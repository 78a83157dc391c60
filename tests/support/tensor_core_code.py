"""Looks in PTX for what Triton does not guarantee: that a product in flight keeps the operands in its registers."""

from __future__ import annotations

import re

_REGISTER = r"%\w+"
_NO_RESULT = ("st.", "bra", "bar", "cp.", "red.", "wgmma.fence", "fence", "ret")


def loops_of(ptx: str) -> list[str]:
    """Returns the bodies of the loops: from a label to the branch back to it."""
    return [found[0] for found in re.finditer(r"(?ms)^(\$L__BB\w+):.*?bra(?:\.uni)?\s+\1;", ptx)]


def overwritten_operands(ptx: str) -> list[str]:
    """Returns the instructions that write to a register from which an asynchronous product still reads its operand.

    Each loop is passed twice, so that what one step leaves in flight meets the next step. See
    https://github.com/triton-lang/triton/issues/9433.
    """
    return [
        instruction
        for loop in loops_of(ptx)
        if "wgmma.mma_async" in loop
        for instruction in _overwriting(2 * _instructions(loop))
    ]


def _instructions(loop: str) -> list[str]:
    """Returns the instructions without labels, predicates, comments and braces around assembly."""
    lines = re.sub(r"//.*|^\s*\.loc.*|^\$\w+:", "", loop, flags=re.MULTILINE)
    parts = (re.sub(r"^[\s{}]*(@!?%\w+\s+)?", "", part) for part in lines.split(";"))
    return [part for part in parts if part]


def _overwriting(instructions: list[str]) -> list[str]:
    """Returns those of the consecutive `instructions` that write to an operand in flight."""
    found = []
    # The operands of the products of each group; the last group is not committed.
    groups: list[set[str]] = [set()]
    for instruction in instructions:
        operation, _, operands = instruction.partition(" ")
        lists = re.findall(r"\{([^}]*)\}", operands)
        if operation.startswith("wgmma.mma_async"):
            if len(lists) > 1:  # else the left operand is in shared memory
                groups[-1].update(re.findall(_REGISTER, lists[1]))
        elif operation.startswith("wgmma.commit_group"):
            groups.append(set())
        elif operation.startswith("wgmma.wait_group"):
            groups = groups[-1 - int(operands) :]
        elif not operation.startswith(_NO_RESULT):
            result = lists[0] if operands.lstrip().startswith("{") else operands.partition(",")[0]
            if set(re.findall(_REGISTER, result)) & set().union(*groups):
                found.append(instruction)
    return found
