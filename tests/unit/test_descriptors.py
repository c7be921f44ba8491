"""Who may have the last file descriptors."""

import pytest

from kvrouter.http.descriptors import PLENTY, Descriptors


@pytest.mark.parametrize("allowed", [16, 64, 256, 1024, 4096, 1_048_576])
def test_requests_get_some_that_new_clients_do_not_and_the_rest_is_for_others(allowed: int) -> None:
    descriptors = Descriptors(allowed)
    assert 0 < descriptors.of_clients < descriptors.of_requests < allowed
    assert descriptors.of_clients >= allowed * 3 // 4


@pytest.mark.parametrize(
    ("allowed", "connections", "suffice"),
    [(1024, 256, True), (1024, 257, False), (64, 1, False), (65_536, 16_384, True)],
)
def test_they_suffice_where_each_client_can_have_two_and_some_are_left(
    allowed: int, connections: int, suffice: bool
) -> None:
    assert Descriptors(allowed).suffice(connections) is suffice


def test_who_knows_no_limit_accepts_the_fastest_way() -> None:
    assert PLENTY.suffice(100_000)
