"""`kvrouter check`: whether a configuration file is right."""

import argparse
import sys
from pathlib import Path

from kvrouter.config import parse_config, read_toml, worker_name
from kvrouter.nats_files import check_nats_files
from kvrouter.policy import parameters_of
from kvrouter.tls import admin_tls, engine_tls, server_tls
from kvrouter.tokenizer_loading import check_chat_template

_OF_EACH_POLICY = {"name", "cpu_credit", "disk_credit"}


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `check` to the command line."""
    text = "check a configuration file without starting anything"
    parser = commands.add_parser("check", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check the file, and those that it names; returns 0 when all are right.

    Raises ConfigError.
    """
    given = read_toml(options.file)
    config = parse_config(given)
    server_tls(config.server)
    admin_tls(config.server)
    engine_tls(config.engine_tls)
    check_nats_files(config.nats)
    check_chat_template(config.tokenizer)
    names = ", ".join(worker_name(worker) for worker in config.workers) or "none"
    sys.stdout.write(f"{options.file} is right. Policy: {config.policy.name}; workers: {names}\n")
    weights = set(given.get("policy", {})) - _OF_EACH_POLICY
    for weight in sorted(weights - parameters_of(config.policy)):
        sys.stdout.write(f"policy.{weight}: {config.policy.name} does not go by it\n")
    return 0
