"""Messages of a rank's transfer thread to the leader of the same process, whose lock another thread may have."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from conditions import PATIENCE_S
from local_groups import Checkpoints, ask, local_groups, random_prompts, small_config

from disagg.core.types import RequestKey, SamplingParams
from disagg.router.router import Router
from transport.control import messages as m


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_transfer_thread_does_not_wait_for_the_leader(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """It goes on while a thread has the lock; then the messages are handled in order."""
    handled: list[int] = []
    done = threading.Event()
    with local_groups(small_config(1, 1), checkpoints.source()) as groups:
        rank: Any = getattr(groups, role)[0]
        real = rank.leader.handle

        def handle(peer: str, message: m.Message) -> None:
            if isinstance(message, m.RankClosed) and message.key.request_id == "nobody":
                handled.append(message.ticket)
                if message.ticket == 9:
                    done.set()
            real(peer, message)

        monkeypatch.setattr(rank.leader, "handle", handle)

        def report(number: int) -> None:
            rank.to_leader(m.RankClosed(RequestKey("nobody"), number, 0))

        with rank.leader.changed:
            for number in range(5):
                rank.transfer_loop.call(lambda number=number: report(number), PATIENCE_S)
            assert handled == []
        for number in range(5, 10):
            rank.transfer_loop.call(lambda number=number: report(number), PATIENCE_S)
        assert done.wait(PATIENCE_S)
        assert handled == list(range(10))

        async def work(router: Router) -> None:
            prompt = random_prompts(40)[0]
            answer = await ask(router, "r", prompt, SamplingParams(max_tokens=4))
            assert answer.tokens == checkpoints.greedy(groups.source, prompt, 4)

        groups.serve(work)


def test_a_handler_that_fails_delays_no_message_behind_it(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[int] = []
    with local_groups(small_config(1, 1), checkpoints.source()) as groups:
        leader: Any = groups.decode[0].leader

        def handle(peer: str, message: Any) -> None:
            handled.append(message.ticket)
            if message.ticket == 0:
                raise RuntimeError("on purpose")

        def post() -> None:
            for number in range(3):
                assert not leader.post("nobody", m.RankClosed(RequestKey("nobody"), number, 0))

        with monkeypatch.context() as patch, leader.changed:
            patch.setattr(leader, "handle", handle)
            another = threading.Thread(target=post)
            another.start()
            another.join(PATIENCE_S)
            with pytest.raises(ExceptionGroup, match="posted"):
                leader.handle_posted()
        assert handled == [0, 1, 2]
