"""`kvrouter replay`: a trace in virtual time, to compare policies and to size a fleet."""

import argparse
import sys
import time
from pathlib import Path
from random import Random
from typing import Self

import msgspec

from kvrouter.config import ConfigError, parse_config
from kvrouter.policy import Policy, build_policy, parameters_of
from kvrouter.replay.arguments import DESCRIPTION, EPILOG, SYNTHETIC, add_arguments
from kvrouter.replay.bound import pooled_bound
from kvrouter.replay.fleet import FleetSettings, replay
from kvrouter.replay.plot import check_can_plot, plot
from kvrouter.replay.result import Result
from kvrouter.replay.synthetic import synthetic_trace
from kvrouter.replay.table import table
from kvrouter.replay.trace import Trace, TraceError, read_trace
from kvrouter.sim.settings import CoreSettings, SettingsError
from kvrouter.sim.timing import PolynomialTiming
from kvrouter.startup import StartError

_BAR_CELLS = 30
_BAR_PAUSE_S = 0.2


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `replay` to the command line."""
    parser = commands.add_parser(
        "replay",
        help="run a trace in virtual time: compare policies, size a fleet",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Replay and print; returns the exit status. Raises StartError when an argument is wrong."""
    try:
        policies = [(spec, policy_from(spec)) for spec in options.compare or [options.policy]]
        settings = _settings(options)
        if options.plot:
            check_can_plot(options.plot)
        trace = _trace(options)
        trace.check_lengths(settings.core.max_model_len)
        trace.check_times(settings.speed)
    except ImportError as error:
        raise StartError("--plot needs matplotlib: pip install 'kvrouter[plot]'") from error
    except (TraceError, SettingsError, ConfigError, ValueError) as error:
        raise StartError(str(error)) from error
    results: list[Result] = []
    try:
        _replay_all(options, trace, policies, settings, results)
    except KeyboardInterrupt:
        if results:  # what has taken minutes is not thrown away
            _report(options, trace, results)
        raise
    except MemoryError as error:
        raise StartError("out of memory: fewer --workers, --blocks or --requests") from error
    _report(options, trace, results)
    return 0


def _replay_all(
    options: argparse.Namespace,
    trace: Trace,
    policies: list[tuple[str, Policy]],
    settings: FleetSettings,
    results: list[Result],
) -> None:
    """Fill `results`, one after the other."""
    visible = sys.stderr.isatty() and not options.quiet
    with _Bar("one big cache", len(trace), visible=visible) as bar:
        bound = pooled_bound(
            trace,
            total_blocks=(settings.core.num_blocks - 1) * settings.workers,
            block_size=settings.core.block_size,
            progress=bar.arrived,
        )
    for spec, policy in policies:
        with _Bar(spec, len(trace), visible=visible) as bar:
            result = replay(trace, policy, settings, bar.arrived)
        results.append(msgspec.structs.replace(result, policy=spec, pooled_bound=bound))


def policy_from(spec: str) -> Policy:
    """The policy of `NAME[:PARAMETER=VALUE...]`.

    Raises ConfigError where a file with these would be wrong, and for a parameter that the policy
    does not go by: its row would look as if it did.
    """
    name, *parameters = spec.split(":")
    fields = dict(each.partition("=")[::2] for each in parameters)
    values = {field: _number_or_text(value) for field, value in fields.items()}
    try:
        config = parse_config({"policy": {**values, "name": name}}).policy
    except ConfigError as error:
        raise ConfigError(f"policy {spec!r}: {error}") from error
    unused = sorted(set(fields) - parameters_of(config))
    if unused:
        raise ConfigError(f"policy {spec!r}: {name} does not go by {', '.join(unused)} here")
    return build_policy(config)


def _number_or_text(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value  # what it should have been, the configuration says


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
    for number, _ in options.slow:
        if number >= options.workers:
            raise SettingsError(f"--slow: there are workers 0 to {options.workers - 1} only")
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
        timing=_timing(options.engine, options.max_num_batched_tokens),
        speed=options.speed,
        event_lag_s=options.event_lag_ms / 1000,
        routers=options.routers,
        sync_s=None if options.sync_ms is None else options.sync_ms / 1000,
        slow=dict(options.slow),
        seed=options.seed,
    )


def _timing(
    parts: list[tuple[str, tuple[float, float, float]]], most_prefill_tokens: int
) -> PolynomialTiming:
    given = dict(parts)
    default = PolynomialTiming()
    timing = PolynomialTiming(
        prefill_ms=given.get("prefill", default.prefill_ms),
        decode_ms=given.get("decode", default.decode_ms),
    )
    timing.check(most_prefill_tokens)
    return timing


def _report(options: argparse.Namespace, trace: Trace, results: list[Result]) -> None:
    if options.json:
        data = msgspec.json.encode(results if options.compare else results[0])
        sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")
    else:
        sys.stdout.write(table(trace.name, results))
    if options.plot:
        try:
            plot(results, f"{trace.name}, {options.workers} workers", options.plot)
        except OSError as error:
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
