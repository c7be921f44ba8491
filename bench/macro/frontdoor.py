"""What a front door costs: CPU per request and per streamed chunk, latency, memory.

    python bench/macro/frontdoor.py [--fronts kvrouter,nginx,...] [--rounds 3] [--json FILE]

Starts a trivial engine and, one after the other in several rounds, each front door that is
installed, all in this run: kvrouter with two policies, a bare aiohttp proxy, nginx, haproxy, and
the vllm-router and sglang-router commands. CPU is the user and system time of all processes of the
front door, from /proc, so that a busy machine costs accuracy but not fairness: per figure the
least of the rounds is reported. Wants `wrk`.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
START_S = 60.0
KEPT = 0.9
"""Of a rate: with less of it the clients were too slow to say anything."""
TOKENIZER = str(ROOT / "tests" / "data" / "tinymodel")

LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer none"
wrk.body = '{"model":"m","messages":[{"role":"user","content":"%s"}],"max_tokens":30}'
""" % ("Tell me more about it, please. " * 30)

NGINX = """
worker_processes 1; daemon off; pid {dir}/nginx.pid; error_log /dev/null;
events {{ worker_connections 8192; }}
http {{ access_log off; client_body_temp_path {dir}/b; proxy_temp_path {dir}/p;
  fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  upstream e {{ server 127.0.0.1:{engine}; keepalive 4096; }}
  server {{ listen 127.0.0.1:{port} backlog=4096; keepalive_requests 10000000;
    location / {{ proxy_pass http://e; proxy_http_version 1.1; proxy_buffering off;
      proxy_set_header Connection ""; }} }} }}
"""

HAPROXY = """
global
  nbthread 1
  maxconn 8000
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  http-reuse always
frontend f
  bind 127.0.0.1:{port}
  default_backend b
backend b
  server e 127.0.0.1:{engine}
"""


@dataclass
class Front:
    """A front door: how it is started, from its port, the engine's port and a folder of its own."""

    name: str
    command: Callable[[int, int, Path], list[str]]
    executable: str


def kvrouter(policy: str, *more: str) -> Callable[[int, int, Path], list[str]]:
    """Our own."""

    def command(port: int, engine: int, _folder: Path) -> list[str]:
        return [
            *(str(Path(sys.executable).parent / "kvrouter"), "serve", "--policy", policy),
            *("--worker", f"http://127.0.0.1:{engine}", "--port", str(port)),
            *("--admin-port", "0", "--log-level", "warning", *more),
        ]

    return command


def nginx(port: int, engine: int, folder: Path) -> list[str]:
    """One worker process, no buffering."""
    (folder / "nginx.conf").write_text(NGINX.format(dir=folder, port=port, engine=engine))
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def haproxy(port: int, engine: int, folder: Path) -> list[str]:
    """One thread."""
    (folder / "haproxy.cfg").write_text(HAPROXY.format(port=port, engine=engine))
    return ["haproxy", "-f", str(folder / "haproxy.cfg")]


def rust_router(executable: str) -> Callable[[int, int, Path], list[str]]:
    """vllm-router and sglang-router have one ancestor, and its flags."""

    def command(port: int, engine: int, _folder: Path) -> list[str]:
        launch = ["launch"] if executable == "sglang-router" else []
        return [
            *(executable, *launch, "--worker-urls", f"http://127.0.0.1:{engine}"),
            *("--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(free_port())),
        ]

    return command


def aiohttp_proxy(port: int, engine: int, _folder: Path) -> list[str]:
    """Bare."""
    return [sys.executable, str(HERE / "aiohttp_proxy.py"), str(port), f"http://127.0.0.1:{engine}"]


FRONTS = [
    Front("kvrouter round_robin", kvrouter("round_robin"), "sh"),
    Front("kvrouter kv", kvrouter("kv", "--tokenizer", TOKENIZER), "sh"),
    Front("vllm-router", rust_router("vllm-router"), "vllm-router"),
    Front("sglang-router", rust_router("sglang-router"), "sglang-router"),
    Front("aiohttp proxy", aiohttp_proxy, "sh"),
    Front("nginx", nginx, "nginx"),
    Front("haproxy", haproxy, "haproxy"),
]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which is gone afterwards."""
    started = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield started
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def wait_ready(port: int) -> None:
    """Until a chat is answered there. Raises TimeoutError."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    ends_at = time.monotonic() + START_S
    while time.monotonic() < ends_at:
        asked = HTTPConnection("127.0.0.1", port, timeout=5)
        headers = {"Content-Type": "application/json"}
        try:
            asked.request("POST", "/v1/chat/completions", body, headers)
            if asked.getresponse().status == 200:
                return
        except (OSError, HTTPException):
            pass
        finally:
            asked.close()
        time.sleep(0.1)
    raise TimeoutError(f"nothing answers on port {port}")


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += family(int(child))
    return found


def cpu_s(pids: list[int]) -> float:
    """User and system time so far."""
    total = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) * TICK_S
    return total


def rss_kb(pids: list[int]) -> int:
    """Resident memory now."""
    return sum(
        int(found[1])
        for pid in pids
        if (found := re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()))
    )


def wrk(port: int, seconds: float, connections: int, script: Path) -> dict[str, float]:
    """Requests as fast as they are answered."""
    output = subprocess.run(
        [
            *("wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--latency", "-s", str(script)),
            f"http://127.0.0.1:{port}/v1/chat/completions",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)", output)
    if failed:
        raise RuntimeError(f"{failed[1]} requests failed")
    found = re.search(r"(\d+) requests in", output)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", output)
    return {"requests": int(found[1]) if found else 0, "rate": float(rate[1]) if rate else 0.0}


def clients(script: str, port: int, **options: float) -> dict[str, Any]:
    """Run one of the load generators beside this file."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    output = subprocess.run(
        [sys.executable, str(HERE / script), str(port), *flags],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: dict[str, Any] = json.loads(output)
    return found


def measure_requests(port: int, pid: int, seconds: float, script: Path) -> dict[str, float | None]:
    """CPU per request under full load, and latency at a modest rate."""
    wrk(port, 1, 16, script)
    pids = family(pid)
    before = cpu_s(pids)
    seen = wrk(port, seconds, 16, script)
    used_s = cpu_s(pids) - before
    steady = clients("steady_clients.py", port, rate=1500, seconds=seconds)
    return {
        "cpu_us_per_request": used_s / seen["requests"] * 1e6,
        "requests_per_s": seen["rate"],
        "p50_ms": steady["p50_ms"],
        "p99_ms": steady["p99_ms"],
        "rss_mb": rss_kb(family(pid)) / 1024,
    }


def threads(pids: list[int]) -> list[int]:
    """All threads of these processes."""
    return [int(each.name) for pid in pids for each in Path(f"/proc/{pid}/task").iterdir()]


@contextmanager
def apart(front: int, engine: int) -> Iterator[bool]:
    """A core for the front door alone, another for engine and clients; False where there are none.

    Three busy processes on two cores wait for one another longer than for any front door.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= 1:
        yield False
        return
    others = [*threads(family(engine)), os.getpid()]  # children of ours inherit it
    for thread in threads(family(front)):
        os.sched_setaffinity(thread, cores[:1])
    for thread in others:
        os.sched_setaffinity(thread, cores[1:2])
    try:
        yield True
    finally:
        for thread in others:
            os.sched_setaffinity(thread, cores)


def measure_half_load(
    port: int, pid: int, engine: "Engine", seconds: float, script: Path
) -> dict[str, float | None]:
    """Latency at half of the load that a core can bear, and what of it asking the engine has not.

    Nothing where there are too few cores, or the clients can't ask so often.
    """
    with apart(pid, engine.pid) as placed:
        rate = wrk(port, seconds, 16, script)["rate"] / 2 if placed else 0.0
        if rate:
            direct = clients("steady_clients.py", engine.port, rate=rate, seconds=seconds)
            seen = clients("steady_clients.py", port, rate=rate, seconds=seconds)
    if not rate or min(direct["rate"], seen["rate"]) < KEPT * rate:
        return dict.fromkeys(HALF_LOAD)
    found = (rate, seen["p50_ms"], seen["p99_ms"], seen["p99_ms"] - direct["p99_ms"])
    return dict(zip(HALF_LOAD, found, strict=True))


HALF_LOAD = (
    "half_load_requests_per_s",
    "half_load_p50_ms",
    "half_load_p99_ms",
    "half_load_added_p99_ms",
)


def measure_streams(
    port: int, pid: int, seconds: float, count: int, pace_ms: float
) -> dict[str, float | None]:
    """CPU per chunk of paced streams, and how late chunks come."""
    pids = family(pid)
    rss_before = rss_kb(pids)
    started = subprocess.Popen(
        [
            *(sys.executable, str(HERE / "stream_clients.py"), str(port)),
            *(f"--clients={count}", f"--pace-ms={pace_ms}", f"--seconds={seconds + 1}"),
            *("--chunks=100000", "--warm-up=2"),
        ],
        stdout=subprocess.PIPE,
    )
    time.sleep(2 + count / 2000)
    before, began = cpu_s(pids), time.monotonic()
    time.sleep(seconds)
    used_s, took_s = cpu_s(pids) - before, time.monotonic() - began
    rss_after = rss_kb(pids)
    output, _ = started.communicate()
    seen = json.loads(output)
    chunks = seen["chunks"] / (seconds + 1) * took_s
    return {
        f"cpu_us_per_chunk_{count}": used_s / max(1.0, chunks) * 1e6,
        f"late_p50_ms_{count}": seen["late_p50_ms"],
        f"late_p99_ms_{count}": seen["late_p99_ms"],
        f"chunks_per_s_{count}": seen["chunks"] / (seconds + 1),
        f"rss_kb_per_stream_{count}": (rss_after - rss_before) / count,
    }


def merge(
    known: dict[str, float | None], found: dict[str, float | None]
) -> dict[str, float | None]:
    """The best of two rounds: the machine has other things to do at times.

    None is what a round did not see, as the latency of chunks that never came.
    """
    best = dict(known)
    for name, value in found.items():
        pick = max if name.startswith(("requests_per_s", "chunks_per_s")) else min
        seen = [each for each in (best.get(name), value) if each is not None]
        best[name] = pick(seen) if seen else None
    for name in HALF_LOAD:  # which belong together
        if name in found:
            best[name] = min((known, found), key=_added_ms).get(name)
    return best


def _added_ms(found: dict[str, float | None]) -> float:
    added_ms = found.get("half_load_added_p99_ms")
    return float("inf") if added_ms is None else added_ms


@dataclass
class Engine:
    """The trivial engine that all front doors have behind them."""

    port: int
    pid: int


def run(
    front: Front | None, engine: Engine, options: argparse.Namespace
) -> dict[str, float | None]:
    """Start one front door (None: go directly to the engine) and measure it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "post.lua"
        script.write_text(LUA)
        if front is None:
            return measure_requests(
                engine.port, os.getpid(), options.seconds, script
            ) | measure_streams(engine.port, os.getpid(), options.seconds, 256, 10)
        port = free_port()
        with process(front.command(port, engine.port, folder)) as started:
            wait_ready(port)
            found = measure_requests(port, started.pid, options.seconds, script)
            found |= measure_half_load(port, started.pid, engine, options.seconds, script)
            for count in options.streams:
                pace_ms = 10.0 if count <= 256 else 20.0
                found |= measure_streams(port, started.pid, options.seconds, count, pace_ms)
            return found


def commit() -> str:
    """The version of ours that was measured."""
    output = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    return output.stdout.strip()


def table(results: dict[str, dict[str, float | None]]) -> str:
    """The figures for people."""
    names = list(dict.fromkeys(name for found in results.values() for name in found))
    width = max(map(len, names))
    lines = [" " * width + "".join(f"{front[:20]:>22}" for front in results)]
    for name in names:
        cells = (found.get(name) for found in results.values())
        texts = ("-" if cell is None else f"{cell:.2f}" for cell in cells)
        lines.append(f"{name:<{width}}" + "".join(f"{text:>22}" for text in texts))
    return "\n".join(lines)


def main() -> None:
    """Measure all and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fronts", help="names, separated by commas (default: all installed)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--streams", type=int, nargs="*", default=[256])
    parser.add_argument("--no-direct", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("this needs wrk (apt-get install wrk)")
    wanted = options.fronts.split(",") if options.fronts else [each.name for each in FRONTS]
    fronts = [f for f in FRONTS if f.name in wanted and shutil.which(f.executable)]
    for missing in set(wanted) - {front.name for front in fronts}:
        print(f"not installed: {missing}", file=sys.stderr)
    port = free_port()
    results: dict[str, dict[str, float | None]] = {}
    with process([sys.executable, str(HERE / "trivial_engine.py"), str(port)]) as started:
        engine = Engine(port, started.pid)
        wait_ready(port)
        for number in range(options.rounds):
            for front in fronts if options.no_direct else [None, *fronts]:
                name = "direct" if front is None else front.name
                print(f"round {number + 1}: {name}", file=sys.stderr)
                results[name] = merge(results.get(name, {}), run(front, engine, options))
    results.get("direct", {}).pop("cpu_us_per_request", None)
    report = {
        "bench": "frontdoor",
        "commit": commit(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "rounds": options.rounds,
        "results": results,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))
    print(table(results))


if __name__ == "__main__":
    main()
