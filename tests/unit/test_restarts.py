"""When a process that ended starts again."""

from kvrouter.processes.restarts import FIRST_PAUSE_S, LONG_LIFE_S, LONGEST_PAUSE_S, Restarts


def test_each_early_end_makes_the_pause_longer_up_to_a_limit() -> None:
    restarts = Restarts()
    pauses = [restarts.ended(1.0) for _ in range(12)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert restarts.count == 12


def test_after_a_long_life_the_pause_is_short_again() -> None:
    restarts = Restarts()
    for _ in range(5):
        restarts.ended(1.0)
    assert restarts.ended(LONG_LIFE_S) == FIRST_PAUSE_S
