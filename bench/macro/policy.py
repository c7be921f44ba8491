"""Policies on a trace in virtual time, side by side, and Dynamo's own replay of it.

    python bench/macro/policy.py [--trace FILE] [--only SCENARIO ...] [--requests N]
                                 [--dynamo-python PYTHON]

8 workers of 16,384 blocks of 64 tokens with the timing of Dynamo's mock engine, unless a scenario
says otherwise. Without --trace a synthetic one of chats is taken. Dynamo's replay runs where its
`ai-dynamo-runtime` is installed: in this environment, or in that of --dynamo-python. Prints a line
per replay on standard error as they come, and one JSON object at the end.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from kvrouter.replay import FleetSettings, Result, Trace, read_trace, replay
from kvrouter.replay.command import policy_from
from kvrouter.replay.synthetic import synthetic_trace
from kvrouter.sim.settings import CoreSettings

BLOCKS = 16_384
BLOCK_SIZE = 64
LEFT_ALONE = ("least_tokens", "kv:w=1")
"""What kv must never be worse than."""
FORMS = ("round_robin", "random", "least_requests", *LEFT_ALONE, "kv_blocks:guard_slack=4", "kv")
DYNAMO: Mapping[str, tuple[str, dict[str, float]]] = {
    "dynamo round_robin": ("round_robin", {}),
    "dynamo kv": ("kv_router", {}),
    "dynamo kv, tuned": ("kv_router", {"overlap_score_credit": 4.0, "prefill_load_scale": 16.0}),
}

_DYNAMO_PROGRAM = """
import json, sys
from importlib.metadata import version
from dynamo._core import KvRouterConfig, run_mocker_trace_replay
asked = json.loads(sys.argv[1])
router = KvRouterConfig(**asked["router"]) if asked["mode"] == "kv_router" else None
engine = {"engine": {"block_size": asked["block_size"], "num_gpu_blocks": asked["blocks"]}}
result = run_mocker_trace_replay(
    [asked["trace"]], extra_engine_args=engine, num_workers=asked["workers"],
    router_mode=asked["mode"], router_config=router, trace_block_size=512,
    arrival_speedup_ratio=asked["speed"])
print(json.dumps({"version": version("ai-dynamo-runtime"), "summary": result.summary}))
"""


def core(blocks: int = BLOCKS) -> CoreSettings:
    """An engine with so many usable blocks."""
    return CoreSettings(
        block_size=BLOCK_SIZE,
        num_blocks=blocks + 1,
        max_model_len=blocks * BLOCK_SIZE,
        reserve_prompt=False,
    )


FLEET = FleetSettings(core=core())
AT_X4 = replace(FLEET, speed=4.0)
INSTANTS_S = 3.0
"""The time between the instants at which the trace has its arrivals."""


def spread(trace: Trace) -> Trace:
    """The same requests at times of their own.

    Routers that place ten requests in one instant can't know of each other.
    """
    rng = Random(5)
    requests = [
        each._replace(at_s=each.at_s + INSTANTS_S * rng.random()) for each in trace.requests
    ]
    return Trace(f"{trace.name}, spread", requests, trace.chunk_tokens)


@dataclass(frozen=True)
class Scenario:
    """A fleet, the policies to compare there, and what is done to the trace first."""

    fleet: FleetSettings
    policies: tuple[str, ...] = (*LEFT_ALONE, "kv")
    change: Callable[[Trace], Trace] = field(default=lambda trace: trace)
    dynamo: bool = False


SCENARIOS: Mapping[str, Scenario] = {
    "x1": Scenario(FLEET, FORMS, dynamo=True),
    "x4": Scenario(AT_X4, FORMS, dynamo=True),
    "x7": Scenario(replace(FLEET, speed=7.0), FORMS, dynamo=True),
    "no reuse": Scenario(FLEET, change=Trace.without_reuse),
    "one worker 3x slower": Scenario(replace(FLEET, slow={0: 3.0})),
    "a quarter of the cache": Scenario(replace(FLEET, core=core(BLOCKS // 4))),
    "32 workers, x16": Scenario(replace(FLEET, workers=32, speed=16.0)),
    "2 routers with sync, x4": Scenario(replace(AT_X4, routers=2)),
    "4 routers with sync, x4": Scenario(replace(AT_X4, routers=4)),
    "2 routers without, x4": Scenario(replace(AT_X4, routers=2, sync_s=None)),
    "4 routers without, x4": Scenario(replace(AT_X4, routers=4, sync_s=None)),
    "1 router, x4, spread": Scenario(AT_X4, change=spread),
    "4 routers with sync, x4, spread": Scenario(replace(AT_X4, routers=4), change=spread),
    "4 routers without, x4, spread": Scenario(
        replace(AT_X4, routers=4, sync_s=None), change=spread
    ),
}


def figures(result: Result) -> dict[str, float]:
    """What the table shows."""
    return {
        "reuse_percent": round(100 * result.reuse, 2),
        "ttft_mean_ms": round(result.ttft_ms.mean, 1),
        "ttft_p99_ms": round(result.ttft_ms.p99),
        "itl_mean_ms": round(result.itl_ms.mean, 2),
        "e2e_mean_ms": round(result.e2e_ms.mean),
    }


class Dynamo:
    """Dynamo's replay, in an interpreter that has it."""

    def __init__(self, python: str, trace: str) -> None:
        self._python = python
        self._trace = trace
        self.version: str | None = None
        """None if it is not installed."""

    def run(
        self, mode: str, router: Mapping[str, float], fleet: FleetSettings
    ) -> dict[str, float] | None:
        """The figures of one replay; None where it cannot run."""
        asked = {
            "mode": mode,
            "router": router,
            "trace": self._trace,
            "block_size": BLOCK_SIZE,
            "blocks": fleet.core.num_blocks - 1,
            "workers": fleet.workers,
            "speed": fleet.speed,
        }
        done = subprocess.run(
            [self._python, "-c", _DYNAMO_PROGRAM, json.dumps(asked)],
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )
        if done.returncode:
            print(f"dynamo: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return None
        said = json.loads(done.stdout.splitlines()[-1])
        self.version = said["version"]
        summary = said["summary"]
        return {
            "reuse_percent": round(100 * summary["prefix_cache_reused_ratio"], 2),
            "ttft_mean_ms": round(summary["mean_ttft_ms"], 1),
            "ttft_p99_ms": round(summary["p99_ttft_ms"]),
            "itl_mean_ms": round(summary["mean_tpot_ms"], 2),
            "e2e_mean_ms": round(summary["mean_e2e_latency_ms"]),
        }


def measure(trace: Trace, names: list[str], dynamo: Dynamo | None) -> dict[str, Any]:
    """The figures of each policy in each of these scenarios."""
    results: dict[str, Any] = {}
    for name in names:
        scenario = SCENARIOS[name]
        changed = scenario.change(trace)
        rows = results[name] = {}
        for spec in scenario.policies:
            rows[spec] = figures(replay(changed, policy_from(spec), scenario.fleet))
            show(name, spec, rows[spec])
        for spec, (mode, router) in DYNAMO.items() if scenario.dynamo and dynamo else ():
            found = dynamo.run(mode, router, scenario.fleet) if dynamo else None
            if found is not None:
                rows[spec] = found
                show(name, spec, found)
    return results


def show(scenario: str, spec: str, row: Mapping[str, float]) -> None:
    """One line on standard error."""
    print(
        f"{scenario:<32}{spec:<26}{row['reuse_percent']:>7.2f} %{row['ttft_mean_ms']:>8.1f} ms mean"
        f"{row['ttft_p99_ms']:>7.0f} p99{row['e2e_mean_ms']:>8.0f} e2e",
        file=sys.stderr,
        flush=True,
    )


def commit() -> str:
    """The commit that is measured."""
    command = ("git", "rev-parse", "--short", "HEAD")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Measure what is asked for and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, metavar="FILE", help="in the form of Mooncake's")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SCENARIOS,
        default=list(SCENARIOS),
        metavar="SCENARIO",
        help="of: " + "; ".join(SCENARIOS),
    )
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N")
    parser.add_argument("--dynamo-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.trace:
        trace = read_trace(options.trace)
    else:
        rng = Random(options.seed)
        trace = synthetic_trace("chat", requests=options.requests or 3000, rate=10.0, rng=rng)
    dynamo = None
    if options.trace and not options.requests:
        dynamo = Dynamo(options.dynamo_python, str(options.trace))
    if options.requests:
        trace = trace.first(options.requests)
    results = measure(trace, options.only, dynamo)
    about = {
        "commit": commit(),
        "seed": options.seed,
        "python": platform.python_version(),
        "ai-dynamo-runtime": dynamo.version if dynamo else None,
        "trace": trace.name,
        "requests": len(trace),
    }
    print(msgspec.json.format(json.dumps(about | {"results": results}), indent=2))


if __name__ == "__main__":
    main()
