"""`kvrouter demo`: the main job in one go, without any GPU."""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence

import aiohttp

from kvrouter.arguments import port_number
from kvrouter.demo.measure import Result, Talk
from kvrouter.demo.processes import MODEL, engines, free_port, router
from kvrouter.demo.replicas import Site, show
from kvrouter.demo.workload import WorkloadSettings, conversations
from kvrouter.startup import StartError

ENGINES = 4
POLICIES = ("round_robin", "kv")

_EPILOG = """\
The engines are simulated: their text is made up and their time is a model, but their caches,
their batching and their KV events behave as recorded from a real vLLM.
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `demo` to the command line."""
    text = "see it work: four simulated engines, round robin against kv, or several routers"
    parser = commands.add_parser(
        "demo",
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--port", type=port_number, default=8000, help="port for clients (%(default)s)"
    )
    parser.add_argument(
        "--admin-port", type=port_number, default=8001, help="second port (%(default)s)"
    )
    parser.add_argument(
        "--conversations",
        type=int,
        default=WorkloadSettings.conversations,
        metavar="N",
        help="how many conversations of three turns (%(default)s)",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="show instead how N routers share what they know over NATS",
    )
    parser.add_argument(
        "--exit", action="store_true", help="end after the table, leave nothing running"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo; returns the exit status. Raises StartError when a process does not start."""
    if options.conversations < 1:
        raise StartError("--conversations must be at least 1")
    if options.replicas < 1:
        raise StartError("--replicas must be at least 1")
    try:
        asyncio.run(_demo(options) if options.replicas == 1 else _replicas_demo(options))
    except* aiohttp.ClientError as errors:
        raise StartError(f"a request of the demo failed: {errors.exceptions[0]!r}") from errors
    return 0


async def _replicas_demo(options: argparse.Namespace) -> None:
    async def linger(site: Site) -> None:
        if not options.exit:
            await _until_stopped(_replicas_invitation(site))

    await show(options.replicas, ENGINES, options.port, options.admin_port, _say, linger)


async def _until_stopped(invitation: str) -> None:
    """Leave everything running until Ctrl-C or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    _say(invitation)
    await stop.wait()
    _say("\nstopping\n")


async def _demo(options: argparse.Namespace) -> None:
    settings = WorkloadSettings(conversations=options.conversations)
    port, admin_port = free_port(options.port), free_port(options.admin_port)
    _say(
        f"{settings.conversations} conversations of {settings.turns} turns about "
        f"{settings.documents} documents, {ENGINES} simulated engines.\n"
        "Each engine's cache holds about half of the documents.\n\n"
    )
    results = []
    for policy in POLICIES:
        is_last = policy == POLICIES[-1]
        async with engines(ENGINES) as urls, router(urls, policy, port, admin_port):
            results.append(await _measure(policy, settings, port, admin_port))
            if is_last:
                _say(table(results))
                if not options.exit:
                    await _until_stopped(_invitation(port, admin_port))


async def _measure(policy: str, settings: WorkloadSettings, port: int, admin_port: int) -> Result:
    result = Result(policy)
    url, admin = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
    progress = _progress(policy, settings.conversations * settings.turns)
    talk = Talk(url, admin, result, settings.output_tokens, progress)
    await talk.have(conversations(settings))
    return result


def _progress(policy: str, total: int) -> Callable[[], None]:
    done = 0
    interactive = sys.stdout.isatty()

    def step() -> None:
        nonlocal done
        done += 1
        if interactive:
            bar = "#" * (30 * done // total)
            _say(f"\r{policy:<12} [{bar:<30}] {done}/{total}" + ("\n" if done == total else ""))
        elif done == total or done % max(1, total // 4) == 0:
            _say(f"{policy}: {done}/{total} requests\n")

    return step


def table(results: Sequence[Result]) -> str:
    """The comparison as text."""
    head = f"{'policy':<12} {'reuse':>7} {'TTFT p50':>10} {'TTFT p99':>10} {'took':>7}  "
    lines = ["", head + f"{'share per engine':<24} predicted = reported", "-" * 96]
    for result in results:
        total = sum(result.shares.values())
        shares = " ".join(
            f"{100 * count / total:>3.0f}%" for _, count in sorted(result.shares.items())
        )
        lines.append(
            f"{result.policy:<12} {100 * result.reuse:>6.1f}% "
            f"{1000 * result.ttft_percentile_s(50):>7.0f} ms "
            f"{1000 * result.ttft_percentile_s(99):>7.0f} ms {result.took_s:>5.1f} s  "
            f"{shares:<24} {result.equal} of {result.compared} responses"
        )
    return "\n".join([*lines, _NOTE])


_NOTE = """
reuse: prompt tokens that engines found in their caches. predicted = reported: responses for which
the router knew beforehand exactly how many tokens the engine would find (requests that run beside
each other may find, or lose, blocks that no event has told of yet).
"""


def _invitation(port: int, admin_port: int) -> str:
    return f"""
The router goes on serving. Try it from another terminal:

  curl -N http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{MODEL}", "stream": true, "max_tokens": 20,
         "messages": [{{"role": "user", "content": "Hello"}}]}}'

  curl http://127.0.0.1:{admin_port}/explain -d '{{"prompt": "Hello"}}'   where it would go, and why
  curl http://127.0.0.1:{admin_port}/workers       state of each engine
  curl http://127.0.0.1:{admin_port}/metrics       Prometheus metrics

Ctrl-C ends it.
"""


def _replicas_invitation(site: Site) -> str:
    routers = "\n".join(
        f"  router {number}   clients http://127.0.0.1:{port}/v1   "
        f"second port http://127.0.0.1:{admin_port}"
        for number, (port, admin_port) in enumerate(
            zip(site.ports, site.admin_ports, strict=True), 1
        )
    )
    return f"""
All go on serving. `replicas` in a router's GET /workers has what it knows of the others.

{routers}
  NATS       {site.nats.url}

Ctrl-C ends it.
"""


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(text)
        sys.stdout.flush()
