"""What the demo of several routers makes of their reports."""

from typing import Any

from kvrouter.demo.replicas import View, agree, read_view, table


def report(own: dict[str, int], others: dict[str, int]) -> dict[str, Any]:
    return {
        "workers": [
            {"name": name, "ranks": [{"load": {"active_requests": count}}]}
            for name, count in own.items()
        ],
        "replicas": {
            "load_of_others": [
                {"worker": name, "active_requests": count} for name, count in others.items()
            ]
        },
    }


def test_a_view_is_the_own_requests_and_those_of_the_others() -> None:
    view = read_view(report({"a": 2, "b": 0}, {"b": 3}))
    assert view == View(2, {"a": 2, "b": 3})


def test_routers_agree_when_each_sees_what_all_have_placed() -> None:
    first, second = View(2, {"a": 2, "b": 3}), View(3, {"a": 2, "b": 3})
    assert agree([first, second])
    assert not agree([first, View(3, {"a": 3, "b": 2})])
    assert not agree([first, View(4, {"a": 2, "b": 3})])


def test_the_table_has_a_row_for_each_router() -> None:
    rows = table([0, 2], [View(2, {"a": 2, "b": 3}), View(3, {"a": 2, "b": 3})]).splitlines()
    assert rows[0].split() == ["placed", "sees:", "engine", "1", "engine", "2", "all"]
    assert rows[1].split() == ["router", "1", "2", "2", "3", "5"]
    assert rows[2].split() == ["router", "3", "3", "2", "3", "5"]
