"""`disagg stats` of a server over real groups in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conditions import until
from local_groups import Checkpoints, LocalGroups, small_config
from system_server import SystemServer

from disagg.cli import app as cli

torch.set_num_threads(1)


def test_memory_of_a_server_that_has_served(
    checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(1, 2, metrics_interval_s=0.05)
    groups = LocalGroups(config, checkpoints.source())
    (tmp_path / "key").write_text("secret\n")
    flags = ["--api-key-file", str(tmp_path / "key"), "--interval-s", "0.1", "--seconds", "0.3"]
    try:
        with SystemServer(groups, "secret") as server:
            server.client.headers["authorization"] = "Bearer secret"
            reply = server.ask(prompt="a" * 40, max_tokens=8, ignore_eos=True)
            assert reply.status_code == 200, reply.text

            def reported() -> bool:
                now = server.client.get("/status").json()["groups"]
                cached = [group.get("pages_cached") for group in now]
                ranks = sorted(len(group.get("ranks", ())) for group in now)
                return ranks == [1, 2] and all(cached) and not any(g.get("pages_used") for g in now)

            until(reported)
            plot = tmp_path / "memory.png"
            assert cli.run(["stats", "--url", server.url, *flags, "--json", "--plot", str(plot)]) == 0
    finally:
        groups.stop()
    # The groups of this process log to the same place, for example that a connection ends.
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    found = json.loads(line)
    prefill, decode = found["now"]
    assert (prefill["cached_tokens"], prefill["used_tokens"]) == (32, 0), "the prompt's two full pages"
    assert prefill["free_tokens"] == config.prefill.pool_tokens - 32
    token_bytes = groups.prefill_info.layout.token_bytes
    kinds = prefill["ranks"][0]["kinds"]
    assert kinds["kv_cached"] == 32 * token_bytes
    assert kinds["transfer_free"] == config.transfer.staging_bytes
    assert sum(rank["kinds"]["kv_free"] for rank in decode["ranks"]) == decode["free_tokens"] * token_bytes
    whole = prefill["ranks"][0]["kinds"]["weights"]
    assert all(whole / 2 < rank["kinds"]["weights"] < whole for rank in decode["ranks"])
    assert [len(one["at_s"]) for one in found["series"]] == [4, 4]
    assert plot.read_bytes().startswith(b"\x89PNG")
