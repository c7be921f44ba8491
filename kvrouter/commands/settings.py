"""`kvrouter settings`: all settings, with their defaults and meaning."""

import argparse
import sys

from kvrouter.config import Config
from kvrouter.settings import reference

_HEAD = """\
# All settings of `kvrouter serve --config FILE`, with their defaults. Behind `#` stands what has
# none. Keep what you change, and check it with `kvrouter check FILE`. Flags win over the file.

"""


def text() -> str:
    """The configuration file with all settings."""
    return _HEAD + reference(Config)


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
    sys.stdout.write(text())
    return 0
