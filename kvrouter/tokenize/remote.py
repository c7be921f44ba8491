"""Prompts of models whose tokenizer only the engine has: its `/tokenize` is asked.

Each prompt costs the engine's front end as much as the request itself and comes back over HTTP, so
this is for models that the router can't tokenize. The answer is exact. An engine that does not
answer is left alone for a while, and so are the prompts when none does.
"""

import contextlib
import http.client
import itertools
import json
import logging
import socket
import ssl
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from random import Random
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvrouter.openai.body import Endpoint, RequestBody
from kvrouter.prompt import Fidelity, Prompt
from kvrouter.tokenize.backend import EncoderReport
from kvrouter.tokenize.given import as_ids, given_ids
from kvrouter.tokenize.messages import has_media
from kvrouter.tokenize.rests import Rests
from kvrouter.tokenize.tokenizer import CHATS, blind, by_length
from kvrouter.worker_url import socket_path

TIMEOUT_S = 4.0
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Of some ten million ids."""
_PATH = "/tokenize"
_OK = 200
_REFUSALS = (400, 413, 422)
_STUMBLE = 500
"""The engine is there, but not up to this prompt; whose fault that is nobody knows."""
_LOG = logging.getLogger(__name__)


class RemoteTokenizer:
    """Asks one of the model's engines, in turn. Blocking: for threads that may wait.

    `urls` gives those that can be asked now. `chat_problem` says why the last one that was asked
    did not answer, empty when it did.
    """

    speed = 0
    has_sample = False

    def __init__(
        self,
        model: str,
        urls: Callable[[], Sequence[str]],
        tls: ssl.SSLContext | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tls = tls
        self._clock = clock
        self._rests = Rests(Random(), question_s=TIMEOUT_S)
        self._model = model
        self._urls = urls
        self._turn = itertools.count()
        self._failed = 0
        self.chat_problem = ""

    @property
    def report(self) -> EncoderReport:
        """What encodes, for those who look."""
        resting = self._rests.resting(self._urls())
        return EncoderReport(
            "remote", "the engine's /tokenize", failed=self._failed, resting=resting
        )

    def check_sample(self) -> None:
        """The answer is the engine's own."""

    def known_prompt(
        self, request: RequestBody, *, namespace: bytes, new_chars: int
    ) -> Prompt | None:
        """Only the engine knows."""
        del request, namespace, new_chars
        return None

    def prompt(self, request: RequestBody, *, namespace: bytes = b"") -> Prompt:
        """Ask an engine. Blind when it refuses, by length when none answers."""
        ids = given_ids(request)
        if ids is not None:
            return Prompt(ids, namespace=namespace)
        question, doubts = _question(self._model, request)
        if question is None:
            return blind(request, "the engine can't be asked for this prompt")
        urls = self._urls()
        url = self._rests.choose(urls, next(self._turn), self._clock())
        if url is None:
            problem = self.chat_problem if urls else "no engine is ready"
            return by_length(request, f"no engine is asked: {problem}")
        try:
            ids = self._answer(url, question)
        except _RefusedError as error:
            self._failed += 1
            return blind(request, f"the engine's {_PATH} failed: {error}")
        except _UnansweredError as error:
            self._failed += 1
            problem = f"the engine's {_PATH} failed: {error}"[:200]
            self._note(problem)
            return by_length(request, problem)
        self._note("")
        fidelity = Fidelity.APPROXIMATE if doubts else Fidelity.EXACT
        return Prompt(ids, namespace=namespace, fidelity=fidelity, reason="; ".join(doubts))

    def _note(self, problem: str) -> None:
        if problem and not self.chat_problem:
            _LOG.warning("model %s: prompts are routed by load: %s", self._model, problem)
        self.chat_problem = problem

    def _answer(self, url: str, question: bytes) -> "array[int]":
        """Raises `_RefusedError` or `_UnansweredError`.

        The engine rests if it is not there for others either. What one prompt brings about must not
        cost those of other clients their answers.
        """
        asked_at = self._clock()
        try:
            ids = self._ask(url, question)
        except (_RefusedError, _UnansweredError):
            self._rests.answered(url)
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._rests.failed(url, asked_at, self._clock())
            raise _UnansweredError(str(error)) from error
        self._rests.answered(url)
        return ids

    def _ask(self, url: str, question: bytes) -> "array[int]":
        """Raises OSError, HTTPException or ValueError.

        For this prompt alone `_RefusedError` or `_UnansweredError`.
        """
        connection = _connection(url, self._tls)
        connection.connect()
        # The socket's own limit holds for each piece of an answer, of which there may be many.
        limit = threading.Timer(TIMEOUT_S, _cut_off, (connection.sock,))
        limit.daemon = True
        limit.start()
        try:
            connection.request("POST", _PATH, question, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read(_MAX_ANSWER_BYTES)
        finally:
            limit.cancel()
            connection.close()
        if response.status in _REFUSALS:
            raise _RefusedError(f"status {response.status}")
        if response.status == _STUMBLE:
            raise _UnansweredError(f"status {response.status}")
        if response.status != _OK:
            raise ValueError(f"status {response.status}")
        try:
            ids = as_ids(msgspec.json.decode(answer, type=_Answer).tokens)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"its answer is none: {error}") from error
        if ids is None:
            raise ValueError("no tokens in the answer")
        return ids


class _Answer(msgspec.Struct):
    tokens: list[Any]


class _RefusedError(ValueError):
    """The engine does not take this prompt."""


class _UnansweredError(Exception):
    """The engine did not answer."""


class _SocketConnection(http.client.HTTPConnection):
    """To a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Raises OSError."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


def _cut_off(connection: socket.socket) -> None:
    """End it from another thread: whoever reads from it gets an error, or the end."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # a TLS one's own says goodbye first


def _connection(url: str, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
    path = socket_path(url)
    if path is not None:
        return _SocketConnection(path)
    address = urlsplit(url)
    if address.scheme == "https":
        return http.client.HTTPSConnection(address.netloc, timeout=TIMEOUT_S, context=tls)
    return http.client.HTTPConnection(address.netloc, timeout=TIMEOUT_S)


def _question(model: str, request: RequestBody) -> tuple[bytes | None, list[str]]:
    """What to ask, None if that can't be said, and what makes the answer doubtful."""
    fields, doubts = _fields(request)
    if fields is None:
        return None, []
    try:
        return json.dumps({"model": model, **fields}).encode(), doubts
    except RecursionError:  # what reads bodies goes deeper
        return None, []


def _fields(request: RequestBody) -> tuple[dict[str, Any] | None, list[str]]:
    if request.endpoint is Endpoint.COMPLETIONS:
        prompt = request.prompt
        if not isinstance(prompt, str) or request.get("truncate_prompt_tokens") is not None:
            return None, []
        special = request.get("add_special_tokens") is not False
        return {"prompt": prompt, "add_special_tokens": special}, []
    chat = CHATS[request.endpoint](request)
    if has_media(chat.messages) or request.get("truncate_prompt_tokens") is not None:
        return None, []
    question = {
        "messages": chat.messages,
        "tools": chat.tools,
        "chat_template_kwargs": chat.variables,
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        "add_special_tokens": chat.add_special_tokens,
    }
    return {name: value for name, value in question.items() if value is not None}, chat.doubts
