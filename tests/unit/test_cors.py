"""Which origins' pages may call, and what their browsers are told."""

from kvrouter.http.cors import Cors, is_preflight


def test_nothing_is_said_where_no_origin_is_configured() -> None:
    cors = Cors([])
    assert not cors.admits("https://a")
    assert cors.on_response("https://a") == []


def test_a_star_admits_all_and_names_the_one_that_asks() -> None:
    cors = Cors(["*"])
    assert cors.admits("https://a")
    assert ("Access-Control-Allow-Origin", "https://a") in cors.on_response("https://a")


def test_another_origin_gets_no_leave_but_caches_are_told_apart() -> None:
    assert Cors(["https://a"]).on_response("https://b") == [("Vary", "Origin")]


def test_a_preflight_is_an_options_with_origin_and_method() -> None:
    fields = {"origin": "https://a", "access-control-request-method": "POST"}
    assert is_preflight("OPTIONS", fields)
    assert not is_preflight("POST", fields)
    assert not is_preflight("OPTIONS", {"origin": "https://a"})
