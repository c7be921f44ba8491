"""Foreign Python code that has to end in time: a thread looks on, and raises in it what ends it.

A chat template is a program, of the model's author and with a client's values, and may loop for
ever. To count its steps would cost each chat that is well. So a thread looks now and then at what
runs; what it has seen for too long is ended by an exception that it raises there, which CPython
offers (`PyThreadState_SetAsyncExc`). Code that ends in time pays for two entries of a dictionary.

An exception comes between two instructions of Python. What one of them does (to double a text of
a gigabyte, say) is not cut short.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

LOOKS = 4
"""How often a call is seen running before it is ended."""

_WAIT_S = 0.001

P = ParamSpec("P")
T = TypeVar("T")


class OverrunError(BaseException):
    """The code ran too long. No `Exception`: foreign code may catch those."""


class _Run:
    """One call."""

    __slots__ = ("is_over", "is_told", "looks")

    def __init__(self) -> None:
        self.looks = 0
        """How often it was seen running."""
        self.is_over = False
        self.is_told = False
        """Whether the exception that ends it has been raised in its thread."""


class TimeLimit:
    """Ends calls that take longer than `limit_s`, by up to a quarter more. Thread-safe.

    Its thread begins with the first call and lives as long as the process.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._threads: dict[_Run, int] = {}
        """Where each call runs. Whoever takes a call out of here decides how it ends: who made
        it, that it has ended; who looks on, that the exception comes."""
        self._looker: threading.Thread | None = None

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it; raises `OverrunError` when that takes too long. Not from within such a call."""
        if self._looker is None:
            self._begin()
        run = _Run()
        self._threads[run] = threading.get_ident()
        try:
            return call(*args, **kwargs)
        finally:
            run.is_over = True
            if self._threads.pop(run, None) is None:
                _await_exception(run)

    def _begin(self) -> None:
        self._looker = threading.Thread(target=self._look_on, name="time limit", daemon=True)
        self._looker.start()

    def _look_on(self) -> None:
        told: dict[_Run, int] = {}
        while True:
            time.sleep(self.limit_s / LOOKS)
            for run, thread in told.items():
                self._watch_again(run, thread)
            told.clear()
            for run in list(self._threads):
                run.looks += 1
                if run.looks > LOOKS and (thread := self._threads.pop(run, 0)):
                    if not run.is_over:
                        _raise_in(thread)
                        told[run] = thread
                    run.is_told = True

    def _watch_again(self, run: _Run, thread: int) -> None:
        """Of a call that goes on: the exception may have come where it got lost.

        In a finalizer, in what the garbage collector calls, or in code that catches everything.
        """
        run.is_told = False
        self._threads[run] = thread
        if run.is_over:  # looked at behind the entry, as it is set before it is taken out
            self._threads.pop(run, None)
            run.is_told = True


def _await_exception(run: _Run) -> None:
    """Raise `OverrunError`, or let the exception that is on its way do so.

    It comes with the next few instructions after it was raised, or has come where it got lost.
    Later it would come to others.
    """
    while not run.is_told:
        time.sleep(_WAIT_S)
    time.sleep(_WAIT_S)
    raise OverrunError


def _raise_in(thread: int) -> None:
    """Replaces one that has not come yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(OverrunError)
    )
