"""How slow workers are, learned from their outputs."""

from support.prompts import prompt_of

from events import WorkerRank
from kvrouter.load import Load, Outcome
from kvrouter.pace import NEW_CHANCE_S, Paces

RANKS = [WorkerRank(f"w{number}") for number in range(4)]


def decode(paces: Paces, times: int, took_s: dict[int, float], active: int = 1) -> None:
    """Outputs of 100 tokens on each rank, one every second; other ranks take a second for one."""
    for now in range(times):
        for number, rank in enumerate(RANKS):
            taken_s = took_s.get(number, 1.0)
            paces.learn(rank, active=active, tokens=100, taken_s=taken_s, now=float(now))


def test_equal_workers_are_not_slow() -> None:
    paces = Paces()
    decode(paces, 60, {0: 1.2, 1: 0.8})
    assert paces.slowness(RANKS) == []


def test_a_worker_that_takes_three_times_as_long_is_slow() -> None:
    """An older GPU, one that throttles, or one that something else uses as well."""
    paces = Paces()
    decode(paces, 60, {2: 3.0})
    found = paces.slowness(RANKS)
    assert found[2] > 1.7
    assert [found[0], found[1], found[3]] == [1.0, 1.0, 1.0]


def test_a_worker_that_is_only_busier_is_not_slow() -> None:
    """With more requests at once each takes longer; that is what load is for."""
    paces = Paces()
    for now in range(100):
        for number, rank in enumerate(RANKS):
            active = 40 if not number else 10 + now % 5
            taken_s = 0.1 * active
            paces.learn(rank, active=active, tokens=100, taken_s=taken_s, now=float(now))
    assert paces.slowness(RANKS) == []


def test_a_slow_worker_without_outputs_gets_a_new_chance() -> None:
    """Nothing would ever be learned of a worker that is spared for ever."""
    paces = Paces()
    decode(paces, 60, {2: 3.0})
    others = [rank for number, rank in enumerate(RANKS) if number != 2]
    for rank in others:
        paces.learn(rank, active=1, tokens=100, taken_s=1.0, now=59 + NEW_CHANCE_S - 1)
    assert paces.slowness(RANKS)
    for rank in others:
        paces.learn(rank, active=1, tokens=100, taken_s=1.0, now=59 + NEW_CHANCE_S + 1)
    assert paces.slowness(RANKS) == []


def test_a_worker_that_recovers_is_soon_like_the_others() -> None:
    paces = Paces()
    decode(paces, 60, {2: 3.0})
    for now in range(60, 240):
        for rank in RANKS:
            paces.learn(rank, active=1, tokens=100, taken_s=1.0, now=float(now))
    assert paces.slowness(RANKS) == []


def test_short_outputs_and_answers_in_one_piece_say_nothing() -> None:
    paces = Paces()
    for now in range(60):
        for number, rank in enumerate(RANKS):
            taken_s = 3.0 if number == 2 else 1.0
            paces.learn(rank, active=1, tokens=7, taken_s=taken_s, now=float(now))
            paces.learn(rank, active=1, tokens=100, taken_s=0.0, now=float(now))
    assert paces.slowness(RANKS) == []


def serve(load: Load, number: int, token_s: float, at: float, outcome: Outcome) -> None:
    """A request with 50 tokens of output, from the booking to its end."""
    prompt = prompt_of(range(32))
    lease = load.book(RANKS[number], prompt, overlap_blocks=0, block_size=16, now=at)
    for token in range(50):
        lease.add_output_tokens(1, at + token * token_s)
    lease.settle(outcome, at + 49 * token_s)


def test_leases_teach_the_pace_and_a_removed_worker_is_forgotten() -> None:
    load = Load()
    for turn in range(60):
        for number in range(4):
            serve(load, number, 0.03 if number == 2 else 0.01, 2.0 * turn, Outcome.OK)
    assert load.slowness(RANKS)[2] > 1.5
    load.remove(RANKS[2])
    assert load.slowness(RANKS) == []


def test_outputs_that_were_cut_off_teach_nothing() -> None:
    """A client that stops reading holds its engine back, and then leaves."""
    load = Load()
    for turn in range(60):
        for number in range(4):
            outcome = Outcome.CLIENT_GONE if number == 2 else Outcome.OK
            serve(load, number, 0.03 if number == 2 else 0.01, 2.0 * turn, outcome)
    assert load.slowness(RANKS) == []
