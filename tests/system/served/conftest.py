"""One server for all files of this folder. `test_stop_real.py`, the last one, kills a rank and ends the server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import psutil
import pytest
from secret_searches import Collector, SearchedServer, Secrets, session_folder
from serve_process import PROMPT, TOKENS, Served, serve_process

from disagg.core.config.read import Config, ModelConfig
from disagg.core.types import SamplingParams
from disagg.reference.answers import reference_answers
from transport.keys.curve import make_keys
from transport.keys.file import save_keys

SMALL = (
    "prefill.chunk_tokens=40",
    "prefill.page_size=16",
    "decode.page_size=4",
    "transfer.layer_groups=2",
    "transfer.calibrate=always",
)


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SearchedServer]:
    """The server with everything that could make it write secrets down: control keys, spans, all of the log.

    Chunks, pages and layer groups are small, so that a short prompt has several of each.
    """
    folder = tmp_path_factory.mktemp("served")
    file_key, variable_key = (f"sk-{secrets.token_hex(16)}" for _ in range(2))
    keys = make_keys()
    control = folder / "control.json"
    save_keys(keys, control)
    with Collector() as collector:
        arguments = ["--set", f"control.key_file={control}"]
        arguments += ["--set", "log.level=debug", "--set", f"metrics.otlp_endpoint={collector.url}"]
        for setting in SMALL:
            arguments += ["--set", setting]
        environment = {"DISAGG_API_KEYS": variable_key, "XDG_CACHE_HOME": str(folder / "home" / ".cache")}
        with serve_process(
            folder, *arguments, api_key=file_key, environment=environment, watched=True
        ) as served:
            family = psutil.Process(served.process.pid).children(recursive=True)
            ray_token = (served.home / ".ray" / "auth_token").read_text()
            kept = Secrets(file_key, variable_key, ray_token, [keys])
            yield SearchedServer(served, kept, control, collector, session_folder(family))


@pytest.fixture(scope="package")
def served(place: SearchedServer) -> Served:
    return place.served


@pytest.fixture(scope="package")
def expected(served: Served) -> list[int]:
    """What Hugging Face answers to `PROMPT`, and so `disagg generate`."""
    config = Config(model=ModelConfig(path=str(served.checkpoint)))
    greedy = SamplingParams(max_tokens=TOKENS)
    [answer] = reference_answers(config, [list(PROMPT.encode())], greedy, lambda: None).answers
    return answer
