"""The command `replay`, without a process of its own."""

import json
from pathlib import Path

import pytest

from kvrouter.commands import run
from kvrouter.replay.command import _Bar as Bar
from kvrouter.startup import StartError

SMALL = ["replay", "synthetic:chat", "--requests", "60", "--rate", "20", "--blocks", "2048"]


def test_json_has_the_figures_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--workers", "3", "--policy", "kv", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["policy"], result["workers"], result["requests"]) == ("kv", 3, 60)
    assert 0 < result["reuse"] <= result["pooled_bound"] < 1
    assert 0 < result["best_holder_reuse"] < 1
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert 0 < result[name]["p50"] <= result[name]["p99"]
        assert result[name]["mean"] > 0
    assert sum(result["shares"]) == 60
    assert result["decisions_per_s"] > 0


def test_several_policies_are_compared_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--compare", "kv,kv:w=4:temperature=2,round_robin"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["kv", "kv:w=4:temperature=2", "round_robin"]
    assert run([*SMALL, "--compare", "kv,random", "--json"]) == 0
    assert [each["policy"] for each in json.loads(capsys.readouterr().out)] == ["kv", "random"]


def test_an_engine_that_is_twice_as_slow_takes_twice_as_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Users fit the timing to their own engines."""
    alone = [*SMALL, "--json", "--requests", "1"]
    run([*alone, "--engine", "prefill=20,0,0", "--engine", "decode=5,0,0"])
    fast = json.loads(capsys.readouterr().out)
    run([*alone, "--engine", "prefill=40,0,0", "--engine", "decode=10,0,0"])
    slow = json.loads(capsys.readouterr().out)
    assert (fast["ttft_ms"]["mean"], fast["itl_ms"]["mean"]) == (20.0, 5.0)
    assert (slow["ttft_ms"]["mean"], slow["itl_ms"]["mean"]) == (40.0, 10.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "no-such-file"], "cannot be read"),
        (["replay", "synthetic:x"], "no synthetic trace"),
        ([*SMALL, "--policy", "best"], "policy 'best'"),
        ([*SMALL, "--policy", "kv:v=1"], "policy 'kv:v=1'"),
        ([*SMALL, "--policy", "kv:w=-1"], "policy 'kv:w=-1'"),
        ([*SMALL, "--slow", "8:3"], "workers 0 to 7"),
        ([*SMALL, "--blocks", "4"], "more --blocks"),
        ([*SMALL, "--engine", "prefill=-100,1,0"], "the time to prefill"),
        ([*SMALL, "--engine", "decode=1,4,-5"], "the time to decode"),
    ],
)
def test_wrong_arguments_are_told(arguments: list[str], message: str) -> None:
    with pytest.raises(StartError, match=message):
        run(arguments)


@pytest.mark.parametrize(
    "flags",
    [
        ["--slow", "1"],
        ["--slow", "0:0"],
        ["--engine", "x=1,2,3"],
        ["--engine", "prefill=nan,0,0"],
        ["--workers", "0"],
        ["--speed", "nan"],
        ["--event-lag-ms", "-1"],
    ],
)
def test_wrong_flags_are_told(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([*SMALL, *flags])
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["picture.nothing", "no/folder/picture.png"])
def test_a_picture_that_cannot_be_written_is_told_before_anything_runs(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(StartError, match="--plot"):
        run(
            ["replay", "synthetic:chat", "--requests", "1000000000", "--plot", str(tmp_path / name)]
        )


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.svg"
    run([*SMALL, "--plot", str(path)])
    assert "svg" in path.read_text()
    assert capsys.readouterr().out


def test_an_interrupted_comparison_shows_what_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the third of many policies."""
    arrivals = iter([*range(2 * 60 + 10)])

    def arrived(self: object, number: int) -> None:
        del self, number
        if next(arrivals, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(f"{Bar.__module__}.{Bar.__name__}.arrived", arrived)
    with pytest.raises(KeyboardInterrupt):
        run([*SMALL, "--compare", "kv,random,round_robin,least_tokens", "--json"])
    assert [each["policy"] for each in json.loads(capsys.readouterr().out)] == ["kv", "random"]
