"""Two machines (network namespaces) joined by a link that delays and loses: Ray, `launch` and a router across it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import httpx
import pytest
from conditions import until
from two_host_site import TOKENS, Site, site
from two_hosts import two_hosts, why_not

from disagg.core.config.read import Config, ModelConfig
from disagg.core.types import SamplingParams
from disagg.reference.answers import reference_answers

pytestmark = [pytest.mark.skipif(bool(why := why_not()), reason=why or "it can"), pytest.mark.slow]

PROMPTS = ["x", "The capital of France is", "A much longer one, of several chunks. " * 8]
LONG = {"max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with (
        two_hosts(delay_s=0.005, jitter_s=0.002, loss=0.005) as hosts,
        site(hosts, tmp_path_factory.mktemp("two")) as here,
    ):
        yield here


@pytest.fixture(scope="module")
def expected(running: Site) -> list[str]:
    """What Hugging Face answers to `PROMPTS`."""
    config = Config(model=ModelConfig(path=str(running.folder / "tiny")))
    prompts = [list(prompt.encode()) for prompt in PROMPTS]
    answers = reference_answers(config, prompts, SamplingParams(max_tokens=TOKENS), lambda: None).answers
    return [bytes(answer).decode() for answer in answers]


def texts(asked: list[Future[httpx.Response]]) -> list[str]:
    replies = [one.result() for one in asked]
    assert all(reply.status_code == 200 for reply in replies), [reply.text for reply in replies]
    return [reply.json()["choices"][0]["text"] for reply in replies]


def test_answers_are_exact_over_a_bad_link(running: Site, expected: list[str]) -> None:
    link = running.hosts.link
    before = link.statistics
    for _ in range(10):
        assert texts([running.ask(prompt) for prompt in PROMPTS]) == expected
    carried, lost = link.statistics.carried - before.carried, link.statistics.lost - before.lost
    assert link.statistics.carried_bytes - before.carried_bytes > 10 * 250_000, "the KV crossed this link"
    assert lost > 0, f"of {carried} packets"


def test_a_short_cut_costs_time_only(running: Site, expected: list[str]) -> None:
    link = running.hosts.link
    cut_before = link.statistics.cut
    link.cut()
    asked = [running.ask(prompt) for prompt in PROMPTS]
    until(lambda: link.statistics.cut > cut_before + 10)
    link.mend()
    assert texts(asked) == expected


@pytest.mark.parametrize(
    "ends", [(0, 1), (0,), (1,)], ids=["both ways", "to the router", "to the decode rank"]
)
def test_requests_go_on_after_a_long_cut(running: Site, expected: list[str], ends: tuple[int, ...]) -> None:
    """The router loses the decode group, waits until the groups are linked again, and goes on exactly."""
    recovered = running.log("router").count("request_recovered")
    carried = running.hosts.link.statistics.carried
    streaming = running.ask(PROMPTS[1], **LONG)
    until(lambda: running.hosts.link.statistics.carried > carried + 60)
    running.hosts.link.cut(*ends)
    assert not streaming.done()
    asked = [running.ask(prompt) for prompt in PROMPTS]
    until(lambda: not running.ready())
    running.hosts.link.mend()
    assert texts(asked) == expected
    assert texts([streaming]) == texts([running.ask(PROMPTS[1], **LONG)])
    assert running.log("router").count("request_recovered") > recovered
    until(running.ready)
    assert texts([running.ask(prompt) for prompt in PROMPTS]) == expected


def test_nothing_is_held_afterwards(running: Site) -> None:
    """After all that: a request that needs every page of both pools finds them free. Nobody was restarted."""
    prompt = "y" * 300
    [reply] = [running.ask(prompt, max_tokens=212, ignore_eos=True).result()]
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["total_tokens"] == 512
    assert "group_lost" not in running.log("launch")
