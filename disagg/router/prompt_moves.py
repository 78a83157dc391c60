"""Prompts that wait in decode groups, and move to a prefill group that would compute them sooner. No I/O.

A burst of prompts arrives while few answers run, so decode groups get some of the prompts. When these answers run,
the decode groups compute prompts more slowly, while the prefill group has finished its queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from disagg.router.policy import LocalPrefill, RoutedGroup, SessionLoad, local_cost

STAYING_PROMPTS = 1
"""Number of this router's prompts in a decode group that do not move: the group may have begun the oldest one."""


class WaitingPrompt(NamedTuple):
    """A prompt that a decode group is to compute."""

    missing_tokens: Callable[[RoutedGroup], int]
    """Callback that returns the prompt tokens that a group has to compute."""
    move: Callable[[], bool]
    """Callback that ends the session, so that the next one sends the prompt to a prefill group. Returns False if the
    session goes on, because the prompt is computed."""


class PromptMoves:
    """The prompts of a router's requests that may leave decode groups. All methods run on the router's event loop.

    Each review moves one prompt at most. The next review follows when the prompt counts in its new group's load.
    """

    def __init__(
        self,
        rule: LocalPrefill,
        prefills: Callable[[], Sequence[RoutedGroup]],
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """`prefills` returns the usable prefill groups; `call_soon` calls its argument in the event loop's next
        iteration."""
        self._rule, self._prefills, self._call_soon = rule, prefills, call_soon
        self._waiting: dict[RoutedGroup, dict[SessionLoad, WaitingPrompt]] = {}
        """Prompts by decode group, oldest first."""
        self._due = False
        self.counts: Counter[str] = Counter()
        """Number of prompts that have moved since the start; the only key is `sooner`."""

    def add(self, load: SessionLoad, prompt: WaitingPrompt) -> None:
        """Adds the prompt of a session that begins now. The caller must call `discard` when the session is over."""
        self._waiting.setdefault(load.decode, {})[load] = prompt

    def discard(self, load: SessionLoad) -> None:
        """Removes a prompt that is computed, or whose session is over; no effect if the prompt is not here."""
        prompts = self._waiting.get(load.decode)
        if prompts is not None and prompts.pop(load, None) is not None and not prompts:
            del self._waiting[load.decode]

    def review_soon(self) -> None:
        """Reviews the prompts after the current iteration of the event loop. Call it after each change of loads or
        groups."""
        if self._waiting and not self._due:
            self._due = True
            self._call_soon(self._review)

    def _review(self) -> None:
        """Moves at most one prompt to a prefill group that would compute it sooner: the newest prompt of a decode
        group, unless it is also the oldest.

        If the newest prompts of several decode groups could move, the prompt of the longest queue does.
        """
        self._due = False
        prefills = self._prefills()
        if not prefills:
            return
        prefill = min(prefills, key=lambda one: one.tokens * one.routers)
        newest = {
            decode: next(reversed(prompts))
            for decode, prompts in self._waiting.items()
            if len(prompts) > STAYING_PROMPTS
        }
        leaving = [
            decode
            for decode, load in newest.items()
            if self._rule.leaves(decode, prefill, self._waiting[decode][load].missing_tokens)
        ]
        if not leaving:
            return
        decode = max(leaving, key=local_cost)
        prompt = self._waiting[decode][newest[decode]]
        self.discard(newest[decode])
        self.counts["sooner"] += prompt.move()
        self.review_soon()

    def check(self) -> None:
        """Asserts that every prompt here is in the queue of its decode group."""
        for decode, prompts in self._waiting.items():
            assert prompts, f"no prompt of {decode.group.name}"
            for load in prompts:
                assert load.decode is decode, f"{load} belongs to another group"
                assert load.is_queued, f"{load} does not wait"
