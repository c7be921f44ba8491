"""The command line: `kvrouter COMMAND ...`."""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvrouter.startup import StartError, check_own_packages

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status (2: it could not start)."""
    if sys.stdout is None:  # closed by who started it: nobody wants the output
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as the process lives
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
        _write_no_more()
        return 1
    except OSError as error:
        if error.errno not in _FULL:
            raise
        sys.stderr.write(f"kvrouter: the output can't be written: {error.strerror}\n")
        _write_no_more()
        return 1
    else:
        return status


def _write_no_more() -> None:
    """What is still to be flushed goes nowhere, so that the end is no traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
