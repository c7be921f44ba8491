"""The command `replay`, without a process of its own."""

import json
from pathlib import Path
from typing import get_args

import pytest

from kvrouter.commands import run
from kvrouter.config import PolicyName
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
        ([*SMALL, "--policy", "kv:w"], "must be a number"),
        ([*SMALL, "--policy", "kv:w=1:copy_weight=3"], "give one of them"),
        ([*SMALL, "--compare", "kv,"], "must be one of kv, "),
        ([*SMALL, "--blocks", "100000000000000"], "out of memory"),
        ([*SMALL, "--slow", "8:3"], "workers 0 to 7"),
        ([*SMALL, "--blocks", "4"], "more --blocks"),
        ([*SMALL, "--engine", "prefill=-100,1,0"], "the time to prefill"),
        ([*SMALL, "--engine", "decode=1,4,-5"], "the time to decode"),
        ([*SMALL, "--engine", "prefill=1e300,0,0"], "the time to prefill"),
        ([*SMALL, "--engine", "decode=1e-300,0,0"], "the time to decode"),
    ],
)
def test_wrong_arguments_are_told(arguments: list[str], message: str) -> None:
    with pytest.raises(StartError, match=message):
        run(arguments)


@pytest.mark.parametrize(
    "spec",
    [
        "round_robin:w=1",
        "round_robin:name=kv",
        "kv_blocks:w=1",
        "kv:miss_weight=48",
        "kv:cpu_credit=1",
    ],
)
def test_a_parameter_that_a_policy_does_not_go_by_is_refused(spec: str) -> None:
    """Its row would look as if it did."""
    with pytest.raises(StartError, match="does not go by"):
        run([*SMALL, "--policy", spec])


@pytest.mark.parametrize(
    "flags",
    [
        ["--slow", "1"],
        ["--slow", "0:0"],
        ["--engine", "x=1,2,3"],
        ["--engine", "prefill=nan,0,0"],
        ["--workers", "0"],
        ["--slow", "0:1e308"],
        ["--speed", "nan"],
        ["--speed", "1e-320"],
        ["--rate", "1e-320"],
        ["--event-lag-ms", "-1"],
        ["--policy", "random", "--compare", "kv"],
    ],
)
def test_wrong_flags_are_told(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([*SMALL, *flags])
    assert flags[0] in capsys.readouterr().err


def test_help_names_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["replay", "--help"])
    told = capsys.readouterr().out
    assert all(name in told for name in get_args(PolicyName))


def test_times_that_do_not_keep_their_milliseconds_are_told(tmp_path: Path) -> None:
    """Timestamps since 1970, and a speed that is meant to spread the arrivals."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 1.7e12, "input_length": 9, "output_length": 1, "hash_ids": []}\n'
    )
    with pytest.raises(StartError, match="timestamps near 0"):
        run(["replay", str(path), "--speed", "0.001"])


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


def test_a_picture_may_be_of_a_file_with_dollars_in_its_name(tmp_path: Path) -> None:
    """What stands between two is a formula to matplotlib."""
    pytest.importorskip("matplotlib")
    trace, path = tmp_path / "$\\a$.jsonl", tmp_path / "picture.svg"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}\n')
    assert run(["replay", str(trace), "--plot", str(path)]) == 0
    assert "svg" in path.read_text()


def test_an_interrupted_comparison_shows_what_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the third of many policies."""
    arrivals = iter([*range(3 * 60 + 10)])  # one big cache, two policies, a part of the third

    def arrived(self: object, number: int) -> None:
        del self, number
        if next(arrivals, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(f"{Bar.__module__}.{Bar.__name__}.arrived", arrived)
    with pytest.raises(KeyboardInterrupt):
        run([*SMALL, "--compare", "kv,random,round_robin,least_tokens", "--json"])
    assert [each["policy"] for each in json.loads(capsys.readouterr().out)] == ["kv", "random"]
