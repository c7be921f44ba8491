"""`kvrouter serve`: the front door itself."""

import argparse
import asyncio
import errno
import logging
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import uvloop

from kvrouter.config import (
    Config,
    ConfigError,
    PolicyName,
    ServerConfig,
    parse_config,
    read_toml,
)
from kvrouter.heap import Heap
from kvrouter.nats_files import check_nats_files
from kvrouter.processes.running import Processes, processes
from kvrouter.processes.seat import Seat
from kvrouter.startup import StartError, raise_file_limit
from kvrouter.supervision import background, ended
from kvrouter.tls import ServerTls
from kvrouter.tokenizer_loading import check_chat_template
from kvrouter.wiring import Router, running

log = logging.getLogger(__name__)

FEW_FILES = 4096
"""Enough for two thousand streams."""

HEAP_TICK_S = 0.1

SWITCH_S = 0.0002
"""How long a thread may keep the interpreter while the event loop waits for it, a twenty-fifth of
Python's own setting. The threads are those that tokenize, and few; but each time that one of them
passes the interpreter on to another, the loop begins to wait anew. With 1 ms it waited 20 ms for
eight prompts of 128k tokens, with this 10; they took no longer."""

_EPILOG = """\
Each worker needs:   vllm serve MODEL --enable-prompt-tokens-details --kv-events-config
                     '{"enable_kv_cache_events": true, "publisher": "zmq",
                       "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
All else is learned from it. Flags win over the file of --config.
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `serve` to the command line."""
    parser = commands.add_parser(
        "serve",
        help="serve the OpenAI API in front of vLLM servers",
        description="Serve the OpenAI API in front of vLLM servers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--worker",
        action="append",
        metavar="URL",
        help="a vLLM server, http://host:port, or unix:/path where it has --uds; may be given "
        "many times",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR_OR_HUB_ID",
        help="where the models' tokenizer is (default: what each server names as its model's root)",
    )
    parser.add_argument(
        "--policy", choices=get_args(PolicyName), help="how a worker is chosen (default: kv)"
    )
    parser.add_argument("--host", help="address for clients (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port for clients (default: 8000)")
    parser.add_argument("--admin-host", help="address of the second port (default: 127.0.0.1)")
    parser.add_argument(
        "--admin-port", type=int, help="port for health, metrics, workers (default: 8001)"
    )
    parser.add_argument(
        "--nats",
        action="append",
        metavar="URL",
        help="a NATS server, to share the load with other routers; may be given many times",
    )
    parser.add_argument(
        "--discover",
        action="store_true",
        default=None,
        help="use the workers that `kvrouter relay` announces on NATS",
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="routers that serve the port together"
    )
    parser.add_argument("--seat", help=argparse.SUPPRESS)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a TOML file; `kvrouter settings` prints one"
    )
    parser.add_argument("--access-log", action="store_true", default=None, help="log each request")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status.

    Raises ConfigError, and StartError when an address cannot be bound.
    """
    logging.basicConfig(
        level=options.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    config = configuration(options)
    access_level = logging.INFO if config.server.access_log else logging.WARNING
    logging.getLogger("kvrouter.access").setLevel(access_level)
    if not (config.workers or config.nats.discover):
        raise ConfigError("workers: give at least one --worker URL, or [[workers]] in --config")
    check_nats_files(config.nats)
    check_chat_template(config.tokenizer)
    files = raise_file_limit()
    if files < FEW_FILES:
        log.warning("only %d open files are allowed: raise the limit with ulimit -n", files)
    sys.setswitchinterval(SWITCH_S)
    if options.seat is not None:
        return ended(uvloop.run(_serve(config, Seat.decode(options.seat))))
    if config.server.processes > 1:
        return uvloop.run(_keep(config, sys.argv[1:]))
    return ended(uvloop.run(_serve(config)))


def configuration(options: argparse.Namespace) -> Config:
    """The configuration from the file and the flags. Raises ConfigError."""
    tables = read_toml(options.config) if options.config else {}
    flags = {
        ("tokenizer", "path"): options.tokenizer,
        ("policy", "name"): options.policy,
        ("server", "host"): options.host,
        ("server", "port"): options.port,
        ("server", "admin_host"): options.admin_host,
        ("server", "admin_port"): options.admin_port,
        ("server", "access_log"): options.access_log,
        ("server", "processes"): options.processes,
        ("nats", "servers"): options.nats,
        ("nats", "discover"): options.discover,
    }
    for (section, field), value in flags.items():
        if value is not None:
            _section(tables, section)[field] = value
    if options.worker:
        tables["workers"] = [{"url": url} for url in options.worker]
    return parse_config(tables)


def _section(tables: dict[str, Any], name: str) -> dict[str, Any]:
    section = tables.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{name}: is a section, not a value")
    return section


async def _serve(config: Config, seat: Seat | None = None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        async with (
            running(config, seat) as router,
            background({"heap": partial(_freezing, router)}),
        ):
            if seat is not None:
                loop.add_reader(seat.alive, stop.set)
            loop.add_signal_handler(signal.SIGHUP, _reload, router.tls, router.admin_tls)
            if seat is None:
                _tell(config.server, router.port, router.admin_port)
            else:
                log.info("process %d serves", seat.number)
            await stop.wait()
            router.fleet.stopping = True
            if router.door.active_requests:
                log.info(
                    "stopping: %d requests may finish within %g s",
                    router.door.active_requests,
                    config.timeouts.shutdown_s,
                )
    except OSError as error:
        raise _cannot_listen(error) from error
    return 0


async def _freezing(router: Router) -> None:
    """Keep the garbage collector away from the index: here, as the heap is the process's."""
    heap = Heap()
    heap.start()
    while True:
        await asyncio.sleep(HEAP_TICK_S)
        heap.tick(sum(pool.index.stats().blocks for pool in router.fleet.pools.values()))


async def _keep(config: Config, arguments: Sequence[str]) -> int:
    """Keep several routers, each started with the same arguments."""
    loop = asyncio.get_running_loop()
    try:
        async with processes(config, arguments) as kept:
            supervisor = kept.supervisor
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, supervisor.stop)
            loop.add_signal_handler(signal.SIGHUP, _reload_all, kept)
            loop.add_signal_handler(signal.SIGUSR2, supervisor.roll)
            _tell(config.server, kept.port, kept.admin_port)
            return await supervisor.run()
    except OSError as error:
        raise _cannot_listen(error) from error


def _cannot_listen(error: OSError) -> StartError:
    taken = error.errno == errno.EADDRINUSE
    return StartError(f"cannot listen: {error}" + ("; choose another --port" if taken else ""))


def _tell(server: ServerConfig, port: int, admin_port: int) -> None:
    scheme = "http" if server.tls_cert is None else "https"
    log.info("clients: %s://%s:%d/v1", scheme, _in_url(server.host), port)
    if server.unix_socket is not None:
        log.info("clients: %s", server.unix_socket)
    admin_scheme = "http" if server.admin_tls_cert is None else "https"
    log.info("second port: %s://%s:%d", admin_scheme, _in_url(server.admin_host), admin_port)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _reload(*certificates: ServerTls | None) -> None:
    """Read again what may change while the router runs: the certificates of its ports."""
    if not any(certificates):
        log.info("SIGHUP: there is no certificate to read again")
    for certificate in filter(None, certificates):
        try:
            certificate.reload()
        except ConfigError as error:
            log.error("SIGHUP: the old certificate stays: %s", error)  # noqa: TRY400 - says it all
        else:
            log.info("SIGHUP: the certificate was read again: %s", certificate.path)


def _reload_all(kept: Processes) -> None:
    """The second port's certificate is the keeper's, that for clients the processes'."""
    if kept.admin_tls is not None:
        _reload(kept.admin_tls)
    kept.supervisor.signal_all(signal.SIGHUP)
