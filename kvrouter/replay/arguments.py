"""The arguments of `kvrouter replay`, and what makes one of them wrong by itself."""

import argparse
import math
from pathlib import Path
from typing import get_args

from kvrouter.config import PolicyName
from kvrouter.replay.synthetic import GENERATORS
from kvrouter.replay.trace import LATEST_MS

SYNTHETIC = "synthetic:"
LEAST, MOST = 1e-6, 1e6
"""What a rate or a factor can be, so that all times keep their milliseconds."""

DESCRIPTION = (
    "Run a trace in virtual time: the router's own scheduler, load and index over simulated "
    "engines."
)
EPILOG = f"""\
TRACE is a file with one JSON object a line (timestamp in ms, input_length, output_length,
hash_ids), which may be compressed with gzip, or {SYNTHETIC}KIND with KIND one of
{", ".join(GENERATORS)}.

A policy is one of {", ".join(get_args(PolicyName))}, with
parameters of the section [policy] of a configuration behind it:
  kv    kv:w=1    kv:temperature=20

examples:
  kvrouter replay trace.jsonl --workers 8 --compare kv,kv:w=1,round_robin
  kvrouter replay {SYNTHETIC}chat --rate 30 --workers 4 --blocks 4096 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all of them."""
    parser.add_argument("trace", metavar="TRACE", help=f"a file, or {SYNTHETIC}KIND")
    _add_policies(parser.add_argument_group("policy"))
    _add_trace(parser.add_argument_group("trace"))
    _add_fleet(parser.add_argument_group("fleet"))
    _add_engine(parser.add_argument_group("engine (defaults: those of Dynamo's mock engine)"))
    _add_output(parser.add_argument_group("output"))


def _rate(text: str) -> float:
    value = _number(text)
    if not LEAST <= value <= MOST:
        raise argparse.ArgumentTypeError(f"must be from {LEAST:g} to {MOST:g}, not {text}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text}")
    return int(text)


def _duration_ms(text: str) -> float:
    value = _number(text)
    if not 0 <= value < LATEST_MS:
        raise argparse.ArgumentTypeError(f"must be a time in ms, not {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number, not {text}") from error


def _slow(text: str) -> tuple[int, float]:
    number, _, given = text.partition(":")
    try:
        factor = float(given)
    except ValueError:
        factor = 0.0
    if not number.isdecimal() or not LEAST <= factor <= MOST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not WORKER:FACTOR, as 0:3, with a factor from {LEAST:g} to {MOST:g}"
        )
    return int(number), factor


def _polynomial(text: str) -> tuple[str, tuple[float, float, float]]:
    part, _, values = text.partition("=")
    try:
        constant, linear, square = map(float, values.split(","))
    except ValueError:
        constant = linear = square = math.nan
    if part not in ("prefill", "decode") or not math.isfinite(constant + linear + square):
        raise argparse.ArgumentTypeError(f"{text!r} is not prefill=A,B,C or decode=A,B,C")
    return part, (constant, linear, square)


def _add_policies(group: argparse._ArgumentGroup) -> None:
    one_or_more = group.add_mutually_exclusive_group()
    one_or_more.add_argument("--policy", default="kv", metavar="POLICY", help="(%(default)s)")
    one_or_more.add_argument(
        "--compare",
        type=lambda text: text.split(","),
        metavar="POLICY,POLICY,...",
        help="several policies on the same trace, side by side",
    )


def _add_trace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--speed", type=_rate, default=1.0, metavar="X", help="arrivals X times as fast"
    )
    group.add_argument(
        "--requests", type=_count, metavar="N", help="only the first N; 2000 if synthetic"
    )
    group.add_argument(
        "--rate",
        type=_rate,
        default=10.0,
        metavar="R",
        help="requests per second of a synthetic trace (%(default)g); chat and agents begin "
        "without any session and come near it after some minutes",
    )
    group.add_argument(
        "--chunk-tokens",
        type=_count,
        default=512,
        metavar="N",
        help="tokens that a hash id of the trace stands for (%(default)s)",
    )
    group.add_argument("--no-reuse", action="store_true", help="no two requests share anything")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all chance (0)")


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--workers", type=_count, default=8, metavar="N", help="(%(default)s)")
    group.add_argument(
        "--slow",
        type=_slow,
        action="append",
        default=[],
        metavar="WORKER:FACTOR",
        help="a worker that takes FACTOR times as long; workers are numbered from 0",
    )
    group.add_argument(
        "--event-lag-ms",
        type=_duration_ms,
        default=2.0,
        metavar="T",
        help="until routers know what a step stored or evicted (%(default)g)",
    )
    group.add_argument("--routers", type=_count, default=1, metavar="N", help="(%(default)s)")
    group.add_argument(
        "--sync-ms",
        type=_duration_ms,
        metavar="T",
        help="routers know of each other's bookings after T; without it, never",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    for flag, default, text in (
        ("--block-size", 64, "tokens in a block"),
        ("--blocks", 16_384, "blocks of each worker"),
        ("--max-num-seqs", 256, "requests that run at once"),
        ("--max-num-batched-tokens", 8192, "tokens computed in one step"),
    ):
        group.add_argument(
            flag, type=_count, default=default, metavar="N", help=f"{text} (%(default)s)"
        )
    group.add_argument(
        "--engine",
        type=_polynomial,
        action="append",
        default=[],
        metavar="PART=A,B,C",
        help="a step takes prefill A + B n + C n^2 ms if it has n prompt tokens to compute, and "
        "decode A + B p + C p^2 ms if sequences that fill a share p of the cache get a token; PART "
        "is prefill or decode",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", action="store_true", help="an object, or a list with --compare")
    group.add_argument("--plot", type=Path, metavar="FILE", help="a picture too (.png, .svg)")
    group.add_argument("--quiet", action="store_true", help="no progress bar")
