"""`disagg bench serve --compare`: which systems are compared, that both get the same load, and what is said of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Reply, ScriptedServer, Seen, answer_rightly

from disagg.bench.serve.compare import both_systems
from disagg.bench.serve.compare_report import words
from disagg.bench.serve.equal import Difference, Greedy, compare_answers
from disagg.bench.serve.served import served
from disagg.cli.app import run
from disagg.core.config.read import Config, load_config
from disagg.core.errors import ConfigError, DisaggError
from disagg.model.rounding import Judge

SIZES = ["--prefill-tp", "1", "--decode-tp", "1"]
LOAD = ["--input-tokens", "4-8", "--output-tokens", "3", "--ignore-eos", "--requests", "5"]


@pytest.mark.parametrize(
    ("settings", "tp", "said"),
    [
        ({"prefill.tp": 1, "decode.tp": 1}, None, "2 x colocated TP 1"),
        ({"prefill.tp": 2, "decode.tp": 1}, None, "3 x colocated TP 1"),
        ({"prefill.tp": 2, "decode.tp": 2, "prefill.groups": 3}, None, "4 x colocated TP 2"),
        ({"prefill.tp": 2, "decode.tp": 1}, 3, "1 x colocated TP 3"),
    ],
)
def test_both_systems_have_as_many_ranks(settings: dict[str, object], tp: int | None, said: str) -> None:
    systems = both_systems(load_config(None, {}, settings), tp)
    assert words(systems["colocated"]) == said
    ranks = {name: sum(k.ranks * k.groups for k in config.kinds.values()) for name, config in systems.items()}
    assert ranks["split"] == ranks["colocated"]


def test_a_colocated_group_is_like_a_decode_group_unless_it_is_set() -> None:
    settings = {"decode.pool_tokens": 32768, "decode.max_batch": 7, "prefill.chunk_tokens": 512}
    sizes: dict[str, object] = {"prefill.tp": 1, "decode.tp": 1}
    group = both_systems(load_config(None, {}, settings | sizes))["colocated"].colocated
    assert (group.pool_tokens, group.max_batch, group.chunk_tokens) == (32768, 7, 512)
    settings |= {"colocated.chunk_tokens": 64, "cluster.mode": "colocated"}
    systems = both_systems(load_config(None, {}, settings | sizes))
    assert (systems["colocated"].colocated.chunk_tokens, systems["colocated"].colocated.max_batch) == (64, 7)
    assert list(systems["split"].kinds) == ["prefill", "decode"]


def test_ranks_that_make_no_whole_groups_are_refused() -> None:
    config = load_config(None, {}, {"prefill.tp": 4, "decode.tp": 2, "decode.groups": 1})
    with pytest.raises(ConfigError, match=r"6 ranks .* groups of 4: choose --colocated-tp out of 1, 2, 3, 6"):
        both_systems(config, 4)
    with pytest.raises(ConfigError, match="needs --prefill-tp"):
        both_systems(Config())


def test_where_two_answers_part() -> None:
    def answers(*tokens: str) -> list[Greedy]:
        return [Greedy([1], list(one), []) for one in tokens]

    same = compare_answers(answers("ab", "c"), answers("ab", "c"))
    assert (same.prompts, same.tokens, same.differences) == (2, 3, [])
    assert compare_answers(answers("ab", "c"), answers("ax", "cd")).differences == [
        Difference(0, 1, ["b", "x"]),
        Difference(1, 1, [None, "d"]),
    ]


class Servers:
    """Replaces `disagg serve`: one server per system, which answers requests for greedy tokens."""

    def __init__(self, greedy: dict[str, list[str]] | None = None) -> None:
        self.greedy = greedy or {}
        self.with_logprobs = False
        """Log-probabilities too: -1 of each token, and of 1 and 9."""
        self.seen: dict[str, list[Seen]] = {}
        self.timeouts_s: list[float] = []

    @contextmanager
    def served(self, config: Config, request_timeout_s: float) -> Iterator[str]:
        name = config.cluster.mode
        self.timeouts_s.append(request_timeout_s)

        async def script(seen: Seen, reply: Reply) -> None:
            if "logprobs" in seen.body:
                tokens = self.greedy.get(name, ["token_id:1", "token_id:2"])
                logprobs: dict[str, Any] = {"tokens": tokens}
                if self.with_logprobs:
                    logprobs["token_logprobs"] = [-1.0] * len(tokens)
                    logprobs["top_logprobs"] = [{"token_id:1": -1.0, "token_id:9": -1.0}] * len(tokens)
                await reply.plain(200, {"choices": [{"logprobs": logprobs}]})
            else:
                await answer_rightly(seen, reply)

        with ScriptedServer(script) as server:
            yield server.url
        self.seen[name] = server.seen

    def prompts(self, name: str) -> list[tuple[Any, ...]]:
        return sorted(tuple(one.body["prompt"]) for one in self.seen[name])


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    servers = Servers()
    monkeypatch.setattr("disagg.bench.serve.served.served", servers.served)
    for name in [name for name in os.environ if name.startswith("DISAGG_")]:
        monkeypatch.delenv(name)
    return servers


def compared(*flags: str) -> int:
    return run(["bench", "serve", "--compare", "colocated", *SIZES, *LOAD, *flags])


def test_both_get_the_same_load_and_are_reported_side_by_side(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = compared("--rates", "400,200", "--slo-ttft-s", "30", "--timeout-s", "40", "--out", str(tmp_path))
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert servers.timeouts_s == [40, 40]
    assert servers.prompts("split") == servers.prompts("colocated")
    # One request before each load, and the warm-up with one of its own.
    assert len(servers.seen["split"]) == 2 * (1 + 5) + 1 + 2 * 4
    assert "colocated: 2 x colocated TP 1" in shown
    assert "goodput: answers with TTFT <= 30 s" in shown
    found = json.loads((tmp_path / "bench_compare.json").read_text())
    assert [one["rate"] for one in found["runs"]] == [200, 400]
    assert found["systems"]["colocated"]["cluster"]["mode"] == "colocated"
    for one in found["runs"]:
        split, colocated = one["split"], one["colocated"]
        assert split["summary"]["ok"] == colocated["summary"]["ok"] == 5, "the warm-up is not counted"
        sent = [[row["due_s"] for row in report["requests"]] for report in (split, colocated)]
        assert sent[0] == sent[1], "the same arrivals"
    first, second = (one["split"]["requests"] for one in found["runs"])
    assert [row["due_s"] for row in first] != [2 * row["due_s"] for row in second], "a draw of its own"
    assert (tmp_path / "bench_compare.png").stat().st_size > 10_000


def test_answers_that_differ_end_with_1(servers: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared("--concurrency", "2", "--check-equal") == 0
    assert "all 16 tokens of 8 greedy answers are the same" in capsys.readouterr().out
    servers.greedy["colocated"] = ["token_id:1", "token_id:9"]
    assert compared("--concurrency", "2", "--check-equal") == 1
    shown = capsys.readouterr().out
    assert "answer 0 differs from token 1 on: token_id:2 (split) and token_id:9 (colocated)" in shown
    assert "8 of 8 greedy answers differ" in shown
    assert compared("--concurrency", "2", "--check-equal", "--json") == 1
    assert len(json.loads(capsys.readouterr().out)["equal"]["differences"]) == 8


@pytest.mark.parametrize(("noise", "code"), [(0.2, 0), (0.01, 1)])
def test_in_16_bits_one_engine_judges_both(
    noise: float,
    code: int,
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is off by 0.1 from what either said, and its likeliest token is another one, only just."""

    def judge_answers(config: Config, prompts: Any, others: Any) -> list[Judge]:
        assert config.cluster.mode == "split"
        assert len(prompts) == len(others) == 16, "all of both"
        view = (-1.1, -1.1, -1.1, -1.0)
        noisy = tuple(one + noise for one in view)
        return [Judge([7] * len(one), [view] * len(one), [noisy] * len(one)) for one in others]

    monkeypatch.setattr("disagg.bench.serve.judge.judge_answers", judge_answers)
    servers.greedy["colocated"], servers.with_logprobs = ["token_id:1", "token_id:9"], True
    flags = ("--concurrency", "2", "--check-equal", "--random-init", "tiny-llama", "--device", "cpu")
    assert compared(*flags, "--dtype", "bfloat16") == code
    shown = capsys.readouterr().out
    said = "only where rounding decides" if code == 0 else "by more than rounding explains"
    assert f"8 of 8 greedy answers differ, {said}" in shown
    assert "is 1, not 7" in shown
    assert compared(*flags, "--dtype", "float32") == 1, "no judge is called"
    assert "8 of 8 greedy answers differ\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "1", "--prefill-tp", "2"], "--prefill-tp needs --compare"),
        (["--rate", "1", "--set", "prefill.tp=2"], "--set needs --compare"),
        (["--rate", "1", "--no-deterministic"], "--deterministic needs --compare"),
        (["--rate", "1", "--check-equal"], "--check-equal needs --compare"),
        (["--rates", "1,2"], "--rates needs --compare"),
        (["--compare", "colocated", *SIZES], "give either --rate (an open loop), --rates"),
        (["--compare", "colocated", *SIZES, "--rate", "1", "--rates", "1,2"], "give either --rate"),
        (["--compare", "colocated", *SIZES, "--rates", "1,x"], "--rates 1,x: give numbers above 0"),
        (["--compare", "colocated", *SIZES, "--rates", "0,1"], "--rates 0,1: give numbers above 0"),
        (["--compare", "colocated", *SIZES, "--rate", "1", "--url", "http://a/v1"], "leave --url"),
        (["--compare", "colocated", "--rate", "1", "--prefill-tp", "1"], "--compare needs --decode-tp"),
        (["--compare", "colocated", *SIZES, "--rate", "1", "--colocated-tp", "3"], "choose --colocated-tp"),
    ],
)
def test_flags_that_make_no_sense_are_one_line(
    flags: list[str], message: str, servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "serve", *flags]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.strip().splitlines()) == 1
    assert not servers.timeouts_s, "nothing was started"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs as `disagg serve` would; what it is given stands beside it."""
    path = tmp_path / "program"
    monkeypatch.setattr("sys.executable", str(path))
    monkeypatch.setenv("DISAGG_PREFILL__TP", "7")
    return path


def test_a_server_runs_as_long_as_it_is_needed(program: Path) -> None:
    program.write_text(
        f"""#!/bin/sh
echo "$@" > {program}.arguments; env > {program}.env; cat "$5" > {program}.yaml
echo 'not a log line' >&2
echo '{{"event": "group_added", "group": "decode"}}' >&2
echo '{{"event": "serving", "url": "http://127.0.0.1:1"}}' >&2
trap 'kill $!; echo stopped > {program}.end; exit 0' TERM
sleep 1000 & wait
"""
    )
    program.chmod(0o755)
    config = load_config(None, {}, {"api.key_file": "/keys", "api.port": 9, "prefill.tp": 2})
    with served(config, 12.5) as url:
        assert url == "http://127.0.0.1:1/v1"
        assert not Path(f"{program}.end").exists()
    assert Path(f"{program}.end").read_text() == "stopped\n"
    assert Path(f"{program}.arguments").read_text().startswith("-m disagg serve --config ")
    assert "DISAGG_" not in Path(f"{program}.env").read_text(), "the file has all settings"
    config = load_config(f"{program}.yaml")
    assert (config.api.host, config.api.port, config.api.key_file) == ("127.0.0.1", 0, None)
    assert (config.prefill.tp, config.decode.tp, config.api.request_timeout_s) == (2, None, 12.5)


def test_a_server_that_cannot_start_says_why(program: Path) -> None:
    program.write_text("#!/bin/sh\necho 'disagg: no such model' >&2\nexit 2\n")
    program.chmod(0o755)
    with (
        pytest.raises(DisaggError, match=r"^the server ended before it was ready: no such model$"),
        served(Config(), 10.0),
    ):
        pass


@pytest.mark.slow
def test_two_real_systems_answer_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert compared("--rate", "5", "--device", "cpu", "--check-equal", "--strict") == 0
    assert "greedy answers are the same" in capsys.readouterr().out
