"""The index against plain dicts: any order of any events, well-behaved or not."""

import pytest
from support.index_comparison import compare


def test_any_events_leave_the_index_and_the_oracle_agreed() -> None:
    compare(examples=40, steps=12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_events_leave_the_index_and_the_oracle_agreed() -> None:
    compare(examples=2000, steps=30)
