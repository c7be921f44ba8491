"""What has to be true before anything of the router is imported."""

import contextlib
import importlib.util
import resource
import sys
from pathlib import Path

OWN_PACKAGES = ("events", "indexer")


def raise_file_limit() -> int:
    """Allow this process as many open files as it may have; returns how many.

    Every request holds two sockets, and the usual soft limit of 1024 is soon reached.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a hard limit above what the kernel allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return file_limit()


def file_limit() -> int:
    """How many open files this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


class StartError(Exception):
    """The router cannot start here; the message says what to do."""


def check_own_packages() -> None:
    """Check that `events` and `indexer` are the packages that came with this kvrouter.

    Their names are common, and another distribution that brings one of them may stand before ours
    on the path. Raises StartError then.
    """
    home = Path(__file__).resolve().parent.parent
    for name in OWN_PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None or origin.parent.parent != home:
            raise StartError(
                f"the package {name!r} is not kvrouter's own but {origin or 'missing'}: another "
                "distribution has the same name. Give kvrouter an environment of its own "
                "(pipx install kvrouter, or a new venv)"
            )
