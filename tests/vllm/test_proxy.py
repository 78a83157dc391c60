"""The proxy in front of two fake vLLM servers: pairs of requests, streams, and one error for each fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from fake_vllm_server import Body, Deployment, prefilled, says
from starlette.responses import JSONResponse, Response, StreamingResponse

from disagg.cli.app import run
from disagg.vllm.proxy import app as proxy_app
from disagg.vllm.proxy.pairing import is_pairable, prefill_body

FIRST_EVENT = 'data: {"choices":[{"text":"\u2028\x85"}]}\n\n'.encode()
Check = Callable[[], Awaitable[None]]


def with_loop(check: Check) -> None:
    asyncio.run(asyncio.wait_for(check(), 60))


def test_the_first_request_learns_the_engine_and_later_ones_overlap() -> None:
    async def check() -> None:
        async with Deployment(prefilled(), says("first")) as one:
            assert (await one.ask()).json()["choices"][0]["text"] == "first"
            first = one.decode.bodies[0]
            assert first["kv_transfer_params"]["remote_block_ids"] == [[1, 2]]
            assert (first["prompt"], first["max_tokens"]) == ("hello", 9)
            assert one.prefill.bodies[0]["max_tokens"] == 1
            one.decode.arrived.clear()
            answer = one.prefill.behaviour

            async def after_decode(body: Body) -> Response:
                await one.decode.arrived.wait()
                return await answer(body)

            one.prefill.behaviour = after_decode
            assert (await one.ask()).status_code == 200
            params = one.decode.bodies[1]["kv_transfer_params"]
            assert params.pop("transfer_id") == one.prefill.bodies[1]["kv_transfer_params"]["transfer_id"]
            assert params.pop("remote_request_id")
            assert params == {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "p",
                "remote_host": "10.0.0.1",
                "remote_port": 5580,
                "tp_size": 1,
            }

    with_loop(check)


def test_fields_reach_the_servers_as_they_were_written() -> None:
    async def check() -> None:
        async with Deployment(prefilled(), says("x")) as one:
            content = '{"prompt": [1, 22 ], "temperature": 1e-1, "seed": 12345678901234567890123}'
            assert (await one.client.post("/v1/completions", content=content)).status_code == 200
            for server in (one.prefill, one.decode):
                assert server.bodies[0]["prompt"] == [1, 22]
                assert server.bodies[0]["seed"] == 12345678901234567890123
            broken = await one.client.post("/v1/completions", content='{"prompt": [1, 22 }')
            assert broken.status_code == 400
            assert "not a JSON object" in broken.text

    with_loop(check)


def test_one_after_another() -> None:
    async def check() -> None:
        async with Deployment(prefilled(), says("x"), at_once=False) as one:
            for _ in range(2):
                await one.ask()
            assert all("remote_block_ids" in body["kv_transfer_params"] for body in one.decode.bodies)

    with_loop(check)


def test_a_stream_is_passed_on_while_it_grows() -> None:
    async def check() -> None:
        more = asyncio.Event()

        async def stream(body: Body) -> Response:
            async def events() -> AsyncIterator[bytes]:
                yield FIRST_EVENT
                await more.wait()
                yield b"data: [DONE]\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")

        async with Deployment(prefilled(), stream) as one:
            body = {"model": "m", "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
            async with one.client.stream("POST", "/v1/completions", json=body) as answer:
                found = answer.aiter_raw()
                assert await anext(found) == FIRST_EVENT
                more.set()
                assert await anext(found) == b"data: [DONE]\n\n"
            assert one.prefill.bodies[0]["stream"] is False
            assert "stream_options" not in one.prefill.bodies[0]
            assert one.decode.headers[0]["accept-encoding"] == "identity"
            assert one.decode.bodies[0]["stream_options"] == {"include_usage": True}

    with_loop(check)


def test_an_answer_of_the_decode_server_does_not_wait_for_that_of_the_prefill_server() -> None:
    """Which names a new engine when it comes at last."""

    async def check() -> None:
        more = asyncio.Event()

        async def late(body: Body) -> Response:
            await more.wait()
            return await prefilled("q")(body)

        async with Deployment(prefilled(), says("x")) as one:
            await one.ask()
            one.prefill.behaviour = late
            assert (await one.ask()).json()["choices"][0]["text"] == "x"
            body = {"prompt": "x", "stream": True}
            assert "x" in (await one.client.post("/v1/completions", json=body)).text
            assert not one.prefill.gone.is_set()
            assert one.decode.bodies[-1]["kv_transfer_params"]["remote_engine_id"] == "p"
            more.set()
            while one.decode.bodies[-1]["kv_transfer_params"]["remote_engine_id"] == "p":
                await one.ask()

    with_loop(check)


@pytest.mark.parametrize(
    "first", ["data: {}\n\n", 'data: {"error": {"code": 500}}\n\n'], ids=["a token", "an error"]
)
def test_a_late_prefill_server_is_not_waited_for_without_end(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor at all after an error: the prompt is of no use."""
    monkeypatch.setattr(proxy_app, "LATE_S", 0.01 if first == "data: {}\n\n" else 1000.0)

    async def streams(body: Body) -> Response:
        return Response(first, media_type="text/event-stream")

    async def check() -> None:
        async with Deployment(prefilled(), says("x")) as one:
            await one.ask()
            one.prefill.behaviour, one.decode.behaviour = for_ever, streams
            assert (
                await one.client.post("/v1/completions", json={"prompt": "x", "stream": True})
            ).text == first
            await one.prefill.gone.wait()

    with_loop(check)


async def for_ever(body: Body) -> Response:
    await asyncio.Event().wait()
    return Response()


async def refuses(body: Body) -> Response:
    return JSONResponse({"error": {"message": "too long"}}, 400)


def test_an_error_of_the_prefill_server_ends_the_decode_request() -> None:
    async def check() -> None:
        async with Deployment(prefilled(), says("x")) as one:
            await one.ask()
            one.prefill.behaviour, one.decode.behaviour = refuses, for_ever
            answer = await one.ask()
            assert (answer.status_code, answer.json()) == (400, {"error": {"message": "too long"}})
            await one.decode.gone.wait()

    with_loop(check)


def test_an_error_of_the_decode_server_ends_the_prefill_request() -> None:
    async def check() -> None:
        async with Deployment(prefilled(), says("x")) as one:
            await one.ask()
            one.prefill.behaviour, one.decode.behaviour = for_ever, refuses
            assert (await one.ask()).status_code == 400
            await one.prefill.gone.wait()

    with_loop(check)


def test_a_client_that_leaves_ends_both_requests() -> None:
    async def check() -> None:
        async with Deployment(prefilled(), says("x")) as one:
            await one.ask()
            one.prefill.behaviour = one.decode.behaviour = for_ever
            one.prefill.arrived.clear()
            one.decode.arrived.clear()
            asking = asyncio.create_task(one.ask())
            await one.prefill.arrived.wait()
            await one.decode.arrived.wait()
            asking.cancel()
            await one.prefill.gone.wait()
            await one.decode.gone.wait()

    with_loop(check)


def test_a_client_that_leaves_ends_a_request_of_the_decode_server_alone() -> None:
    async def check() -> None:
        async with Deployment(prefilled(), for_ever) as one:
            asking = asyncio.create_task(one.ask("/v1/responses"))
            await one.decode.arrived.wait()
            asking.cancel()
            await one.decode.gone.wait()

    with_loop(check)


def test_a_restarted_prefill_server_is_learned_again() -> None:
    """The decode server would wait for an engine that is gone: it gets the request again."""

    async def check() -> None:
        async with Deployment(prefilled("p"), says("x")) as one:
            await one.ask()
            one.prefill.behaviour = prefilled("q")
            answer = one.decode.behaviour

            async def for_engine_q(body: Body) -> Response:
                known = body["kv_transfer_params"]["remote_engine_id"] == "q"
                return await (answer(body) if known else for_ever(body))

            one.decode.behaviour = for_engine_q
            assert (await one.ask()).status_code == 200
            await one.decode.gone.wait()
            assert one.decode.bodies[-1]["kv_transfer_params"]["remote_block_ids"] == [[1, 2]]

    with_loop(check)


def test_a_prefill_server_that_died_is_learned_again() -> None:
    """The decode server gets no request for the engine that is gone."""

    async def check() -> None:
        async with Deployment(prefilled("p"), says("x")) as one:
            await one.ask()
            answer = one.decode.behaviour
            one.prefill.behaviour, one.decode.behaviour = cut, for_ever
            assert (await one.ask()).status_code == 502
            one.prefill.behaviour, one.decode.behaviour = prefilled("q"), answer
            one.decode.bodies.clear()
            assert (await one.ask()).status_code == 200
            engines = [body["kv_transfer_params"]["remote_engine_id"] for body in one.decode.bodies]
            assert engines == ["q"]

    with_loop(check)


def test_a_server_without_the_connector() -> None:
    async def check() -> None:
        async with Deployment(says("x"), says("x")) as one:
            answer = await one.ask()
            assert answer.status_code == 502
            assert "start that server with --kv-transfer-config" in answer.json()["error"]["message"]

    with_loop(check)


def test_a_server_that_does_not_answer() -> None:
    async def check() -> None:
        async with Deployment(prefilled(), for_ever) as one, Deployment(prefilled(), says("x")) as other:
            one.decode.behaviour = cut
            answer = await one.ask()
            assert answer.status_code == 502
            assert answer.json()["error"]["message"].startswith(f"{one.decode.url} did not answer: ")
            assert (await other.ask(path="/v1/chat/completions", prompt=None)).status_code == 200

    with_loop(check)


async def cut(body: Body) -> Response:
    """The connection is lost in the middle of an answer."""

    async def events() -> AsyncIterator[bytes]:
        yield b'data: {"choices":[]}\n\n'
        raise ConnectionError

    kind = "text/event-stream" if body.get("stream") else "application/json"
    return StreamingResponse(events(), media_type=kind)


def test_a_stream_that_is_cut_ends_with_an_error() -> None:
    async def check() -> None:
        async with Deployment(prefilled(), cut) as one:
            text = (await one.ask(stream=True)).text
            assert text.startswith('data: {"choices":[]}\n\ndata: {"error":{"message":"http://127.0.0.1')
            assert text.endswith("\n\ndata: [DONE]\n\n")

    with_loop(check)


def test_other_requests_go_to_the_decode_server() -> None:
    async def check() -> None:
        async with Deployment(prefilled(), says("x")) as one:
            answer = await one.client.get("/v1/models?a=1", headers={"authorization": "Bearer k"})
            assert answer.json() == {"choices": [{"text": "x"}]}
            assert one.decode.paths == ["/v1/models?a=1"]
            assert one.decode.headers[0]["authorization"] == "Bearer k"
            assert (await one.ask(n=2)).status_code == 200
            assert "kv_transfer_params" not in one.decode.bodies[1]
            assert one.prefill.bodies == []
            assert (await one.client.get("/v1/models/my%20model")).status_code == 200
            assert one.decode.paths[-1] == "/v1/models/my model", "quoted on the way"
            bad = await one.client.post("/v1/completions", content=b"[1]")
            assert (bad.status_code, bad.json()["error"]["code"]) == (400, 400)
            for content in (
                b'{"prompt": "a", "n": 1e999}',
                b'{"prompt": "a", "echo": "\xff"}',
                b'{"prompt": ["a",}',
                b'{"\xff": 1}',
            ):
                bad = await one.client.post("/v1/completions", content=content)
                assert (bad.status_code, bad.json()["error"]["type"]) == (400, "BadRequestError"), content
            assert one.prefill.bodies == []

    with_loop(check)


def fields(body: dict[str, Any]) -> dict[str, msgspec.Raw]:
    """The fields of a request as the proxy reads them."""
    found: dict[str, msgspec.Raw] = msgspec.json.decode(json.dumps(body), type=dict[str, msgspec.Raw])
    return found


@pytest.mark.parametrize(
    ("body", "pairable"),
    [
        ({"prompt": "[["}, True),
        ({"prompt": []}, True),
        ({"prompt": [[1, 2]]}, True),
        ({"prompt": ["a, b"], "echo": None, "prompt_logprobs": None, "n": None}, True),
        ({"prompt": [["a"], 1]}, False),
        ({"prompt": "a"}, True),
        ({"prompt": [1, 2]}, True),
        ({"prompt": ["a"]}, True),
        ({"messages": [], "n": 1}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"prompt": "a", "n": 2}, False),
        ({"prompt": "a", "echo": True}, False),
        ({"prompt": "a", "prompt_logprobs": 0}, False),
        ({"prompt": "a", "use_beam_search": True}, False),
    ],
)
def test_requests_that_one_transfer_serves(body: dict[str, Any], pairable: bool) -> None:
    assert is_pairable(fields(body)) is pairable


def test_the_prefill_request_asks_for_one_token() -> None:
    body = {
        **{
            "messages": [],
            "max_completion_tokens": 50,
            "min_tokens": 20,
            "logprobs": True,
            "top_logprobs": 2,
        },
        **{"tools": [{}], "tool_choice": "required", "stream": True, "response_format": {}, "temperature": 0},
    }
    found = prefill_body(fields(body), "t")
    assert msgspec.json.decode(msgspec.json.encode(found)) == {
        **{"messages": [], "max_completion_tokens": 1, "max_tokens": 1, "tools": [{}], "tool_choice": "none"},
        **{"stream": False, "temperature": 0},
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"},
    }


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["--prefill", "foo", "--decode", "http://a:1"],
            "--prefill foo: give the base URL of the server, such as http://",
        ),
        (["--prefill", "http://a:1", "--decode", "ftp://a"], "--decode ftp://a: give the base URL of"),
        (["--prefill", "http://a:1", "--decode", "http://u:p@b:1"], "@b:1: give the base URL of the server"),
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--port", "-1"], "--port -1"),
        (["--prefill", "http://a:1"], "--decode"),
    ],
)
def test_bad_flags(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["vllm-proxy", *arguments]) == 2
    assert named in capsys.readouterr().err
