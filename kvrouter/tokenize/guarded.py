"""What the libraries that encode raise, as an error of ours.

They raise bare Exceptions, and those in Rust panic: pyo3 makes a BaseException of that, which
passes `except Exception` and would end a task, or a thread, that has nothing to do with it. This is
the one place that knows; what is not of a library passes.
"""

import asyncio
from array import array
from collections.abc import Sequence

from kvrouter.tokenize.backend import EncodeError, Library
from kvrouter.tokenize.time_limit import OverrunError

_SHOWN = 200
_NOT_OF_LIBRARIES = (
    *(KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, OverrunError),
)


def told(error: BaseException) -> str:
    """What a library says by this error, on one line; raises what is not of a library."""
    if isinstance(error, _NOT_OF_LIBRARIES):
        raise error
    said = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
    return said if isinstance(error, Exception) else f"it panicked: {said}"


class GuardedLibrary:
    """A library that raises nothing but `EncodeError`."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.name = library.name

    def encode(self, text: str) -> "array[int]":
        """See `Backend`."""
        try:
            return self._library.encode(text)
        except BaseException as error:
            raise self._error(error) from error

    def encode_each(self, texts: Sequence[str]) -> list[bytes]:
        """See `Library`."""
        try:
            return self._library.encode_each(texts)
        except BaseException as error:
            raise self._error(error) from error

    def _error(self, error: BaseException) -> EncodeError:
        message = f"{self.name} can't encode it: {told(error)}"
        return EncodeError(message, panicked=not isinstance(error, Exception))
