"""Who may have the last file descriptors."""

import resource

import pytest

from kvrouter.http.descriptors import Descriptors, lowest_free, plenty


@pytest.mark.parametrize("allowed", [16, 64, 256, 1024, 4096, 1_048_576])
def test_a_quarter_at_most_is_kept_for_others_than_clients(allowed: int) -> None:
    descriptors = Descriptors(allowed)
    spare = min(allowed // 4, 256)
    assert descriptors.welcome(allowed - spare - 1)
    assert not descriptors.welcome(allowed - spare)


def test_each_client_has_one_promised_for_its_request() -> None:
    descriptors = Descriptors(64)
    descriptors.clients = 8
    descriptors.coming = 2
    assert descriptors.welcome(48 - 10 - 1)
    assert not descriptors.welcome(48 - 10)
    descriptors.engines = 7
    assert descriptors.welcome(48 - 3 - 1)
    assert not descriptors.welcome(48 - 3)
    descriptors.engines = 20  # resting
    assert descriptors.welcome(48 - 1)


def test_while_requests_may_need_what_is_left_nobody_is_accepted() -> None:
    free = lowest_free()
    descriptors = Descriptors((free + 10) * 8 // 7)  # an eighth is for neither
    assert descriptors.left_to_accept()
    assert descriptors.left_to_connect()
    descriptors.clients = 12
    assert not descriptors.left_to_accept()
    assert descriptors.left_to_connect()
    assert not Descriptors(free).left_to_connect()


@pytest.mark.parametrize(
    ("allowed", "connections", "suffice"),
    [(1024, 256, True), (1024, 257, False), (64, 1, False), (65_536, 16_384, True)],
)
def test_they_suffice_where_each_client_can_have_two_and_some_are_left(
    allowed: int, connections: int, suffice: bool
) -> None:
    assert Descriptors(allowed).suffice(connections) is suffice


def test_who_knows_no_limit_accepts_the_fastest_way() -> None:
    assert plenty().suffice(100_000)


def test_the_lowest_free_number_is_below_the_limit() -> None:
    assert 2 < lowest_free() < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
