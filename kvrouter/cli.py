"""The command line: `kvrouter COMMAND ...`."""

import os
import sys
from collections.abc import Sequence

from kvrouter.startup import StartError, check_own_packages


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status (2: it could not start)."""
    try:
        check_own_packages()
        # Only now, because these import the packages that were just checked.
        from kvrouter.commands import run  # noqa: PLC0415

        status = run(arguments)
        sys.stdout.flush()
    except StartError as error:
        sys.stderr.write(f"kvrouter: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read the output, as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1
    else:
        return status
