"""`kvrouter settings`: all settings, with their defaults and meaning."""

import argparse
import sys

from kvrouter.config import Config
from kvrouter.settings import reference


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `settings` to the command line."""
    parser = commands.add_parser(
        "settings",
        help="print all settings of a configuration file, with defaults",
        description="Print a configuration file with all settings: their defaults, their meaning, "
        "what they may be. Keep what you change, and check it with `kvrouter check`.",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print them; returns 0."""
    del options
    sys.stdout.write(reference(Config))
    return 0
