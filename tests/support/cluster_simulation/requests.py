"""Requests of clients: the right answer of each is known, and every output is compared when it comes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
from fake_model import VOCAB, check_scores, fake_answers

from disagg.core.errors import DisaggError
from disagg.core.types import SamplingParams
from disagg.router.answers import Output, SessionReport
from disagg.router.session_events import Loss

STEM_TOKENS = 32


def text_of(tokens: Sequence[int]) -> str:
    """One character for each token."""
    return "".join(chr(0x100 + token) for token in tokens)


@dataclass(eq=False)
class ClientRequest:
    """One request, and what its client has received."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    timeout_s: float
    session: str = ""
    router: str = ""
    """Name of its router."""
    abort_after: int = -1
    """The client leaves after so many outputs; -1: never."""
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish: list[str | None] = field(default_factory=list)
    outputs: int = 0
    began_s: float = -1.0
    ended_s: float = -1.0
    error: DisaggError | None = None
    aborted: bool = False
    gone: bool = False
    """Its router died."""
    report: SessionReport = field(default_factory=SessionReport)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.sampling.n)]
        self.texts = [""] * self.sampling.n
        self.finish = [None] * self.sampling.n

    @cached_property
    def expected(self) -> list[list[int]]:
        """The whole answers, without stop strings."""
        return fake_answers(self.prompt, self.sampling)

    def expected_text(self, answer: int) -> str:
        """The text up to the first stop string."""
        text = text_of(self.expected[answer])
        cuts = [at for stop in self.sampling.stop if (at := text.find(stop)) >= 0]
        return text[: min(cuts, default=len(text))]

    def take(self, output: Output) -> None:
        """The client receives an output. Raises `AssertionError` for a wrong, repeated or misplaced one."""
        number, known = output.answer, self.tokens[output.answer]
        assert self.finish[number] is None, f"{self.id}: answer {number} goes on behind its end: {output}"
        assert output.index == len(known), f"{self.id}: {len(known)} tokens have come, then {output}"
        known.extend(output.tokens)
        right = self.expected[number]
        assert known == right[: len(known)], f"{self.id}: answer {number} is {known}, not {right}"
        check_scores(self.prompt, self.sampling, output)
        self.texts[number] += output.text
        self.finish[number] = output.finish
        self.outputs += 1

    def check_end(self) -> None:
        """A request without error has its whole answers."""
        if self.error is not None or self.aborted or self.gone:
            return
        for number, finish in enumerate(self.finish):
            text, right = self.texts[number], self.expected_text(number)
            stopped = len(right) < len(self.expected[number])
            assert finish == ("stop" if stopped else "length"), (
                f"{self.id}: answer {number} ended by {finish}"
            )
            assert text == right, f"{self.id}: answer {number} has the text {text!r}, not {right!r}"
            assert stopped or self.tokens[number] == self.expected[number], (
                f"{self.id}: answer {number} is short"
            )

    @property
    def outcome(self) -> str:
        """`done`, `aborted`, `gone`, or the code of the error."""
        if self.gone:
            return "gone"
        if self.aborted:
            return "aborted"
        return self.error.code if self.error is not None else "done"

    @property
    def losses(self) -> float:
        """Recoveries from lost groups, of each answer on average: answers are recovered one by one."""
        lost = [cause for cause in self.report.recoveries if Loss(cause).of_group]
        return len(lost) / self.sampling.n

    @property
    def suspicions(self) -> float:
        """The part of `losses` that only suspicions caused."""
        suspected = (Loss.PREFILL_SUSPECTED.value, Loss.DECODE_SUSPECTED.value)
        return sum(cause in suspected for cause in self.report.recoveries) / self.sampling.n

    def __str__(self) -> str:
        sizes = f"{len(self.prompt)} tokens, {self.sampling.sequences} x {self.sampling.max_tokens}"
        times = f"{self.began_s:.3f} to {self.ended_s:.3f}, deadline {self.timeout_s:g} s"
        recovered = f"after {self.report.recoveries}" if self.report.recoveries else ""
        return f"{self.id} ({sizes}, {times}): {self.outcome} {recovered} {self.error or ''}"


class RequestSource:
    """Draws requests; some prompts begin alike, so that prefix caches hit."""

    def __init__(
        self, choose: random.Random, longest_answer: int, grammars: random.Random | None = None
    ) -> None:
        """`grammars`: chooses the requests with a grammar; None: no request has one."""
        self._choose, self._longest_answer, self._grammars = choose, longest_answer, grammars
        self._stems = [self._draw(STEM_TOKENS) for _ in range(2)]
        self._count = 0

    def next(self) -> ClientRequest:
        """Returns a new request."""
        choose = self._choose
        self._count += 1
        common = choose.choice([0, 0, STEM_TOKENS // 2, STEM_TOKENS])
        prompt_tokens = choose.randint(1, 48)
        prompt = (choose.choice(self._stems)[:common] + self._draw(prompt_tokens))[:prompt_tokens]
        request = ClientRequest(
            f"r{self._count}",
            prompt,
            self._sampling(),
            timeout_s=choose.choice([0.05, 2.0, 60.0, 60.0, 60.0, 60.0, 60.0, 60.0]),
            session=choose.choice(["", "", "a", "b"]),
        )
        if self._grammars is not None and self._grammars.random() < 0.4 and not request.sampling.beams:
            grammar = self._grammars.choice(["a", "ab", "abc"])
            request.sampling = msgspec.structs.replace(request.sampling, grammar=grammar)
        if choose.random() < 0.1:
            request.abort_after = choose.randint(0, 3)
        if choose.random() < 0.2 and not request.sampling.beams:
            answer = choose.choice(request.expected)
            at = choose.randrange(len(answer))
            stop = text_of(answer[at : at + choose.choice([1, 2])])
            request.sampling = msgspec.structs.replace(request.sampling, stop=(stop,))
        if self._count % 4 == 0 and not request.sampling.beams:
            request.sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=1)
        return request

    def _sampling(self) -> SamplingParams:
        choose, most = self._choose, self._longest_answer
        tokens, kind = choose.choice([1, most // 2, most]), choose.choice(["one"] * 5 + ["several", "beams"])
        penalty = 0.0 if self._count % 3 else 0.7
        if kind == "several":
            return SamplingParams(
                max_tokens=tokens,
                n=choose.randint(2, 3),
                temperature=1.0,
                seed=choose.randrange(99),
                frequency_penalty=penalty,
            )
        if kind == "beams":
            return SamplingParams(max_tokens=min(tokens, 4), beams=2, n=choose.randint(1, 2))
        return SamplingParams(
            max_tokens=tokens,
            temperature=choose.choice([0.0, 0.0, 0.7]),
            seed=choose.randrange(99),
            frequency_penalty=penalty,
        )

    def _draw(self, tokens: int) -> list[int]:
        return [self._choose.randrange(VOCAB) for _ in range(tokens)]
