"""The flags of `kvrouter engine`."""

import argparse

import pytest

from kvrouter.sim.command import add_command, run, settings_from


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    return parser.parse_args(["engine", *flags])


def test_the_defaults_serve_without_events_and_fit_one_sequence() -> None:
    args = parse("--port", "8101")
    settings = settings_from(args)
    assert args.run is run
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 8101, "sim")
    assert (settings.kv_events_port, settings.replay_port) == (None, None)
    assert settings.core.capacity_tokens >= settings.core.max_model_len


def test_the_longest_sequence_follows_from_a_small_cache() -> None:
    settings = settings_from(parse("--port", "0", "--num-blocks", "11", "--block-size", "32"))
    assert settings.core.max_model_len == 320


def test_timing_flags_carry_their_units() -> None:
    flags = ("--step-ms", "2", "--prefill-us-per-token", "30", "--decode-us-per-sequence", "4")
    settings = settings_from(parse("--port", "0", "--speed", "10", *flags))
    assert settings.speed == 10
    assert repr(settings.timing) == (
        "LinearTiming(base_s=0.002, prefill_token_s=3e-05, decode_sequence_s=4e-06)"
    )


def test_adapters_are_named_one_by_one() -> None:
    assert settings_from(parse("--port", "0", "--lora", "a", "--lora", "b")).loras == ("a", "b")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--speed", "0"), "speed must be above 0"),
        (("--max-model-len", "100000"), "raise num_blocks"),
        (("--kv-events-port", "5557", "--replay-port", "5558", "--dp-size", "2"), "overlap"),
        (("--tokenizer", "/nowhere/at-all"), "/nowhere/at-all"),
    ],
)
def test_what_makes_no_engine_is_said_in_one_line(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(parse("--port", "0", *flags)) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("kvrouter engine: ")
