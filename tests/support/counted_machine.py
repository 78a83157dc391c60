"""State machines that count their steps and what is done in them, and a run of as many steps as a test asks for."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

Step = TypeVar("Step", bound=Callable[..., Any])
STEPS_OF_AN_EXAMPLE = 250


def counted(step: Step) -> Step:
    """Below `rule`: each call is counted by the rule's name, also where another rule makes it."""

    @functools.wraps(step)
    def call(self: CountedMachine, *given: Any, **named: Any) -> Any:
        type(self).done[step.__name__] += 1
        return step(self, *given, **named)

    return call  # type: ignore[return-value]


class CountedMachine(RuleBasedStateMachine):
    """Counts over all examples of a class. Invariants are looked at when an example begins, and after each step."""

    done: ClassVar[Counter[str]]
    looks: ClassVar[int]
    examples: ClassVar[int]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.start_counting()

    def __init__(self) -> None:
        super().__init__()
        type(self).examples += 1

    @classmethod
    def start_counting(cls) -> None:
        cls.done, cls.looks, cls.examples = Counter(), 0, 0

    @classmethod
    def steps(cls) -> int:
        """Rules that were carried out, each followed by all invariants."""
        return cls.looks - cls.examples

    @invariant()
    def was_looked_at(self) -> None:
        type(self).looks += 1


def run_steps(machine: type[CountedMachine], least_steps: int) -> None:
    """`least_steps` steps or more, the same each time. Raises what a step or an invariant raises."""
    machine.start_counting()
    many = settings(
        max_examples=-(-least_steps // STEPS_OF_AN_EXAMPLE) * 8 // 5,  # many examples end early
        stateful_step_count=STEPS_OF_AN_EXAMPLE,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=many)  # type: ignore[no-untyped-call]
    assert machine.steps() >= least_steps, f"{machine.steps()} steps: more examples are needed"
