"""`kvrouter engine`: one simulated engine as a process of its own."""

import argparse
import asyncio
import signal
import sys
from typing import TYPE_CHECKING

import uvloop
import zmq

from kvrouter.arguments import port_number
from kvrouter.sim.server import SimServer
from kvrouter.sim.settings import CoreSettings, SettingsError, SimSettings
from kvrouter.sim.timing import LinearTiming
from kvrouter.tokenize import TokenizerError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  # has no public name

_DESCRIPTION = """\
Run a simulated engine: an OpenAI server that answers as `vllm serve` does, with made-up text, and
that batches requests, caches prefixes and publishes KV events as vLLM does. No GPU, no model.
"""
_EPILOG = """\
example: two engines for a router to try, with a tokenizer that the router finds by itself
  kvrouter engine --port 8101 --tokenizer DIR --kv-events-port 5557 --replay-port 5657
  kvrouter engine --port 8102 --tokenizer DIR --kv-events-port 5558 --replay-port 5658
Without one, 4 bytes are a token, and a router needs backend = "bytes" under [tokenizer].
"""


def add_command(subparsers: "Subparsers") -> None:
    """Add `engine` to the command line; its parser's default `run` is this module's `run`."""
    parser = subparsers.add_parser(
        "engine",
        help="run a simulated engine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    _add_serving(parser.add_argument_group("serving"))
    _add_cache(parser.add_argument_group("cache and scheduler"))
    _add_events(parser.add_argument_group("KV events"))
    _add_timing(parser.add_argument_group("timing"))


def run(args: argparse.Namespace) -> int:
    """Run the engine until SIGINT or SIGTERM; return the exit status."""
    try:
        settings = settings_from(args)
        uvloop.run(_serve(settings))
    except (SettingsError, TokenizerError, OSError, zmq.ZMQError) as error:
        sys.stderr.write(f"kvrouter engine: {error}\n")
        return 1
    return 0


def settings_from(args: argparse.Namespace) -> SimSettings:
    """Return the settings that the flags ask for; raises SettingsError."""
    max_model_len = args.max_model_len or min(
        CoreSettings.max_model_len, (args.num_blocks - 1) * args.block_size
    )
    return SimSettings(
        core=CoreSettings(
            block_size=args.block_size,
            num_blocks=args.num_blocks,
            max_num_seqs=args.max_num_seqs,
            max_batched_tokens=args.max_num_batched_tokens,
            max_model_len=max_model_len,
            hash_seed=args.hash_seed,
        ),
        timing=LinearTiming(
            base_s=args.step_ms / 1000,
            prefill_token_s=args.prefill_us_per_token / 1e6,
            decode_sequence_s=args.decode_us_per_sequence / 1e6,
        ),
        speed=args.speed,
        model=args.model,
        tokenizer=args.tokenizer,
        loras=tuple(args.lora),
        host=args.host,
        port=args.port or 0,
        uds=args.uds,
        kv_events_port=args.kv_events_port,
        replay_port=args.replay_port,
        topic=args.topic,
        dp_size=args.dp_size,
        api_key=args.api_key,
    )


async def _serve(settings: SimSettings) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    server = SimServer(settings, record=0)
    await server.start()
    try:
        sys.stdout.write(_ready_line(server))
        sys.stdout.flush()
        await stopped.wait()
    finally:
        await server.stop()


def _ready_line(server: SimServer) -> str:
    settings = server.settings
    core = settings.core
    tokens = settings.tokenizer or "4 bytes a token"
    events, replay = server.ranks[0].ports
    published = "none" if events is None else f"port {events}, replay {replay or 'none'}"
    return (
        f"simulated engine ready on {server.url}: model {settings.model} ({tokens}), "
        f"{settings.dp_size} x {core.num_blocks - 1} blocks of {core.block_size} tokens, "
        f"KV events: {published}\n"
    )


def _add_serving(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    where = group.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=port_number, help="port of the OpenAI server; 0: any")
    where.add_argument("--uds", metavar="PATH", help="a unix socket for it, instead of a port")
    group.add_argument("--model", default="sim", metavar="NAME", help="served name (%(default)s)")
    group.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="folder (or hub id) of the model's tokenizer (default: 4 bytes a token)",
    )
    group.add_argument(
        "--lora", action="append", default=[], metavar="NAME", help="serve this adapter too; repeat"
    )
    group.add_argument("--api-key", metavar="KEY", help="ask for this key on /v1 and the like")
    group.add_argument(
        "--dp-size", type=int, default=1, metavar="N", help="data-parallel ranks (%(default)s)"
    )


def _add_cache(group: argparse._ArgumentGroup) -> None:
    defaults = CoreSettings()
    for flag, default, text in (
        ("--block-size", defaults.block_size, "tokens in a block"),
        ("--num-blocks", defaults.num_blocks, "blocks of each rank; one is never used, as in vLLM"),
        ("--max-num-seqs", defaults.max_num_seqs, "requests that run at once"),
        ("--max-num-batched-tokens", defaults.max_batched_tokens, "tokens computed in one step"),
        ("--hash-seed", defaults.hash_seed, "engines with equal seeds name equal blocks alike"),
    ):
        group.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (%(default)s)"
        )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help=f"longest sequence in tokens (default: {defaults.max_model_len}, or what fits)",
    )


def _add_events(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-events-port",
        type=port_number,
        metavar="P",
        help="publish KV events; rank r uses P+r, on all interfaces as vLLM; 0: any, on loopback",
    )
    group.add_argument(
        "--replay-port",
        type=port_number,
        metavar="P",
        help="answer replay requests; rank r uses P+r",
    )
    group.add_argument("--topic", default="kv-events", help="topic of the events (%(default)s)")


def _add_timing(group: argparse._ArgumentGroup) -> None:
    defaults = LinearTiming()
    for flag, default, text in (
        ("--step-ms", defaults.base_s * 1e3, "each step takes this, in ms, and"),
        (
            "--prefill-us-per-token",
            defaults.prefill_token_s * 1e6,
            "this per prefill token, in us,",
        ),
        (
            "--decode-us-per-sequence",
            defaults.decode_sequence_s * 1e6,
            "and this per decoding request, in us",
        ),
    ):
        group.add_argument(
            flag, type=float, default=default, metavar="T", help=f"{text} (%(default)g)"
        )
    group.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="X",
        help="divide all times by X; inf: as fast as possible (%(default)g)",
    )
