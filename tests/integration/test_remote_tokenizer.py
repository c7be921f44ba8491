"""Asking an engine for the ids of a prompt, over HTTP."""

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvrouter.openai.body import BadBody, Endpoint, RequestBody, parse_body
from kvrouter.prompt import Fidelity
from kvrouter.tokenize import RemoteTokenizer
from kvrouter.tokenize.rests import FIRST_S, MAX_S


class Answers(BaseHTTPRequestHandler):
    """Answers with the server's status, and three tokens."""

    status = 200
    answer: object = {"tokens": [1, 2, 3]}

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        said = type(self).answer
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(type(self).status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def engine(handler: type[Answers]) -> Iterator[str]:
    """Its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Clock:
    """A clock that stands still."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def completion() -> RequestBody:
    return parse_body(Endpoint.COMPLETIONS, b'{"prompt": "Hello there"}')


def test_that_no_engine_tokenizes_is_told_once_and_until_one_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A proxy that lets `/tokenize` through to nobody: each prompt is routed by load."""

    class Engine(Answers):
        status = 404

    with engine(Engine) as url:
        clock = Clock()
        tokenizer = RemoteTokenizer("m", lambda: [url], clock=clock)
        for _ in range(3):
            assert tokenizer.prompt(completion()).fidelity is Fidelity.APPROXIMATE
            clock.now += 2 * MAX_S
        assert "404" in tokenizer.chat_problem
        (line,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert "404" in line.getMessage()
        Engine.status = 200
        assert list(tokenizer.prompt(completion()).token_ids) == [1, 2, 3]
        assert tokenizer.chat_problem == ""
        assert tokenizer.report.failed == 3


def test_a_prompt_that_an_engine_refuses_says_nothing_of_the_others() -> None:
    class Engine(Answers):
        status = 400

    with engine(Engine) as url:
        tokenizer = RemoteTokenizer("m", lambda: [url])
        assert tokenizer.prompt(completion()).fidelity is Fidelity.BLIND
        assert tokenizer.chat_problem == ""


@pytest.mark.parametrize(
    "said",
    [
        *([1, 2], None, "tokens", {}, {"tokens": None}, {"tokens": ["a"]}, {"tokens": [-1]}),
        *({"tokens": [2**40]}, b"", b"\xff", b"[" * 100_000, b'{"tokens": ' + b"[" * 100_000),
    ],
    ids=lambda said: repr(said)[:20],
)
def test_whatever_is_no_answer_is_a_reason(said: object) -> None:
    """Something else than vLLM may listen there."""

    class Engine(Answers):
        answer = said

    with engine(Engine) as url:
        tokenizer = RemoteTokenizer("m", lambda: [url])
        prompt = tokenizer.prompt(completion())
        assert (prompt.fidelity, prompt.prompt_tokens) == (Fidelity.APPROXIMATE, 6)
        assert "/tokenize failed" in prompt.reason
        assert tokenizer.report.resting == 1


def test_an_answer_that_drips_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece comes in time, and there is no end to them."""
    monkeypatch.setattr("kvrouter.tokenize.remote.TIMEOUT_S", 0.2)
    done = threading.Event()

    class Engine(Answers):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "1000000")
            self.end_headers()
            with contextlib.suppress(OSError):
                while not done.wait(0.02):
                    self.wfile.write(b" ")

    with engine(Engine) as url:
        tokenizer = RemoteTokenizer("m", lambda: [url])
        prompt = tokenizer.prompt(completion())
        done.set()
    assert prompt.fidelity is Fidelity.APPROXIMATE
    assert tokenizer.report.resting == 1


def test_a_question_that_json_cannot_hold_is_not_asked() -> None:
    """What reads bodies may go deeper than what writes questions."""

    def nested(deep: int) -> RequestBody:
        inner = b'{"a":' * deep + b"1" + b"}" * deep
        start = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": '
        return parse_body(Endpoint.CHAT, start + inner + b"}")

    deepest, body = 2000, None
    while body is None:
        with contextlib.suppress(BadBody):
            body = nested(deepest)
        deepest -= 1
    prompt = RemoteTokenizer("m", lambda: ["http://127.0.0.1:9"]).prompt(body)
    assert len(prompt.token_ids) == 0
    assert prompt.fidelity is not Fidelity.EXACT


def test_an_engine_that_does_not_answer_is_not_asked_by_each_prompt() -> None:
    """It hangs: else each prompt would wait for it, for seconds."""
    asked: list[int] = []

    class Engine(Answers):
        def do_POST(self) -> None:
            asked.append(self.client_address[1])
            if len(asked) > 1:
                super().do_POST()

    clock = Clock()
    with engine(Engine) as url:
        tokenizer = RemoteTokenizer("m", lambda: [url], clock=clock)
        for _ in range(3):
            prompt = tokenizer.prompt(completion())
            assert (prompt.fidelity, prompt.prompt_tokens) == (Fidelity.APPROXIMATE, 6)
            assert "/tokenize failed" in prompt.reason
        assert (len(asked), tokenizer.report.resting) == (1, 1)
        clock.now += 2 * FIRST_S
        assert list(tokenizer.prompt(completion()).token_ids) == [1, 2, 3]
        assert tokenizer.report.resting == 0


def test_a_prompt_at_which_the_engine_stumbles_costs_no_other_its_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stumbles(Answers):
        status = 500

    with engine(Stumbles) as url, caplog.at_level(logging.WARNING):
        tokenizer = RemoteTokenizer("m", lambda: [url], clock=Clock())
        for _ in range(2):
            prompt = tokenizer.prompt(completion())
            assert (prompt.fidelity, prompt.prompt_tokens) == (Fidelity.APPROXIMATE, 6)
            assert "status 500" in prompt.reason
        assert "status 500" in tokenizer.chat_problem
        Stumbles.status = 200
        assert list(tokenizer.prompt(completion()).token_ids) == [1, 2, 3]
    assert (tokenizer.report.failed, tokenizer.chat_problem) == (2, "")
    assert len(caplog.messages) == 1


def test_another_engine_is_asked_while_one_rests() -> None:
    class Broken(Answers):
        status = 502

    with engine(Broken) as broken, engine(Answers) as good:
        tokenizer = RemoteTokenizer("m", lambda: [broken, good], clock=Clock())
        fidelities = [tokenizer.prompt(completion()).fidelity for _ in range(4)]
    assert fidelities == [Fidelity.APPROXIMATE, *3 * [Fidelity.EXACT]]


def test_without_an_engine_nobody_is_asked() -> None:
    prompt = RemoteTokenizer("m", list).prompt(completion())
    assert (prompt.fidelity, prompt.reason) == (
        Fidelity.APPROXIMATE,
        "no engine is asked: no engine is ready",
    )
