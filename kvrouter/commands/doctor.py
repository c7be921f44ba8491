"""`kvrouter doctor`: whether a vLLM server has what exact routing needs."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from kvrouter.asking import Sessions
from kvrouter.config import Config, ConfigError, parse_config, read_toml, worker_name
from kvrouter.doctor import Examination, Verdict
from kvrouter.tls import engine_tls

TIMEOUT_S = 60.0


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `doctor` to the command line."""
    text = "check that workers have what exact routing needs, and say what is missing"
    parser = commands.add_parser("doctor", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("--worker", action="append", metavar="URL", help="a vLLM server; repeat")
    parser.add_argument("--config", type=Path, metavar="FILE", help="examine the workers of a file")
    parser.add_argument("--tokenizer", metavar="DIR_OR_HUB_ID", help="in place of the model's root")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Examine and print; returns 1 if there is a problem. Raises ConfigError."""
    tables: dict[str, Any] = read_toml(options.config) if options.config else {}
    if options.worker:
        tables["workers"] = [{"url": url} for url in options.worker]
    config = parse_config(tables)
    if not config.workers:
        raise ConfigError("workers: give at least one --worker URL, or a --config with [[workers]]")
    return asyncio.run(_examine(config, options.tokenizer or config.tokenizer.path))


async def _examine(config: Config, tokenizer: str | None) -> int:
    problems = 0
    async with Sessions(engine_tls(config.engine_tls), timeout_s=TIMEOUT_S) as sessions:
        for worker in config.workers:
            sys.stdout.write(f"{worker_name(worker)}\n")
            async for finding in Examination(worker, sessions.of(worker.url), tokenizer).run():
                sys.stdout.write(f"  {finding.verdict:<8} {finding.text}\n")
                sys.stdout.flush()
                problems += finding.verdict is Verdict.PROBLEM
    return 1 if problems else 0
