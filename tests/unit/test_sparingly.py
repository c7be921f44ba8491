"""What is said of something that happens all the time."""

from events.sparingly import Sparingly


def test_the_first_is_said_and_then_one_in_a_while_with_how_many_there_were() -> None:
    sparingly = Sparingly(60.0)
    said = {at: times for at in range(0, 125, 5) if (times := sparingly.due(at))}
    assert said == {0: 1, 60: 12, 120: 12}


def test_a_few_at_once_are_all_said() -> None:
    sparingly = Sparingly(10.0, burst=3)
    assert [sparingly.due(100.0) for _ in range(5)] == [1, 1, 1, 0, 0]
    assert sparingly.due(111.0) == 3
    assert sparingly.due(112.0) == 0
    assert [sparingly.due(200.0) for _ in range(4)] == [2, 1, 1, 0]
