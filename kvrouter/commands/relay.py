"""`kvrouter relay`: an engine's KV events onto NATS."""

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import uvloop

from kvrouter.config import Config, ConfigError, parse_config, read_toml, worker_name
from kvrouter.nats_files import check_nats_files
from kvrouter.relay.wiring import relaying

log = logging.getLogger(__name__)


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `relay` to the command line."""
    text = "republish the KV events of vLLM servers on NATS; runs beside them"
    parser = commands.add_parser("relay", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument(
        "--engine",
        action="append",
        metavar="[NAME=]URL",
        help="a vLLM server, and the name by which routers know it if that is not its URL's host "
        "and port; may be given many times",
    )
    parser.add_argument(
        "--nats", action="append", metavar="URL", help="a NATS server; may be given many times"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with all settings")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Relay until SIGINT or SIGTERM; returns the exit status. Raises ConfigError."""
    logging.basicConfig(
        level=options.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    config = configuration(options)
    check_nats_files(config.nats)
    return uvloop.run(_relay(config))


def configuration(options: argparse.Namespace) -> Config:
    """The configuration from the file and the flags. Raises ConfigError."""
    tables = read_toml(options.config) if options.config else {}
    if options.engine:
        tables["workers"] = [_worker(engine) for engine in options.engine]
    if options.nats:
        tables["nats"] = {**tables.get("nats", {}), "servers": options.nats}
    config = parse_config(tables)
    if not config.workers:
        raise ConfigError("workers: give at least one --engine URL, or [[workers]] in --config")
    if not config.nats.servers:
        raise ConfigError("nats.servers: give at least one --nats URL, or [nats] in --config")
    return config


def _worker(engine: str) -> dict[str, str]:
    """The table of a worker that was given as `URL` or `NAME=URL`."""
    name, separator, url = engine.partition("=")
    if separator and "/" not in name:
        return {"name": name, "url": url}
    return {"url": engine}


async def _relay(config: Config) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with relaying(config):
        for worker in config.workers:
            log.info(
                "relaying %s as worker %s: routers must know it by this name",
                worker.url,
                worker_name(worker),
            )
        await stop.wait()
    return 0
