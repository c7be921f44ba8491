"""The commands of the command line, one module each."""

import argparse
import importlib.metadata
from collections.abc import Sequence

from kvrouter.commands import check, doctor, explain, relay, serve, settings
from kvrouter.config import ConfigError
from kvrouter.demo.command import add_command as add_demo_command
from kvrouter.replay.command import add_command as add_replay_command
from kvrouter.sim.command import add_engine_command
from kvrouter.startup import StartError

DESCRIPTION = """\
A front door for fleets of vLLM servers: sends each prompt to where its prefix is cached.

  kvrouter demo                                   see it work, without any GPU
  kvrouter serve --worker http://gpu1:8000 --worker http://gpu2:8000
"""


def run(arguments: Sequence[str] | None) -> int:
    """Parse the command line and run its command; returns the exit status.

    Raises StartError when the command cannot start.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ConfigError as error:
        raise StartError(f"the configuration cannot be used:\n{error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrouter",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = importlib.metadata.version("kvrouter")
    parser.add_argument("--version", action="version", version=f"kvrouter {version}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve.add_command(commands)
    relay.add_command(commands)
    add_demo_command(commands)
    add_engine_command(commands)
    add_replay_command(commands)
    settings.add_command(commands)
    check.add_command(commands)
    doctor.add_command(commands)
    explain.add_command(commands)
    return parser
