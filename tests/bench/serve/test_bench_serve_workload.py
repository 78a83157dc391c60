"""Requests and their times: drawn from the seed, with the configured distributions."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from disagg.bench.serve.arrivals import ArrivalKind, Arrivals
from disagg.bench.serve.lengths import Lengths, parse_lengths
from disagg.bench.serve.workload import OWN_FIELDS, Workload
from disagg.core.errors import ConfigError


def drawn(spec: str, count: int = 20_000, flag: str = "--input-tokens") -> list[int]:
    random, lengths = np.random.default_rng(5), parse_lengths(flag, spec)
    return [lengths.draw(random) for _ in range(count)]


def test_a_number_is_that_number() -> None:
    assert set(drawn("512", 100)) == {512}


def test_a_range_is_uniform_with_both_ends() -> None:
    found = Counter(drawn("3-6"))
    assert sorted(found) == [3, 4, 5, 6]
    assert all(abs(count / 20_000 - 0.25) < 0.02 for count in found.values())


def test_lognormal_has_the_mean_and_the_spread_it_names() -> None:
    found = drawn("lognormal:512,0.6")
    assert statistics.fmean(found) == pytest.approx(512, rel=0.02)
    assert float(np.log(found).std()) == pytest.approx(0.6, rel=0.02)


def test_lognormal_is_cut_at_its_third_number() -> None:
    found = drawn("lognormal:512,0.6,600")
    assert max(found) == 600
    assert min(found) < 300


@pytest.mark.parametrize(("flag", "mean"), [("--input-tokens", 161), ("--output-tokens", 338)])
def test_sharegpt_like_has_the_published_means(flag: str, mean: float) -> None:
    found = drawn("sharegpt-like", flag=flag)
    assert statistics.fmean(found) == pytest.approx(mean, rel=0.08)  # the cut takes some
    assert min(found) >= 1
    assert max(found) <= 2048


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "0",
        "-5",
        "9-3",
        "0-3",
        "1.5",
        "lognormal:512",
        "lognormal:0,1",
        "lognormal:1.2.3,1",
        "lognormal:9,1,0",
        "x",
    ],
)
def test_a_wrong_length_names_the_flag(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"--output-tokens .*128-1024"):
        parse_lengths("--output-tokens", spec)


def arrivals(kind: ArrivalKind, seed: int = 3, rate: float = 8.0) -> Arrivals:
    return Arrivals(kind, rate, burst_requests=4, seed=seed)


@pytest.mark.parametrize("kind", ["poisson", "fixed", "burst"])
def test_arrivals_come_from_the_seed_at_the_rate(kind: ArrivalKind) -> None:
    times = arrivals(kind).first(8000)
    assert times == arrivals(kind).first(8000)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(1000, rel=0.05)
    assert (times == arrivals(kind, seed=4).first(8000)) is (kind == "fixed")
    assert arrivals(kind).until(times[40]) == [due for due in times[:40] if due < times[40]]


def test_gaps_have_the_shape_of_their_kind() -> None:
    gaps = {
        kind: [b - a for a, b in pairwise(arrivals(kind).first(8000))]
        for kind in ("poisson", "fixed", "burst")
    }
    assert set(np.round(gaps["fixed"], 9)) == {0.125}
    # Of an exponential distribution the standard deviation is the mean.
    assert statistics.pstdev(gaps["poisson"]) == pytest.approx(0.125, rel=0.05)
    assert [gap == 0 for gap in gaps["burst"][:8]] == [True, True, True, False] * 2


WORKLOAD = Workload(
    model="m",
    chat=False,
    input=Lengths(20, 30),
    output=Lengths(5, 9),
    prefix_tokens=0,
    prefixes=1,
    token_ids=(100, 163),
    ignore_eos=True,
    seed=11,
)


def body(workload: Workload, index: int) -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(workload.request(index).body)
    return found


def test_a_request_depends_on_seed_and_number_alone() -> None:
    later = [WORKLOAD.request(i) for i in range(9, -1, -1)][::-1]
    assert later == [WORKLOAD.request(i) for i in range(10)]
    assert len({one.body for one in later}) == 10
    assert replace(WORKLOAD, seed=12).request(0) != later[0]


def test_a_request_says_what_is_in_it() -> None:
    for index in range(50):
        request, content = WORKLOAD.request(index), body(WORKLOAD, index)
        prompt = content.pop("prompt")
        assert isinstance(prompt, list)
        assert len(prompt) == request.input_tokens
        assert 20 <= len(prompt) <= 30
        assert all(100 <= token <= 163 for token in prompt)
        assert content == {
            "model": "m",
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    assert "ignore_eos" not in body(replace(WORKLOAD, ignore_eos=False), 0)
    assert body(replace(WORKLOAD, extra={"priority": 3}), 0) == body(WORKLOAD, 0) | {"priority": 3}


@pytest.mark.parametrize("chat", [False, True])
def test_extra_fields_replace_no_own_field(chat: bool) -> None:
    assert set(body(replace(WORKLOAD, chat=chat), 0)) <= OWN_FIELDS


def test_prompts_share_the_configured_prefixes_and_nothing_else() -> None:
    shared = replace(WORKLOAD, prefix_tokens=16, prefixes=3)
    prompts = [body(shared, i)["prompt"] for i in range(60)]
    assert all(isinstance(one, list) and 36 <= len(one) <= 46 for one in prompts)
    assert len({tuple(one[:16]) for one in prompts}) == 3  # type: ignore[index]
    assert len({tuple(one[16:]) for one in prompts}) == 60  # type: ignore[index]
    probe = msgspec.json.decode(shared.probe().body)
    assert tuple(probe["prompt"][:16]) not in {tuple(one[:16]) for one in prompts}  # type: ignore[index]
    assert probe["max_tokens"] == 1


def test_a_chat_is_a_text_of_as_many_words() -> None:
    chat = replace(WORKLOAD, chat=True, input=Lengths(12, 12), prefix_tokens=4)
    request, content = chat.request(0), body(chat, 0)
    [message] = content["messages"]  # type: ignore[misc]
    assert message["role"] == "user"
    assert len(message["content"].split(" ")) == 16
    assert request.input_tokens is None
    assert "prompt" not in content
