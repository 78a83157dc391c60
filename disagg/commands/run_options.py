"""Options of `disagg demo` and `disagg generate` that are not settings: prompts, sampling, output folder."""

from __future__ import annotations

import random

import msgspec

from disagg.core.errors import ConfigError
from disagg.core.sampling import check_sampling
from disagg.core.types import SamplingParams

DEMO_PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Write one sentence about the sea.",
    "A list of the planets of the solar system, from the one nearest to the sun to the one farthest from it:",
    "Explain to a child of ten, in plain words and with one example from the kitchen, why a pot of "
    "water that is heated from below starts to move in circles long before it boils.",
    "The old lighthouse keeper climbed the stairs every evening at the same hour. There were two "
    "hundred and twelve of them, and he had counted them so often that his legs knew the number "
    "better than his head. On the night of the great storm, however, he stopped halfway, because "
    "between two gusts of wind he had heard something that did not belong to the sea: somebody was "
    "knocking at the door below. He held his breath, waited for the next lull, and",
    "Minutes of the meeting of the water board. The chair opened the meeting at nine and asked "
    "whether the minutes of the last meeting could be accepted; they were, with one correction to the "
    "spelling of a name. The engineer then reported on the state of the three dams. The northern dam "
    "had been inspected in spring and needed no work. The middle dam leaked a little at its western "
    "end, as it had for years, and the leak had not grown. The southern dam was the oldest, and its "
    "gates had to be replaced before winter; three firms had sent offers, of which the cheapest could "
    "not begin before November. The treasurer said that the reserve would cover the middle offer but "
    "not the dearest. After an hour of discussion the board decided, with two votes against, to",
)
"""Prompts of a few to a few hundred tokens. Because of the different lengths, requests overlap in the demo."""


def demo_prompts(seed: int) -> tuple[str, ...]:
    """Returns `DEMO_PROMPTS`; a seed above 0 shuffles the words of each prompt."""
    if seed == 0:
        return DEMO_PROMPTS
    order = random.Random(seed)
    texts = (prompt.split() for prompt in DEMO_PROMPTS)
    return tuple(" ".join(order.sample(words, len(words))) for words in texts)


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one run: a request for each of `prompts`, all with the same `sampling`.

    Raises `ConfigError` for a missing or empty prompt, `InvalidRequestError` for bad sampling parameters.
    """

    prompts: tuple[str, ...] = DEMO_PROMPTS
    sampling: SamplingParams = SamplingParams()
    out_dir: str | None = None
    """Folder for the timeline and the machine-readable report; None writes neither."""
    deterministic: bool | None = None
    """Value of `model.deterministic` for a run whose tokens are compared. If None,
    `disagg.reference.answers.comparable` chooses the value."""

    prompts_from: str = "with --prompt TEXT"
    """Phrase for error messages that says how the user gives prompts to the command."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError(f"no prompt: give at least one {self.prompts_from}")
        for number, prompt in enumerate(self.prompts, 1):
            if not prompt.strip():
                raise ConfigError(f"prompt {number} is empty: give text {self.prompts_from}")
        check_sampling(self.sampling)
