"""A producer and consumers with pools of their own, without leaders, schedulers and models."""

from __future__ import annotations

from typing import Any

import torch
from engine_network import EngineNetwork
from layer_pools import Memory

from disagg.core.config.read import Config, TransferConfig, TransportConfig
from disagg.core.types import PROTOCOL_VERSION, GroupInfo, KVLayout, RequestKey, Span, Ticket
from disagg.data_path.consumer import KVConsumer
from disagg.data_path.endpoint import GONE_S, EndpointOptions
from disagg.data_path.events import TransferEvent, TransferEventKind
from disagg.data_path.producer import KVProducer
from disagg.kv.page_tables import PageTables
from disagg.kv.pool import make_pool
from disagg.kv.transfer_pools import BorrowedPools, CopyPools, TransferPools
from staging.shards import layout_shards

LAYOUT = KVLayout(3, 4, 8, "float16")
CONFIG = Config(
    transfer=TransferConfig(ring_bytes=1 << 14, staging_bytes=1 << 14, layer_groups=3, checksum=True),
    transport=TransportConfig(backend="inproc", peer_memory=False),
)
KEY = RequestKey("r")
PAGES, TARGET, TOKENS = [4, 1, 3], [7, 2], 40
KIND = TransferEventKind


class Recorder:
    """An engine that keeps the events."""

    def __init__(self) -> None:
        self.events: list[TransferEvent] = []

    def on_event(self, event: TransferEvent) -> None:
        self.events.append(event)

    def on_message(self, peer: str, message: Any) -> None:
        raise AssertionError(message)

    def on_linked(self, group: GroupInfo) -> None: ...

    def on_tick(self, now_s: float) -> None: ...

    @property
    def kinds(self) -> list[TransferEventKind]:
        return [event.kind for event in self.events]


class Pair:
    """One producer with a tensor for each layer, and consumers with one contiguous pool each."""

    def __init__(self) -> None:
        self.network, self.engines = EngineNetwork(), [Recorder() for _ in range(3)]
        generator = torch.Generator().manual_seed(2)
        self.memory = Memory("hnd, blocks first", 3, 6, 16, 4, 8, torch.float16, generator)
        self.pools = [make_pool(LAYOUT, shard, 9 * 32, torch.float16) for shard in layout_shards(LAYOUT, 2)]
        for pool in self.pools:
            pool.poison()
        self.producer = KVProducer(
            self._options("p", 0, 1, BorrowedPools((self.memory.pool,)), 16),
            self.network.wires("p"),
            self.engines[0],
        )
        self.consumers = [
            KVConsumer(
                self._options("d", rank, 2, TransferPools.of(pool, None), 32),
                self.network.wires("d"),
                self.engines[1 + rank],
            )
            for rank, pool in enumerate(self.pools)
        ]
        self.groups = (
            self._group("p", "prefill", [self.producer], 16),
            self._group("d", "decode", self.consumers, 32),
        )
        for endpoint in (self.producer, *self.consumers):
            self.network.add(endpoint)
        self.link()
        self.ticket = Ticket(KEY, 5, "d", Span(0, TOKENS), -1, tuple(TARGET))

    @staticmethod
    def _options(name: str, rank: int, tp: int, pools: CopyPools, page_size: int) -> EndpointOptions:
        return EndpointOptions(
            name, rank, layout_shards(LAYOUT, tp)[rank], pools, PageTables((page_size,)), CONFIG
        )

    @staticmethod
    def _group(name: str, role: str, ranks: list[Any], page_size: int) -> GroupInfo:
        infos = tuple(rank.info() for rank in ranks)
        return GroupInfo(name, role, PROTOCOL_VERSION, "", LAYOUT, page_size, "inproc", infos, checksum=True)

    def link(self) -> None:
        """As often as the engines exchange their groups."""
        p, d = self.groups
        self.producer.link(p, d)
        for consumer in self.consumers:
            consumer.link(d, p)

    def receive(self) -> None:
        for consumer in self.consumers:
            consumer.open(self.ticket, [TARGET], "p")
        self.network.settle()
        assert [engine.kinds for engine in self.engines[1:]] == [[KIND.OPENED], [KIND.OPENED]]

    def landed(self) -> list[int]:
        return [consumer.agent.statistics().segments_landed for consumer in self.consumers]

    def check_cells(self) -> None:
        positions = torch.arange(TOKENS)
        at = torch.tensor(TARGET)[positions // 32] * 32 + positions % 32
        blocks = torch.tensor(PAGES)[positions // 16]
        for layer, planes in enumerate(self.memory.pool.layers):
            for plane, source in enumerate(planes):
                for rank, pool in enumerate(self.pools):
                    heads = source[blocks, positions % 16][:, 2 * rank : 2 * rank + 2]
                    come = pool.parts[0].buffer[layer, plane, at]
                    assert torch.equal(come.view(torch.int16), heads.contiguous().view(torch.int16))

    def close(self) -> None:
        self.producer.close(KEY, 5, "done")
        for consumer in self.consumers:
            consumer.close(KEY, 5, "done")
        self.network.settle()
        assert all(engine.kinds[-1] is KIND.CLOSED for engine in self.engines)


def test_layers_are_sent_as_they_are_computed() -> None:
    pair = Pair()
    pair.receive()
    part = pair.producer.next_part()
    pair.producer.plan(KEY, part, Span(0, TOKENS))
    pair.producer.open(pair.ticket, [PAGES])
    for layer in range(3):
        pair.producer.computed(part, Span(0, layer + 1), None)
        pair.network.settle()
        assert pair.landed() == [layer + 1, layer + 1]
    assert pair.engines[0].kinds == [KIND.SENT]
    assert pair.engines[1].kinds == pair.engines[2].kinds == [KIND.OPENED, KIND.LANDED]
    pair.check_cells()
    pair.close()


def test_a_ticket_may_come_after_the_prompt_is_computed() -> None:
    pair = Pair()
    part = pair.producer.next_part()
    pair.producer.plan(KEY, part, Span(0, TOKENS))
    pair.producer.computed(part, Span(0, 3), None)
    pair.receive()
    pair.producer.open(pair.ticket, [PAGES])
    pair.network.settle()
    pair.check_cells()
    pair.close()


def test_a_closed_consumer_stops_its_producer() -> None:
    pair = Pair()
    pair.receive()
    part = pair.producer.next_part()
    pair.producer.plan(KEY, part, Span(0, TOKENS))
    pair.producer.open(pair.ticket, [PAGES])
    pair.network.settle()
    for consumer in pair.consumers:
        consumer.close(KEY, 5, "aborted")
    pair.network.settle()
    assert KIND.STOPPED in pair.engines[0].kinds
    pair.close()


def test_a_lost_producer_fails_the_transfer() -> None:
    pair = Pair()
    pair.receive()
    pair.network.kill(pair.producer.wires.control.address)
    pair.network.settle()
    failed = pair.engines[1].events[-1]
    assert failed.kind is KIND.FAILED
    assert "lost prefill rank" in failed.reason
    assert pair.consumers[0].link_with("p") is None


def test_a_rank_that_never_returns_is_not_watched_for_ever() -> None:
    """Its whole group is unlinked; when the engines meet again, they link again."""
    pair = Pair()
    channel: Any = pair.producer.wires.control
    ranks = [consumer.wires.control.address for consumer in pair.consumers]
    assert channel.watched == set(ranks)
    for consumer in pair.consumers:
        consumer.peers.silent(channel.address)
    for waited_s in (0.0, GONE_S):
        pair.producer.peers.silent(ranks[1])
        pair.network.now_s += waited_s
        pair.network.settle()
        assert channel.watched == set(ranks), "the rank may be alive but cut off"
        assert pair.producer.peers.silences.silent == {ranks[1]}
    pair.network.now_s += 1.0
    pair.network.settle()
    assert not channel.watched
    assert not pair.producer.peers.silences.silent
    channels: list[Any] = [consumer.wires.control for consumer in pair.consumers]
    assert not any(one.watched for one in channels)
    pair.link()
    assert channel.watched == set(ranks)
    pair.receive()
    part = pair.producer.next_part()
    pair.producer.plan(KEY, part, Span(0, TOKENS))
    pair.producer.open(pair.ticket, [PAGES])
    pair.producer.computed(part, Span(0, 3), None)
    pair.network.settle()
    pair.check_cells()
    pair.close()
