"""KV comes back from a storage, after a restart and in groups of another size: tokens are those of `generate`."""

from __future__ import annotations

import shutil
from pathlib import Path

from local_groups import Checkpoints, colocated_config, local_groups, small_config
from storing_groups import PROMPTS, TOKENS, serve, tier_of, wait_until_written, with_storage

from disagg.core.types import SamplingParams


def test_a_restarted_group_of_another_size_reads_the_pages(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints.source()
    expected = [checkpoints.greedy(source, prompt, TOKENS) for prompt in PROMPTS]
    config = with_storage(tmp_path, small_config(2, 1), "prefill")
    with local_groups(config, source) as groups:
        assert serve(groups, PROMPTS) == expected
        wait_until_written(groups.prefill, 6 + 5)
    config = with_storage(tmp_path, small_config(1, 1), "prefill")
    with local_groups(config, source) as groups:
        assert serve(groups, PROMPTS) == expected
        tier = tier_of(groups.prefill)
        assert tier.fetched_pages == 6 + 5
        memory = groups.prefill[0].statistics()["leader"].memory
        assert memory.host.loaded_pages == 6 + 5


def test_damaged_files_are_computed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A changed byte in each record: no page verifies, each is computed and written again."""
    source = checkpoints.source()
    expected = [checkpoints.greedy(source, prompt, TOKENS) for prompt in PROMPTS]
    config = with_storage(tmp_path, small_config(1, 1), "prefill")
    with local_groups(config, source) as groups:
        assert serve(groups, PROMPTS) == expected
        wait_until_written(groups.prefill, 6 + 5)
    for path in tmp_path.glob("*.pages"):
        data = bytearray(path.read_bytes())
        for start in range(0, len(data), 4096):
            data[start + 200] ^= 1  # behind the header of 80 bytes
        path.write_bytes(data)
    with local_groups(config, source) as groups:
        assert serve(groups, PROMPTS) == expected
        assert tier_of(groups.prefill).fetched_pages == 0
        wait_until_written(groups.prefill, 6 + 5)
        groups.prefill[0].report()
        (status,) = groups.prefill[0].leader.status().ranks
        assert status.storage_corrupt_total > 0


def test_a_lost_folder_costs_no_request(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints.source()
    folder = tmp_path / "pages"
    config = with_storage(folder, small_config(1, 1), "prefill")
    with local_groups(config, source) as groups:
        assert serve(groups, PROMPTS[:1]) == [checkpoints.greedy(source, PROMPTS[0], TOKENS)]
        shutil.rmtree(folder)
        assert serve(groups, PROMPTS[1:]) == [checkpoints.greedy(source, PROMPTS[1], TOKENS)]


def test_a_prefill_group_reads_what_a_decode_group_has_written(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Pages of an answer, which no prefill group has computed; the next turn of the conversation begins with it."""
    source, sampling = checkpoints.source(), SamplingParams(max_tokens=40, ignore_eos=True)
    answer = checkpoints.greedy(source, PROMPTS[0], 40)
    config = with_storage(tmp_path, small_config(1, 2), "prefill", "decode")
    with local_groups(config, source) as groups:
        (first,) = groups.answers(PROMPTS[:1], sampling)
        assert first.tokens == answer
        wait_until_written(groups.decode, (100 + 40 - 1) // 16)
    turn = [*PROMPTS[0], *answer, *PROMPTS[1][:5]]
    with local_groups(config, source) as groups:
        assert serve(groups, [turn]) == [checkpoints.greedy(source, turn, TOKENS)]
        assert tier_of(groups.prefill).fetched_pages == (100 + 40 - 1) // 16


def test_a_colocated_group_waits_for_its_prefetch(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints.source()
    expected = [checkpoints.greedy(source, prompt, TOKENS) for prompt in PROMPTS]
    config = with_storage(tmp_path, colocated_config(), "colocated")
    for fetched in (0, 6 + 5):
        with local_groups(config, source) as groups:
            assert serve(groups, PROMPTS) == expected
            tier = tier_of(groups.groups["colocated"])
            assert tier.fetched_pages == fetched
            if not fetched:
                wait_until_written(groups.groups["colocated"], 6 + 5)
