"""Several routers before one fleet: what users see beside one router, with and without sharing.

    python bench/macro/replicas.py [--kinds agents rag code] [--seeds 4] [--sync-ms 1]

In virtual time, with the router's own scheduler, load accounting and replica protocol. First the
capacity is measured: how fast one router's fleet gets through the work when all of it is there at
once. The load is open loop at 80 % of that, the same requests for each number of routers; each
takes a router by chance. What one router decides the others know `--sync-ms` later.

The 99th percentile of one run rests on a hundredth of its requests, so means over seeds are given,
with the standard error of the ratio to one router. Prints one JSON object, a table on stderr.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
from dataclasses import replace

from kvrouter.config import PolicyConfig
from kvrouter.policy import build_policy
from kvrouter.replay.fleet import FleetSettings, replay
from kvrouter.replay.result import Result
from kvrouter.replay.synthetic import synthetic_trace
from kvrouter.replay.trace import Trace
from kvrouter.sim.settings import CoreSettings

WORKERS = 8
LOAD = 0.8
BLOCK_SIZE = 64
TRACE_RATE = 100.0
AT_ONCE = 1e4


def one_router(blocks: int) -> FleetSettings:
    """The fleet behind one router; each engine's cache has so many blocks."""
    core = CoreSettings(
        num_blocks=blocks + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=256,
        max_batched_tokens=8192,
        max_model_len=blocks * BLOCK_SIZE,
        reserve_prompt=False,
    )
    return FleetSettings(workers=WORKERS, core=core)


def trace_of(kind: str, requests: int, seed: int) -> Trace:
    """The work of one run; how fast it comes is the fleet's `speed`."""
    return synthetic_trace(kind, requests=requests, rate=TRACE_RATE, rng=random.Random(seed))


def run(trace: Trace, fleet: FleetSettings) -> Result:
    """One run under the default policy."""
    return replay(trace, build_policy(PolicyConfig()), fleet)


def capacity(kind: str, requests: int, one: FleetSettings) -> float:
    """Requests per second."""
    return requests / run(trace_of(kind, requests, 0), replace(one, speed=AT_ONCE)).span_s


def compare(kind: str, options: argparse.Namespace) -> dict[str, object]:
    """One router, several that share, several that do not."""
    one = one_router(options.blocks)
    rate = LOAD * capacity(kind, options.requests, one)
    several = replace(one, routers=options.routers, sync_s=options.sync_ms / 1000)
    fleets = {"one": one, "sharing": several, "alone": replace(several, sync_s=None)}
    results: dict[str, list[Result]] = {name: [] for name in fleets}
    for seed in range(1, options.seeds + 1):
        trace = trace_of(kind, options.requests, seed)
        speed = rate * trace.requests[-1].at_s / len(trace)
        for name, fleet in fleets.items():
            results[name].append(run(trace, replace(fleet, seed=seed, speed=speed)))
            sys.stderr.write(f"{kind} {seed} {name} {results[name][-1].ttft_ms}\n")
    figures = {name: _figures(found, results["one"]) for name, found in results.items()}
    return {"rate": round(rate, 1), **figures}


def _figures(found: list[Result], one: list[Result]) -> dict[str, float]:
    p99 = [a.ttft_ms.p99 / b.ttft_ms.p99 for a, b in zip(found, one, strict=True)]
    mean = [a.ttft_ms.mean / b.ttft_ms.mean for a, b in zip(found, one, strict=True)]
    error = statistics.stdev(p99) / len(p99) ** 0.5 if len(p99) > 1 else 0.0
    return {
        "reuse": round(statistics.fmean(each.reuse for each in found), 4),
        "ttft_mean_ms": round(statistics.fmean(each.ttft_ms.mean for each in found), 1),
        "ttft_p99_ms": round(statistics.fmean(each.ttft_ms.p99 for each in found), 1),
        "mean_ratio": round(statistics.fmean(mean), 3),
        "p99_ratio": round(statistics.fmean(p99), 3),
        "p99_ratio_error": round(error, 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", default=["agents", "rag", "code"])
    parser.add_argument("--routers", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=8192, help="of 64 tokens, in each cache")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--sync-ms", type=float, default=1.0)
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    results = {kind: compare(kind, options) for kind in options.kinds}
    about = {"commit": commit, "python": platform.python_version()} | vars(options)
    print(json.dumps(about | {"results": results}, indent=2))


if __name__ == "__main__":
    main()
