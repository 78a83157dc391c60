"""Tags, wire messages and the handshake."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import msgspec
import pytest
from conditions import PATIENCE_S
from drawn_profiles import SUMMARY
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import HandshakeError, ProtocolError
from disagg.core.item_events import ItemChanges, ItemPiece, ItemPosition
from disagg.core.prefixes import Digest
from disagg.core.profile.types import ProfileOptions
from disagg.core.status import GroupStatus, RankStatus, RouteStatus
from disagg.core.tokens import pack_tokens
from disagg.core.types import (
    GroupInfo,
    KVLayout,
    PageServer,
    RankInfo,
    RequestKey,
    SamplingParams,
    Segment,
    Shard,
    Span,
    Ticket,
    TokenLogprobs,
)
from transport.control import messages
from transport.control.messages import MAX_MESSAGE_BYTES, MESSAGE_TYPES, Message, decode, encode
from transport.handles import IpcHandle, MemoryHandle
from transport.handshake import check_compatible
from transport.tags import Tag, pack, unpack

KEY = RequestKey("request", 3)
GROUP = GroupInfo(
    name="p0",
    role="prefill",
    protocol_version=1,
    fingerprint="abc",
    layout=KVLayout(layers=4, kv_heads=2, head_dim=8, dtype="bfloat16"),
    page_size=16,
    transport="ucx",
    ranks=(RankInfo(0, Shard(0, Span(0, 4), Span(0, 2)), "tcp://127.0.0.1:1", b"\x00\xff", 1 << 20),),
)
TICKET = Ticket(KEY, 2**32 - 1, "d0", Span(16, 40), 3, (4, 9))
IPC = IpcHandle(b"h" * 64, 1 << 40, 512, b"counter", 3, b"event", True)
POOL = MemoryHandle("host", 9, 1 << 47, "bfloat16", (2, 2, 64, 8, 128), IPC)
RANK_STATUS = RankStatus(
    "prefill r0", 0, "cpu", routes=(RouteStatus("decode r1", "staged", 1 << 50, 7, 0.5),), exposed_s_total=1.5
)
PROMPT = {"type": "Reserve", "key": ["r", 0], "sampling": {}, "deadline_s": 1.0, "prefill_group": "p0"}
EXAMPLES: list[Message] = [
    messages.Reserve(KEY, pack_tokens([1, 2, 3]), SamplingParams(seed=1, stop=("x",)), 1.5, "p0"),
    messages.Reserve(
        KEY, pack_tokens([4]), SamplingParams(logit_bias=((7, -1.5),), logprobs=2, min_p=0.1), 1.5, "p0"
    ),
    messages.Reserved(KEY, TICKET),
    messages.Failed(KEY, "busy", "no room", True, 0.5),
    messages.Prefill(KEY, pack_tokens([5]), SamplingParams(prompt_logprobs=0), TICKET, 2.0, priority=-3),
    messages.Arriving(KEY, 7, 1),
    messages.LandsSoon(KEY, 7, 1),
    messages.FirstTokens(KEY, 7, [11]),
    messages.FirstTokens(KEY, 7, [11, 4], [-0.5, -1.25]),
    messages.EndAnswer(KEY, 3),
    messages.Tokens(KEY, 4, [1, 2], "stop"),
    messages.Tokens(KEY, 4, [9], None, [TokenLogprobs(9, -0.5, ((9, -0.5), (3, float("-inf"))))]),
    messages.StepTokens([messages.Tokens(KEY, 4, [1]), messages.Tokens(KEY, 9, [2], "length", answer=1)]),
    messages.Watch(1.5, "all"),
    messages.CacheDigest("p0", Digest(None, 3, 64, b"12345678", b""), 4096),
    messages.WatchItems(ItemPosition(1 << 62, 4, None), PageServer(7, b"\x00\xff", "ucx")),
    messages.HeldItems(ItemPiece(1 << 62, 4, 0, 1 << 15, b"12345678", b"abcdefgh")),
    messages.HeldItems(ItemChanges(9, 3, 4, b"", b"12345678")),
    messages.Release(KEY, "done"),
    messages.Released(KEY),
    messages.Plan(8, b"\x00\x01"),
    messages.Landed(KEY, 7, 1),
    messages.Swapped(KEY, 7, 1, 0.25),
    messages.CacheMoved(12, 1, "why"),
    messages.StorageMoved(12, 1, 3, True, "why"),
    messages.RankFailed(KEY, 7, 1, "transport", "why"),
    messages.LeaseRequest(KEY, 7, 1, [Segment(0, 1, 2, Span(0, 2), Span(0, 1), Span(0, 9), 4096)]),
    messages.LeaseGrant(KEY, 7, 2, [(0, 1 << 40)], 1 << 20, 5),
    messages.Watermark(2, 1 << 50, 1 << 20),
    messages.SenderEnded(KEY, 7, 1, [0, 1], "done"),
    messages.SenderEnded(KEY, 7, 1, [0, 1], "done", [1]),
    messages.SendAgain(KEY, 7, 2, 2**20 - 1),
    messages.TransferVerified([(KEY, 7), (KEY, 8)], 2),
    messages.StopSending(KEY, 7, "gone"),
    messages.ProbeRequest(2**32 - 1, 16 << 20),
    messages.ProbeAnswer(7, "host", "NVIDIA H200"),
    messages.ProbeAnswer(7, "host", "cpu", "the ring is in use"),
    messages.ProbeEnded(7),
    messages.PoolOffer(2, (POOL,), MemoryHandle("host", 9, 1 << 47, "int64", (32,), None)),
    messages.PoolRefused(1, "it is on another host"),
    messages.LinkBroken(),
    messages.LinkBroken(answer=True),
    messages.Linked(2**32 - 1),
    messages.Prefilled(KEY, [11]),
    messages.PromptLogprobs(KEY, 1, [TokenLogprobs(11, -0.25, ((3, -0.125), (11, -0.25)), 2)]),
    messages.Prefilled(KEY, [11, 4], [TokenLogprobs(11, -0.25, ()), TokenLogprobs(4, -1.5, ())]),
    messages.Transferred(KEY, 1 << 40, 12, 30, 0.25),
    messages.OpenSend(KEY, TICKET, [0, 3, 1]),
    messages.RankSent(KEY, 7, 1, 1 << 40, 12, 30, 0.25),
    messages.RankStopped(KEY, 7),
    messages.OpenReceive(TICKET, [2, 1], "p0"),
    messages.RankOpened(KEY, 7, 1),
    messages.CloseTransfer(KEY, 7, "aborted"),
    messages.RankClosed(KEY, 7, 1),
    messages.RankBroken(1, "out of memory"),
    messages.Watch(1.0),
    messages.RankReport(RANK_STATUS),
    messages.GroupReport(GroupStatus("prefill", "prefill", (RANK_STATUS,), pages=3, broken="a rank is gone")),
    messages.Join(),
    messages.Groups(3, [GROUP], ["p0"]),
    messages.EngineGroups([GROUP], answer=True),
    messages.PushRequest(TICKET, 1, held=True),
    messages.PushCancelled("r", "aborted"),
    messages.Using(3, ["p0"]),
    messages.Scale("decode", 2),
    messages.Scaled("no room"),
    messages.Roll(
        [
            messages.RollSetting("decode", "max_requests", 3, "flag decode.max_requests"),
            messages.RollSetting("control", "peer_timeout_s", 0.5, "file a.toml"),
            messages.RollSetting("model", "path", None, "file a.toml"),
            messages.RollSetting("model", "fused", False, "file a.toml"),
        ],
        ("decode",),
        2,
        allow_pause=True,
    ),
    messages.Profile(KEY, ProfileOptions(7, 1.5)),
    messages.ProfileProgress(KEY, 3),
    messages.Profiled(KEY, SUMMARY),
    messages.ProfileFailed(KEY, "busy", "another one runs"),
    messages.StopRoll(),
    messages.RollStep("decode: starting a group"),
    messages.Rolled("it did not start", ("decode-2",), ("decode",)),
]


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**12 - 1), st.integers(0, 2**20 - 1))
def test_tags_come_back(ticket: int, writer: int, segment: int) -> None:
    tag = pack(ticket, writer, segment)
    assert 0 <= tag < 1 << 64
    assert unpack(tag) == Tag(ticket, writer, segment)


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ((1 << 32, 0, 0), "ticket"),
        ((0, 4096, 0), "writer"),
        ((0, 0, 1 << 20), "segment"),
        ((0, -1, 0), "writer"),
    ],
)
def test_a_number_that_does_not_fit_a_tag(numbers: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        pack(*numbers)


def test_no_tag() -> None:
    with pytest.raises(ValueError, match="tag"):
        unpack(1 << 64)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_messages_come_back(message: Message) -> None:
    again = decode(encode(message))
    assert again == message
    assert type(again) is type(message)


def test_every_message_has_a_name_of_its_own() -> None:
    names = [kind.__struct_config__.tag for kind in MESSAGE_TYPES]
    assert len(set(names)) == len(names)
    assert {type(message) for message in EXAMPLES} == set(MESSAGE_TYPES), "give EXAMPLES one of each"
    assert {kind.__name__ for kind in MESSAGE_TYPES} <= set(messages.__all__), "export each"


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", "0 bytes"),
        (b"\xc1", "malformed"),
        (msgspec.msgpack.encode([1, 2]), "Expected `object`"),
        (msgspec.msgpack.encode({"type": "Evil"}), "Evil"),
        (msgspec.msgpack.encode({"key": ["r", 0]}), "type"),
        (msgspec.msgpack.encode({"type": "Released"}), "key"),
        (msgspec.msgpack.encode({"type": "Released", "key": "r"}), "Expected `array`"),
        (
            msgspec.msgpack.encode(
                {"type": "FirstTokens", "key": ["r", 0], "ticket": 1 << 32, "tokens": [1]}
            ),
            "ticket",
        ),
        (
            msgspec.msgpack.encode({"type": "FirstTokens", "key": ["r", 0], "ticket": 1, "tokens": [-1]}),
            "tokens",
        ),
        (
            msgspec.msgpack.encode({"type": "Watermark", "dst_rank": 1, "watermark": -1, "ring_bytes": 1}),
            "watermark",
        ),
        (msgspec.msgpack.encode({"type": "Watch", "interval_s": -1}), "interval_s"),
        (
            msgspec.msgpack.encode(
                {"type": "RankReport", "status": {"name": "r", "rank": 0, "ring_bytes": -1}}
            ),
            "ring_bytes",
        ),
        (
            msgspec.msgpack.encode({"type": "GroupReport", "status": {"name": "x" * 257, "role": "decode"}}),
            "name",
        ),
        (PROMPT | {"prompt": [1, 2]}, "token ids are bytes, not list.*prompt"),
        (PROMPT | {"prompt": "1234"}, "token ids are bytes, not str.*prompt"),
        (PROMPT | {"prompt": b"12345"}, "multiple.*prompt"),
        (b"\x81" * 100_000, "cannot be decoded"),
        (bytes(MAX_MESSAGE_BYTES + 1), "larger"),
        (encode(EXAMPLES[0])[:-1], "truncated"),
        (encode(EXAMPLES[0]) + b"\x00", "trailing"),
    ],
)
def test_bad_frames_name_what_is_wrong(body: bytes | dict[str, object], what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        decode(body if isinstance(body, bytes) else msgspec.msgpack.encode(body))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    try:
        decode(body)
    except ProtocolError:
        return


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="Plan takes"):
        encode(messages.Plan(1, bytes(MAX_MESSAGE_BYTES)))


def test_a_compatible_group_may_differ_in_pages_and_ranks() -> None:
    theirs = msgspec.structs.replace(GROUP, name="d0", role="decode", page_size=64, ranks=GROUP.ranks * 4)
    check_compatible(GROUP, theirs)


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        ("bfloat16", "int8", True),
        ("float32", "float8_e4m3fn", True),
        ("int8", "int8", True),
        ("int8", "bfloat16", False),
        ("int8", "float8_e4m3fn", False),
    ],
)
def test_kv_may_become_codes_on_its_way_and_nothing_else(ours: str, theirs: str, fits: bool) -> None:
    sender = msgspec.structs.replace(GROUP, layout=KVLayout(4, 2, 8, ours))
    receiver = msgspec.structs.replace(GROUP, name="d0", role="decode", layout=KVLayout(4, 2, 8, theirs))
    with nullcontext() if fits else pytest.raises(HandshakeError, match="element type"):
        check_compatible(sender, receiver)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"protocol_version": 2}, ["protocol version", "1", "2"]),
        ({"fingerprint": "xyz"}, ["model fingerprint", "abc", "xyz"]),
        ({"transport": "inproc"}, ["transport", "ucx", "inproc"]),
        ({"deterministic": True}, ["model.deterministic", "False", "True"]),
        ({"checksum": True}, ["transfer.checksum", "False", "True"]),
        ({"layout": KVLayout(5, 2, 8, "bfloat16")}, ["layers", "4", "5"]),
        ({"layout": KVLayout(4, 3, 8, "bfloat16")}, ["KV heads", "2", "3"]),
        ({"layout": KVLayout(4, 2, 9, "bfloat16")}, ["head size", "8", "9"]),
        ({"layout": KVLayout(4, 2, 8, "float16")}, ["element type", "bfloat16", "float16"]),
        ({"layout": KVLayout(4, 3, 8, "int8")}, ["KV heads", "2", "3"]),
    ],
)
def test_a_refusal_names_both_sides_values(change: dict[str, object], values: list[str]) -> None:
    theirs = msgspec.structs.replace(GROUP, name="d0", role="decode", **change)
    with pytest.raises(HandshakeError) as caught:
        check_compatible(GROUP, theirs)
    for value in ["p0", "d0", *values]:
        assert value in str(caught.value)
    assert str(caught.value).count("; ") == 0, "exactly one difference"


def test_a_refusal_names_every_difference() -> None:
    theirs = msgspec.structs.replace(GROUP, name="d0", fingerprint="xyz", layout=KVLayout(5, 3, 9, "float16"))
    with pytest.raises(HandshakeError) as caught:
        check_compatible(GROUP, theirs)
    assert str(caught.value).count("; ") == 4


def test_the_contracts_are_light_to_import() -> None:
    """A router has no use for UCX; and no part of this package may need a GPU to be imported."""
    code = (
        "import sys, transport.control.zmq, transport.select, transport.control.messages;"
        "bad = {'ucxx', 'ray', 'transformers'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
