"""The commands of the command line, one module each."""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from kvrouter.config import ConfigError
from kvrouter.startup import StartError

DESCRIPTION = """\
A front door for fleets of vLLM servers: sends each prompt to where its prefix is cached.

  kvrouter demo                                   see it work, without any GPU
  kvrouter serve --worker http://gpu1:8000 --worker http://gpu2:8000
"""

MODULES = {
    "serve": "kvrouter.commands.serve",
    "relay": "kvrouter.commands.relay",
    "demo": "kvrouter.demo.command",
    "engine": "kvrouter.sim.command",
    "replay": "kvrouter.replay.command",
    "settings": "kvrouter.commands.settings",
    "check": "kvrouter.commands.check",
    "doctor": "kvrouter.commands.doctor",
    "explain": "kvrouter.commands.explain",
}
"""Imported only when needed: together they take a second."""


def run(arguments: Sequence[str] | None) -> int:
    """Parse the command line and run its command; returns the exit status.

    Raises StartError when the command cannot start.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser(arguments[0] if arguments else None).parse_args(arguments)
    try:
        return int(options.run(options))
    except ConfigError as error:
        raise StartError(f"the configuration cannot be used:\n{error}") from error


def _parser(named: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrouter",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = importlib.metadata.version("kvrouter")
    parser.add_argument("--version", action="version", version=f"kvrouter {version}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in [MODULES[named]] if named in MODULES else MODULES.values():
        importlib.import_module(module).add_command(commands)
    return parser
