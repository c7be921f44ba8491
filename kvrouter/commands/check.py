"""`kvrouter check`: whether a configuration file is right."""

import argparse
import sys
from pathlib import Path

from kvrouter.config import parse_config, read_toml, worker_name


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `check` to the command line."""
    text = "check a configuration file without starting anything"
    parser = commands.add_parser("check", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check the file; returns 0 when it is right. Raises ConfigError."""
    config = parse_config(read_toml(options.file))
    names = ", ".join(worker_name(worker) for worker in config.workers) or "none"
    sys.stdout.write(f"{options.file} is right. Policy: {config.policy.name}; workers: {names}\n")
    return 0
