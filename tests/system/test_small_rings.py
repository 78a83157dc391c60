"""Rings smaller than a request, than a chunk, than a token; and how many messages a request may cost."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import pytest
import torch
from local_groups import Checkpoints, LocalGroups, local_groups, random_prompts, small_config
from slow_parameters import sampled

from disagg.core.errors import ConfigError
from disagg.core.types import SamplingParams, Span
from disagg.model.load.source import ModelSource
from disagg.model.load.tiny import make_tiny_checkpoint
from disagg.node.links import make_link
from staging.planner import layer_groups, segment_count_bound
from transport.control import messages as m


@pytest.mark.parametrize(
    ("tp", "chunk_tokens"),
    sampled(
        itertools.product([(1, 1), (2, 1), (1, 2), (3, 2)], [16, 128]),
        lambda tp, chunk_tokens: chunk_tokens == (16 if tp in ((1, 1), (3, 2)) else 128),
    ),
)
def test_a_ring_smaller_than_a_request_and_than_a_chunk(
    checkpoints: Checkpoints, tp: tuple[int, int], chunk_tokens: int
) -> None:
    source = checkpoints.source(layers=3)
    prompts = random_prompts(90, 40, 75, 61, seed=8)
    with local_groups(small_config(*tp, ring_bytes=4096, chunk_tokens=chunk_tokens), source) as groups:
        shard = groups.decode[0].runner.shard
        chunk_bytes = (
            2
            * len(shard.heads)
            * source.spec(torch.float32).layout.head_bytes
            * len(shard.layers)
            * chunk_tokens
        )
        assert chunk_bytes > 4096, "the ring must be smaller than what one chunk brings"
        answers = groups.answers(prompts, SamplingParams(max_tokens=5))
        waited = [rank.statistics()["transfer"].watermarks for rank in groups.decode]
    assert sum(waited) > 0, "somebody had to wait for the watermark"
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, 5) for p in prompts]


@pytest.mark.parametrize(("setting", "named"), [("ring_bytes", "ring"), ("staging_bytes", "staging")])
def test_memory_too_small_for_one_token_of_one_layer_is_refused(
    tmp_path_factory: pytest.TempPathFactory, setting: str, named: str
) -> None:
    """One token of one layer: 2 (K, V) x 4 heads x 256 elements x 4 bytes = 8192, and 8 bytes of its checksum."""
    directory = tmp_path_factory.mktemp("wide")
    make_tiny_checkpoint(directory, layers=1, hidden=96, q_heads=4, kv_heads=4, head_dim=256)
    config = small_config()
    transfer = msgspec.structs.replace(config.transfer, **{setting: 4096})
    with pytest.raises(ConfigError, match=f"{named}.*4096 bytes.*needs 8200: set transfer.{setting} to 8448"):
        LocalGroups(msgspec.structs.replace(config, transfer=transfer), ModelSource.from_directory(directory))
    transfer = msgspec.structs.replace(config.transfer, **{setting: 8448})
    with local_groups(
        msgspec.structs.replace(config, transfer=transfer), ModelSource.from_directory(directory)
    ) as groups:
        (answer,) = groups.answers(random_prompts(20), SamplingParams(max_tokens=2))
    assert len(answer.tokens) == 2


@pytest.mark.parametrize(
    ("tp", "groups_count", "pages"),
    sampled(
        itertools.product([(1, 1), (2, 1), (2, 3)], [1, 3], [(1, 1), (16, 64)]),
        lambda tp, groups_count, pages: (groups_count == 1) == (pages == (1, 1)),
    ),
)
def test_messages_follow_groups_and_chunks_only(
    checkpoints: Checkpoints, tp: tuple[int, int], groups_count: int, pages: tuple[int, int]
) -> None:
    """Between prefill and decode ranks: a lease request and a grant for each pair and chunk; segments as planned.

    Neither pages nor tokens nor heads come into it.
    """
    source, tokens, chunk = checkpoints.source(layers=3), 80, 16
    config = small_config(
        *tp,
        layer_groups=groups_count,
        chunk_tokens=chunk,
        prefill_page=pages[0],
        decode_page=pages[1],
        watermark_interval_s=20.0,  # what is sent again on the timer does not count
    )
    with local_groups(config, source) as groups:
        seen: Counter[type[m.Message]] = Counter()
        groups.observe(lambda _, __, message: seen.update([type(message)]))
        [answer] = groups.answers(random_prompts(tokens), SamplingParams(max_tokens=4))
        link = make_link(groups.prefill_info, groups.decode_info)
    chunks = -(-tokens // chunk)
    pairs = len({(route.src_rank, route.dst_rank) for route in link.routes})
    limits = {rank.rank: config.transfer.segment_limit_bytes for rank in link.decode.ranks}
    spans = layer_groups(Span(0, link.prefill.layout.layers), groups_count)
    bound = chunks * segment_count_bound(link.routes, link.prefill.layout, Span(0, chunk), spans, limits)
    assert seen[m.LeaseRequest] == seen[m.LeaseGrant] == pairs * chunks
    assert answer.report.messages == pairs * chunks
    assert seen[m.Watermark] == seen[m.StopSending] == seen[m.SenderEnded] == 0
    assert 0 < answer.report.segments <= bound <= chunks * len(spans) * len(link.routes)
    assert seen[m.Tokens] <= 4
    for kind in (m.OpenReceive, m.OpenSend, m.Landed, m.RankSent, m.RankOpened, m.RankClosed):
        assert seen[kind] <= 2 * max(tp), kind
