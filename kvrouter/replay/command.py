"""`kvrouter replay`: a trace in virtual time, to compare policies and to size a fleet."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Self

import msgspec

from kvrouter.config import ConfigError, PolicyConfig
from kvrouter.policy import Policy, build_policy
from kvrouter.replay.bound import pooled_bound
from kvrouter.replay.fleet import FleetSettings, replay
from kvrouter.replay.plot import plot
from kvrouter.replay.result import Result
from kvrouter.replay.synthetic import GENERATORS, synthetic_trace
from kvrouter.replay.table import table
from kvrouter.replay.trace import Trace, TraceError, read_trace
from kvrouter.sim.settings import CoreSettings, SettingsError
from kvrouter.sim.timing import PolynomialTiming
from kvrouter.startup import StartError

SYNTHETIC = "synthetic:"
_BAR_CELLS = 30
_BAR_PAUSE_S = 0.2

_EPILOG = f"""\
TRACE is a file with one JSON object a line (timestamp in ms, input_length, output_length,
hash_ids), which may be compressed with gzip, or {SYNTHETIC}KIND with KIND one of
{", ".join(GENERATORS)}.

A policy is a name, and parameters of the section [policy] of a configuration behind it:
  kv    kv:w=1    kv:temperature=20

examples:
  kvrouter replay trace.jsonl --workers 8 --compare kv,kv:w=1,round_robin
  kvrouter replay {SYNTHETIC}chat --rate 30 --workers 4 --blocks 4096 --json
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `replay` to the command line."""
    parser = commands.add_parser(
        "replay",
        help="run a trace in virtual time: compare policies, size a fleet",
        description="Run a trace in virtual time: the router's own scheduler, load and index over "
        "simulated engines.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", metavar="TRACE", help=f"a file, or {SYNTHETIC}KIND")
    parser.set_defaults(run=run)
    _add_policies(parser.add_argument_group("policy"))
    _add_trace(parser.add_argument_group("trace"))
    _add_fleet(parser.add_argument_group("fleet"))
    _add_engine(parser.add_argument_group("engine (defaults: those of Dynamo's mock engine)"))
    _add_output(parser.add_argument_group("output"))


def run(options: argparse.Namespace) -> int:
    """Replay and print; returns the exit status. Raises StartError when an argument is wrong."""
    try:
        trace, settings = _trace(options), _settings(options)
        policies = [(spec, policy_from(spec)) for spec in options.compare or [options.policy]]
    except (TraceError, SettingsError, ConfigError, ValueError) as error:
        raise StartError(str(error)) from error
    blocks = settings.core.num_blocks - 1
    bound = pooled_bound(
        trace, total_blocks=blocks * settings.workers, block_size=settings.core.block_size
    )
    results = []
    for spec, policy in policies:
        with _Bar(spec, len(trace), visible=sys.stderr.isatty() and not options.quiet) as bar:
            result = replay(trace, policy, settings, bar.arrived)
        results.append(msgspec.structs.replace(result, policy=spec, pooled_bound=bound))
    _report(options, trace, results)
    return 0


def policy_from(spec: str) -> Policy:
    """The policy of `NAME[:PARAMETER=VALUE...]`. Raises ConfigError or ValueError."""
    name, *parameters = spec.split(":")
    fields = dict(each.partition("=")[::2] for each in parameters)
    try:
        config = msgspec.convert({"name": name, **fields}, PolicyConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy {spec!r}: {error}") from error
    return build_policy(config)


def _trace(options: argparse.Namespace) -> Trace:
    if options.trace.startswith(SYNTHETIC):
        trace = synthetic_trace(
            options.trace.removeprefix(SYNTHETIC),
            requests=options.requests or 2000,
            rate=options.rate,
            rng=Random(options.seed),
        )
    else:
        trace = read_trace(Path(options.trace), chunk_tokens=options.chunk_tokens)
        if options.requests:
            trace = trace.first(options.requests)
    return trace.without_reuse() if options.no_reuse else trace


def _settings(options: argparse.Namespace) -> FleetSettings:
    return FleetSettings(
        workers=options.workers,
        core=CoreSettings(
            block_size=options.block_size,
            num_blocks=options.blocks + 1,
            max_num_seqs=options.max_num_seqs,
            max_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.blocks * options.block_size,
            reserve_prompt=False,
        ),
        timing=_timing(options.engine),
        speed=options.speed,
        event_lag_s=options.event_lag_ms / 1000,
        routers=options.routers,
        sync_s=None if options.sync_ms is None else options.sync_ms / 1000,
        slow=dict(options.slow),
        seed=options.seed,
    )


def _timing(parts: list[tuple[str, tuple[float, float, float]]]) -> PolynomialTiming:
    given = dict(parts)
    default = PolynomialTiming()
    return PolynomialTiming(
        prefill_ms=given.get("prefill", default.prefill_ms),
        decode_ms=given.get("decode", default.decode_ms),
    )


def _report(options: argparse.Namespace, trace: Trace, results: list[Result]) -> None:
    if options.json:
        data = msgspec.json.encode(results if options.compare else results[0])
        sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")
    else:
        sys.stdout.write(table(trace.name, results))
    if options.plot:
        try:
            plot(results, f"{trace.name}, {options.workers} workers", options.plot)
        except ImportError as error:
            raise StartError("--plot needs matplotlib: pip install 'kvrouter[plot]'") from error
        except (OSError, ValueError) as error:
            raise StartError(f"--plot {options.plot}: {error}") from error


class _Bar:
    """A progress bar on standard error."""

    def __init__(self, name: str, total: int, *, visible: bool) -> None:
        self._name = name
        self._total = total
        self._visible = visible
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._visible:
            sys.stderr.write("\r\x1b[K")

    def arrived(self, number: int) -> None:
        """Request `number` has arrived."""
        now = time.monotonic()
        if not self._visible or now - self._shown_at < _BAR_PAUSE_S:
            return
        self._shown_at = now
        share = (number + 1) / self._total
        bar = ("#" * round(share * _BAR_CELLS)).ljust(_BAR_CELLS, ".")
        sys.stderr.write(f"\r\x1b[K{self._name} [{bar}] {share:.0%} {number + 1}/{self._total}")
        sys.stderr.flush()


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
        return value

    return parse


def _slow(text: str) -> tuple[int, float]:
    number, _, factor = text.partition(":")
    try:
        return int(number), float(factor)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not WORKER:FACTOR, as 0:3") from error


def _polynomial(text: str) -> tuple[str, tuple[float, float, float]]:
    part, _, values = text.partition("=")
    try:
        constant, linear, square = map(float, values.split(","))
    except ValueError:
        constant = linear = square = 0.0
        part = ""
    if part not in ("prefill", "decode"):
        raise argparse.ArgumentTypeError(f"{text!r} is not prefill=A,B,C or decode=A,B,C")
    return part, (constant, linear, square)


def _add_policies(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--policy", default="kv", metavar="POLICY", help="(%(default)s)")
    group.add_argument(
        "--compare",
        type=lambda text: text.split(","),
        metavar="POLICY,POLICY,...",
        help="several policies on the same trace, side by side",
    )


def _add_trace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--speed", type=_positive(float), default=1.0, metavar="X", help="arrivals X times as fast"
    )
    group.add_argument(
        "--requests", type=_positive(int), metavar="N", help="only the first N; 2000 if synthetic"
    )
    group.add_argument(
        "--rate",
        type=_positive(float),
        default=10.0,
        metavar="R",
        help="requests per second of a synthetic trace (%(default)g)",
    )
    group.add_argument(
        "--chunk-tokens",
        type=_positive(int),
        default=512,
        metavar="N",
        help="tokens that a hash id of the trace stands for (%(default)s)",
    )
    group.add_argument("--no-reuse", action="store_true", help="no two requests share anything")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all chance (0)")


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    positive = _positive(int)
    group.add_argument("--workers", type=positive, default=8, metavar="N", help="(%(default)s)")
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
        type=float,
        default=2.0,
        metavar="T",
        help="until routers know what a step stored or evicted (%(default)g)",
    )
    group.add_argument("--routers", type=positive, default=1, metavar="N", help="(%(default)s)")
    group.add_argument(
        "--sync-ms",
        type=float,
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
            flag, type=_positive(int), default=default, metavar="N", help=f"{text} (%(default)s)"
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
