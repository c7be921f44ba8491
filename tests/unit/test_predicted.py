"""Predictions: made on routing, confirmed by events or expired."""

import random

import pytest

from events import WorkerRank
from events.replica import sample
from indexer import InvariantError, PredictedBlocks, block_hashes
from indexer.guesses import MARK_BLOCKS

RANK = WorkerRank("w", 0)
OTHER = WorkerRank("w", 1)
HASHES = block_hashes(range(10), 1)


def blocks_of(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + 8] for at in range(0, len(hashes), 8)]


@pytest.fixture
def predicted() -> PredictedBlocks:
    return PredictedBlocks(max_blocks=100)


def test_a_predicted_prompt_counts_at_once(predicted: PredictedBlocks) -> None:
    """C6: the second prompt of a burst is routed before any event of the first has come."""
    predicted.expect(RANK, HASHES, now=0.0, ttl_s=5.0)
    assert predicted.leading(RANK, HASHES, 0, now=0.1) == 10
    assert predicted.leading(RANK, HASHES, 4, now=0.1) == 6
    assert predicted.leading(RANK, HASHES[: 3 * 8], 0, now=0.1) == 3
    assert predicted.leading(RANK, HASHES, 10, now=0.1) == 0
    assert predicted.leading(OTHER, HASHES, 0, now=0.1) == 0
    predicted.check()


def test_only_the_shared_head_of_another_prompt_is_predicted(predicted: PredictedBlocks) -> None:
    predicted.expect(RANK, HASHES, now=0.0, ttl_s=5.0)
    other = block_hashes([0, 1, 2, 99, 4, 5], 1)
    assert predicted.leading(RANK, other, 0, now=0.1) == 3


def test_a_prediction_ends_with_its_time_even_before_it_is_swept(
    predicted: PredictedBlocks,
) -> None:
    predicted.expect(RANK, HASHES, now=0.0, ttl_s=5.0)
    assert predicted.leading(RANK, HASHES, 0, now=4.9) == 10
    assert predicted.leading(RANK, HASHES, 0, now=5.0) == 0
    predicted.expire(4.9)
    assert len(predicted) == 10
    predicted.expire(5.0)
    assert len(predicted) == 0
    predicted.check()


def test_the_longest_prediction_of_a_block_counts(predicted: PredictedBlocks) -> None:
    predicted.expect(RANK, HASHES, now=0.0, ttl_s=10.0)
    predicted.expect(RANK, HASHES[: 4 * 8], now=1.0, ttl_s=1.0)
    predicted.expect(RANK, HASHES[: 2 * 8], now=2.0, ttl_s=20.0)
    predicted.expire(5.0)
    assert predicted.leading(RANK, HASHES, 0, now=5.0) == 10
    predicted.expire(10.0)
    assert predicted.leading(RANK, HASHES, 0, now=10.0) == 2
    predicted.check()


def test_a_confirmed_block_is_no_longer_a_guess(predicted: PredictedBlocks) -> None:
    """The engine evicts it soon after: nobody may go on to expect it there."""
    predicted.expect(RANK, HASHES, now=0.0, ttl_s=5.0)
    predicted.confirm(RANK, HASHES[: 4 * 8])
    assert predicted.leading(RANK, HASHES, 0, now=0.1) == 0
    assert predicted.leading(RANK, HASHES, 4, now=0.1) == 6
    predicted.confirm(RANK, HASHES)
    predicted.confirm(OTHER, HASHES)
    assert len(predicted) == 0
    predicted.check()
    predicted.expire(9.0)
    predicted.check()


def test_a_block_predicted_again_after_it_was_confirmed_lasts_its_own_time(
    predicted: PredictedBlocks,
) -> None:
    predicted.expect(RANK, HASHES, now=0.0, ttl_s=5.0)
    predicted.confirm(RANK, HASHES)
    predicted.expect(RANK, HASHES, now=4.0, ttl_s=5.0)
    predicted.expire(6.0)
    assert predicted.leading(RANK, HASHES, 0, now=6.0) == 10
    predicted.check()


def test_a_dropped_worker_takes_its_predictions_along(predicted: PredictedBlocks) -> None:
    """A worker leaves, and another with its name comes before the old predictions run out."""
    predicted.expect(RANK, HASHES, now=0.0, ttl_s=5.0)
    predicted.expect(OTHER, HASHES, now=0.0, ttl_s=5.0)
    predicted.expect(WorkerRank("v"), HASHES, now=0.0, ttl_s=5.0)
    predicted.drop(RANK)
    assert (len(predicted), predicted.leading(RANK, HASHES, 0, now=0.1)) == (20, 0)
    predicted.drop_worker("w")
    assert len(predicted) == 10
    predicted.expect(RANK, HASHES, now=4.0, ttl_s=5.0)
    predicted.expire(6.0)
    assert predicted.leading(RANK, HASHES, 0, now=6.0) == 10
    predicted.check()


def test_the_number_of_predictions_is_bounded_and_the_soonest_to_expire_go_first(
    predicted: PredictedBlocks,
) -> None:
    for number in range(30):
        hashes = block_hashes([number] * 10, 1)
        predicted.expect(RANK, hashes, now=float(number), ttl_s=100.0)
        predicted.check()
    assert len(predicted) == 100
    assert predicted.leading(RANK, block_hashes([19] * 10, 1), 0, now=30.0) == 0
    assert predicted.leading(RANK, block_hashes([20] * 10, 1), 0, now=30.0) == 10


def test_of_a_prompt_longer_than_the_bound_the_head_is_predicted(
    predicted: PredictedBlocks,
) -> None:
    hashes = block_hashes(range(500), 1)
    predicted.expect(RANK, hashes, now=0.0, ttl_s=5.0)
    assert predicted.leading(RANK, hashes, 0, now=0.0) == 100
    predicted.check()


def test_nothing_is_predicted_for_no_blocks_or_no_time(predicted: PredictedBlocks) -> None:
    predicted.expect(RANK, b"", now=0.0, ttl_s=5.0)
    predicted.expect(RANK, HASHES, now=0.0, ttl_s=0.0)
    assert len(predicted) == 0
    predicted.check()


class Plain:
    """Predictions as a plain map from block to time: what `PredictedBlocks` has to agree with."""

    def __init__(self) -> None:
        self.until: dict[tuple[WorkerRank, bytes], float] = {}

    def expect(self, rank: WorkerRank, blocks: list[bytes], until: float) -> None:
        for block in blocks:
            self.until[rank, block] = max(until, self.until.get((rank, block), 0.0))

    def forget(self, rank: WorkerRank, blocks: list[bytes]) -> float:
        """The longest time of any of them."""
        return max((self.until.pop((rank, block), 0.0) for block in blocks), default=0.0)

    def drop(self, rank: WorkerRank) -> None:
        self.until = {key: until for key, until in self.until.items() if key[0] != rank}

    def leading(self, rank: WorkerRank, blocks: list[bytes], now: float) -> int:
        live = [self.until.get((rank, block), 0.0) > now for block in blocks]
        return [*live, False].index(False)


@pytest.mark.parametrize("doubles", [1, 9])
def test_any_order_of_calls_agrees_with_a_plain_list_of_predictions(doubles: int) -> None:
    """Prompts of 8 blocks, fewer than lie between two marks, and of 72.

    Of what is confirmed, the first few blocks may be overlooked, and nothing else.
    """
    rng = random.Random(6)
    predicted, plain = PredictedBlocks(), Plain()
    bits = [[rng.randrange(2) for _ in range(8)] for _ in range(20)]
    prompts = [block_hashes([bit for bit in each for _ in range(doubles)], 1) for each in bits]
    length = 8 * doubles
    now = 0.0
    for _ in range(1200 // doubles + 200):
        now += rng.choice([0.0, 0.5, rng.random()])
        rank, hashes = rng.choice([RANK, OTHER]), rng.choice(prompts)
        first, last = sorted((rng.randrange(length + 1), rng.randrange(length + 1)))
        ttl_s = rng.choice([0.5, 2.0, 3.0, rng.random() * 5 + 0.01])
        match rng.choice([*["expect"] * 4, "confirm", "expire", "drop"]):
            case "expect":
                predicted.expect(rank, hashes[: last * 8], now=now, ttl_s=ttl_s, start=first)
                plain.expect(rank, blocks_of(hashes)[first:last], now + ttl_s)
            case "confirm":
                predicted.confirm(rank, hashes[first * 8 : last * 8])
                seen = first
                while seen < min(last, first + MARK_BLOCKS - 1) and predicted.leading(
                    rank, hashes, seen, now
                ):
                    seen += 1
                plain.forget(rank, blocks_of(hashes)[seen:last])
            case "expire":
                predicted.expire(now)
            case _ if rng.random() < 0.1:
                predicted.drop(rank)
                plain.drop(rank)
        predicted.check()
        hashes = rng.choice(prompts)
        for start in range(length + 1):
            expected = plain.leading(rank, blocks_of(hashes)[start:], now)
            assert predicted.leading(rank, hashes, start, now) == expected


def test_a_withdrawal_takes_back_what_no_other_prediction_expects() -> None:
    """Any predictions of long prompts, none confirmed: as if one had never been made."""
    rng = random.Random(7)
    for _ in range(40):
        predicted, plain = PredictedBlocks(), Plain()
        bits = [[rng.randrange(2) for _ in range(8)] for _ in range(4)]
        prompts = [block_hashes([bit for bit in each for _ in range(9)], 1) for each in bits]
        ends = rng.sample(range(37, 73), 6)
        made = [(rng.choice(prompts), rng.randrange(36), end) for end in ends]
        taken = rng.randrange(6)
        for number, (hashes, first, last) in enumerate(made):
            predicted.expect(RANK, hashes[: last * 8], now=number, ttl_s=10.0, start=first)
            if number != taken:
                plain.expect(RANK, blocks_of(hashes)[first:last], number + 10.0)
        hashes, first, last = made[taken]
        predicted.withdraw(RANK, hashes[: last * 8], start=first)
        predicted.check()
        for hashes in prompts:
            for now in (6.0, 12.5, 14.5):
                lengths = [predicted.leading(RANK, hashes, start, now) for start in range(73)]
                blocks = blocks_of(hashes)
                assert lengths == [plain.leading(RANK, blocks[at:], now) for at in range(73)]


def test_hashes_that_are_no_chain_harm_nothing(predicted: PredictedBlocks) -> None:
    """Another router's message may hold anything: the same block twice, blocks in another order."""
    rng = random.Random(8)
    blocks = blocks_of(block_hashes(range(6), 1))
    for number in range(2000):
        hashes = b"".join(rng.choices(blocks, k=rng.randrange(40)))
        start = rng.randrange(40)
        predicted.expect(RANK, hashes, now=number * 0.1, ttl_s=rng.random(), start=start)
        predicted.confirm(RANK, b"".join(rng.choices(blocks, k=3)))
        predicted.leading(RANK, hashes, 0, number * 0.1)
        predicted.withdraw(RANK, hashes, start=start)
        predicted.expire(number * 0.1 - 0.5)
    predicted.expire(300.0)
    assert not predicted


def test_a_prompt_that_grows_is_expected_as_one(predicted: PredictedBlocks) -> None:
    """The next turn, the same document with another question, and what the first one still has."""
    other = block_hashes([*range(6), 99, 98, 97], 1)
    predicted.expect(RANK, HASHES[: 8 * 8], now=0.0, ttl_s=5.0)
    predicted.expect(RANK, HASHES, now=1.0, ttl_s=5.0)
    predicted.expect(RANK, other, now=2.0, ttl_s=5.0)
    predicted.check()
    assert len(predicted) == 13
    assert predicted.leading(RANK, HASHES, 0, now=3.0) == 10
    assert predicted.leading(RANK, other, 2, now=3.0) == 7
    predicted.expire(6.0)
    assert predicted.leading(RANK, HASHES, 0, now=6.0) == 6
    assert predicted.leading(RANK, other, 0, now=6.0) == 9
    predicted.check()


def test_the_last_block_before_a_mark_would_follow_is_found_again(
    predicted: PredictedBlocks,
) -> None:
    """It is as far behind the only mark of its run as a block can be."""
    chain = block_hashes(range(MARK_BLOCKS + 4), 1)
    predicted.expect(RANK, chain[: MARK_BLOCKS * 8], now=0.0, ttl_s=5.0)
    predicted.expect(RANK, chain, start=MARK_BLOCKS - 1, now=0.0, ttl_s=5.0)
    predicted.check()
    assert len(predicted) == MARK_BLOCKS + 4


def test_a_contradiction_is_told(predicted: PredictedBlocks) -> None:
    predicted.expect(RANK, HASHES, now=0.0, ttl_s=5.0)
    predicted._queue.clear()
    with pytest.raises(InvariantError, match="10 queued, 0 found"):
        predicted.check()


def test_what_is_taken_back_leaves_what_others_expect(predicted: PredictedBlocks) -> None:
    predicted.expect(RANK, HASHES[: 4 * 8], now=0.0, ttl_s=10.0)
    predicted.expect(OTHER, HASHES, now=0.0, ttl_s=10.0)
    predicted.expect(RANK, HASHES, now=1.0, ttl_s=10.0)
    predicted.withdraw(RANK, HASHES)
    predicted.check()
    assert predicted.leading(RANK, HASHES, 0, now=2.0) == 4
    assert predicted.leading(OTHER, HASHES, 0, now=2.0) == 10
    predicted.withdraw(RANK, HASHES)
    assert predicted.leading(RANK, HASHES, 0, now=2.0) == 4
    assert predicted.leading(RANK, HASHES, 0, now=10.0) == 0
    predicted.withdraw(RANK, HASHES[: 4 * 8])
    predicted.check()
    assert predicted.leading(RANK, HASHES, 0, now=2.0) == 0


def test_what_events_have_confirmed_is_not_expected_again_by_a_withdrawal(
    predicted: PredictedBlocks,
) -> None:
    predicted.expect(RANK, HASHES, now=0.0, ttl_s=10.0)
    predicted.expect(RANK, HASHES, now=1.0, ttl_s=10.0)
    predicted.confirm(RANK, HASHES[: 3 * 8])
    predicted.withdraw(RANK, HASHES)
    predicted.check()
    assert predicted.leading(RANK, HASHES, 0, now=2.0) == 0
    assert predicted.leading(RANK, HASHES, 3, now=2.0) == 7


@pytest.mark.parametrize("gone", ["cleared", "confirmed"])
def test_a_withdrawal_brings_nothing_back_that_the_rank_has_dropped(
    predicted: PredictedBlocks, gone: str
) -> None:
    """Routed, stored and evicted (or cleared) within a prediction's life; then one is refused."""
    predicted.expect(RANK, HASHES, now=0.0, ttl_s=10.0)
    if gone == "cleared":
        predicted.drop(RANK)
    else:
        predicted.confirm(RANK, HASHES)
    predicted.expect(RANK, HASHES, now=2.0, ttl_s=10.0)
    predicted.expect(RANK, HASHES[: 3 * 8], now=3.0, ttl_s=5.0)
    predicted.withdraw(RANK, HASHES)
    predicted.check()
    assert predicted.leading(RANK, HASHES, 0, now=4.0) == 3
    assert predicted.leading(RANK, HASHES, 0, now=8.0) == 0


def test_events_from_the_middle_on_confirm_nearly_all_samples_of_a_prompt(
    predicted: PredictedBlocks,
) -> None:
    """What other replicas tell are samples, and events have every block.

    The first sample behind where the events begin may be overlooked.
    """
    prompt = block_hashes(range(32), 1)
    predicted.expect(RANK, sample(prompt), now=0.0, ttl_s=5.0)
    predicted.confirm(RANK, prompt[5 * 8 :])
    assert len(predicted) <= 6
    predicted.check()
