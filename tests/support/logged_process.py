"""A process of a test: its output goes to a file, and its whole group goes when it is stopped."""

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL_S = 0.2


class NotReadyError(Exception):
    """The process ended or was not ready in time; the message holds the end of its log."""


class LoggedProcess:
    """One command, restartable; `log` grows over restarts.

    Engines start children: the process leads a group of its own, and a signal goes to the group.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        ready_url: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.ready_url = ready_url
        self.log = log
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id; the process must have been started."""
        return self._started().pid

    def start(self) -> None:
        """Start it; returns at once, see `wait_ready`."""
        if self._process is not None:
            raise RuntimeError(f"{self.name} was started before and not stopped")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until `ready_url` answers 200; raises NotReadyError."""
        deadline_s = time.monotonic() + timeout_s
        while not _answers(self.ready_url):
            code = self._started().poll()
            if code is not None:
                raise NotReadyError(f"{self.name} ended with {code}:\n{self.log_tail()}")
            if time.monotonic() > deadline_s:
                raise NotReadyError(f"{self.name}: not ready in {timeout_s} s:\n{self.log_tail()}")
            time.sleep(POLL_S)

    def stop(self, timeout_s: float = 20.0) -> None:
        """Ask it to end, and kill what is left after the time; nothing happens if not started."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kill below does not ask
            self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to its whole group, as a container's end would; then it can be started again."""
        process = self._started()
        with contextlib.suppress(ProcessLookupError):  # all of the group has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None

    def log_tail(self, lines: int = 60) -> str:
        """The last lines of what it printed."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:  # noqa: S310 - our own http URLs
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
