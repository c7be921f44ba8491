"""Thinning a prompt's hashes out."""

import pytest

from events.replica.sampling import HASH_BYTES, POSITIONS, blocks_of, sample, samples_within


def hashes(blocks: int) -> bytes:
    return b"".join(block.to_bytes(HASH_BYTES, "big") for block in range(1, blocks + 1))


@pytest.mark.parametrize("blocks", [0, 1, 15, 16, 17, 18, 19, 36, 37, 2048, 5000])
def test_a_sample_stands_for_the_blocks_up_to_its_position(blocks: int) -> None:
    samples = sample(hashes(blocks))
    found = [
        int.from_bytes(samples[at : at + HASH_BYTES], "big")
        for at in range(0, len(samples), HASH_BYTES)
    ]
    assert found == [at for at in POSITIONS[1:] if at <= blocks]
    assert len(found) == samples_within(blocks)


@pytest.mark.parametrize("blocks", [1, 16, 17, 100, 1000, 100_000])
def test_a_shared_prefix_is_seen_to_within_a_ninth(blocks: int) -> None:
    assert blocks * 8 / 9 <= blocks_of(samples_within(blocks)) <= blocks


def test_a_message_does_not_grow_with_the_prompt() -> None:
    """A prompt of 128k tokens in blocks of 16 has 8,192 hashes."""
    assert len(sample(hashes(8192))) == 88 * HASH_BYTES


def test_two_prompts_have_the_samples_of_their_common_prefix_in_common() -> None:
    short, long = sample(hashes(300)), sample(hashes(3000))
    assert long.startswith(short)
