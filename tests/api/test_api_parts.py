"""The parts that decide without a server: keys, seeds, identifiers, settings."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import disagg.api.model as model_module
from disagg.api.admission import Admission
from disagg.api.body import to_struct
from disagg.api.errors import ApiError
from disagg.api.fields import CompletionBody
from disagg.api.keys import load_api_keys
from disagg.api.listener import bind
from disagg.api.metrics import Metrics
from disagg.api.model import ServedModel
from disagg.core.config.read import ApiConfig, load_config
from disagg.core.errors import BusyError, ConfigError, RequestTimeoutError
from disagg.core.sampling import derived_seed
from disagg.model.load.tiny import VOCAB_SIZE, byte_tokenizer


def test_keys_of_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n one \ntwo\n")
    assert load_api_keys(str(file), {}) == (b"one", b"two")
    assert load_api_keys(str(file), {"DISAGG_API_KEYS": "three, four,"}) == (
        b"one",
        b"two",
        b"three",
        b"four",
    )
    assert load_api_keys(None, {"DISAGG_API_KEYS": "x"}) == (b"x",)
    assert load_api_keys(None, {}) == ()


@pytest.mark.parametrize("text", ["", "\n# a comment\n", "a b\n", "\u00e9\n", None])
def test_keys_that_would_open_the_door_or_never_fit(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError):
        load_api_keys(str(file), {"DISAGG_API_KEYS": "other"})


def test_derived_seeds_do_not_meet() -> None:
    seeds = {derived_seed(seed, index) for seed in range(50) for index in range(20)}
    assert len(seeds) == 1000, "neighbouring seeds and indices share no random numbers"
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert derived_seed(-3, 0) == -3


def test_null_is_a_field_left_out() -> None:
    body = to_struct(
        {"model": "m", "prompt": "p", "top_p": None, "tools": None}, CompletionBody, {"tools": ()}
    )
    assert body.top_p == 1.0


def test_true_is_not_one() -> None:
    with pytest.raises(ApiError, match="suffix is not supported"):
        to_struct({"model": "m", "prompt": "p", "suffix": True}, CompletionBody, {"suffix": (1,)})


def test_admission_takes_all_or_none_and_turns_in_order() -> None:
    async def main() -> list[int]:
        admission = Admission(1, 2, Metrics())
        admission.enter(2)
        with pytest.raises(BusyError) as busy:
            admission.enter(2)
        assert busy.value.retry_after_s > 0
        admission.enter(1)
        order: list[int] = []

        async def one(number: int) -> None:
            async with admission.turn(float("inf")):
                order.append(number)
                await asyncio.sleep(0)
            admission.leave()

        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(one(number))
        admission.enter(3)
        return order

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_turn_that_does_not_come_leaves_nothing_behind() -> None:
    async def main() -> None:
        metrics = Metrics()
        admission = Admission(1, 1, metrics)
        async with admission.turn(float("inf")):
            with pytest.raises(RequestTimeoutError):
                async with admission.turn(0.0):
                    raise AssertionError("there was no turn")
        assert metrics.registry.get_sample_value("disagg_requests_queued") == 0
        async with admission.turn(0.0):
            pass  # the turn of the one that gave up is free

    asyncio.run(main())


@pytest.mark.parametrize("special", [False, True])
def test_short_and_long_texts_have_the_same_tokens(special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones are encoded on the loop, long ones on a thread."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    model = ServedModel("tiny", tokenizer, context_tokens=64, vocab_tokens=VOCAB_SIZE)
    messages = [{"role": "user", "content": "h\u00e9 \U0001f600"}]
    threads: list[str] = []
    encode = model_module.encode_text

    def noted(*arguments: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(*arguments)

    async def both() -> tuple[list[int], list[int]]:
        return await model.encode("h\u00e9 \U0001f600", special), await model.render(messages)

    monkeypatch.setattr(model_module, "encode_text", noted)
    try:
        short = asyncio.run(both())
        monkeypatch.setattr(model_module, "SHORT_CHARACTERS", 3)
        assert asyncio.run(both()) == short
    finally:
        model.close()
    assert [name.startswith("tokenize") for name in threads] == [False, False, True, True]


def test_an_address_in_use_or_unknown_is_one_line() -> None:
    with bind(ApiConfig(port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another --port"):
            bind(ApiConfig(port=port))
    with pytest.raises(ConfigError, match=r"api.host = '999.1.1.1' is not an address"):
        bind(ApiConfig(host="999.1.1.1"))


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("port", 70000, "from 0 to 65535"),
        ("host", "", "an address or a host name"),
        ("model_name", "", "a name, or left out"),
        ("max_running", -1, "at least 0"),
        ("max_queued", -1, "at least 0"),
        ("request_timeout_s", 0, "more than 0"),
        ("drain_timeout_s", -1, "at least 0"),
        ("max_line_bytes", "64KiB", r"from 128 to max_header_bytes \(32768\)"),
        ("max_n", 0, "at least 1"),
    ],
)
def test_settings_out_of_range(setting: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"flag api.{setting}: .*it must be {allowed}"):
        load_config(overrides={f"api.{setting}": value})
