"""Libraries that raise, and libraries that panic, cost a text its ids and nothing else."""

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.tokenizers import request, said
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from kvrouter.openai.body import Endpoint
from kvrouter.prompt import Fidelity
from kvrouter.tokenize import BackendSettings, EncodingThreads, ModelTokenizer, ThreadSettings
from kvrouter.tokenize.backend import EncodeError
from kvrouter.tokenize.guarded import GuardedLibrary
from kvrouter.tokenize.ladder import Ladder


class Panic(BaseException):
    """As pyo3 makes it."""


class Raising:
    """A library that can't."""

    name = "raising"

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def encode(self, _text: str) -> "array[int]":
        raise self._error

    def encode_each(self, _texts: Sequence[str]) -> list[bytes]:
        raise self._error


def model(error: BaseException) -> ModelTokenizer:
    ladder = Ladder([GuardedLibrary(Raising(error))], "alone", check_every=0)
    return ModelTokenizer(ladder, {}, chat_problem="none is needed")


@pytest.mark.parametrize("error", [Panic("index out of\nbounds"), Exception("no token")])
def test_whatever_a_library_raises_says_that_it_can_not(error: BaseException) -> None:
    library = GuardedLibrary(Raising(error))
    with pytest.raises(EncodeError, match=r"raising can't encode it: .*(out of bounds|no token)"):
        library.encode("x")
    with pytest.raises(EncodeError) as caught:
        library.encode_each(["x"])
    assert caught.value.panicked == ("panicked" in str(caught.value)) == isinstance(error, Panic)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()])
def test_what_is_not_the_librarys_passes(error: BaseException) -> None:
    """Ctrl-C while a prompt is encoded on the loop."""
    with pytest.raises(type(error)):
        model(error).prompt(request(Endpoint.COMPLETIONS, prompt="hi"))


@pytest.mark.parametrize("inline_bytes", [0, 1000])
async def test_a_panic_is_a_reason_on_the_loop_and_in_a_thread(inline_bytes: int) -> None:
    """Else it would end the connection's task, or leave the one that waits for the thread."""
    threads = EncodingThreads(ThreadSettings(inline_bytes=inline_bytes))
    body = request(Endpoint.COMPLETIONS, prompt="hi")
    prompt = await threads.prompt(model(Panic("out of bounds")), body, block_sizes=[16])
    assert (prompt.fidelity, prompt.prompt_tokens) == (Fidelity.APPROXIMATE, body.size // 4)
    assert prompt.reason == "raising can't encode it: it panicked: out of bounds"
    threads.close()


WORDS = {"<s>": 0, "hello": 1, "world": 2}
LETTERS = [(letter, -9.0) for letter in "<s>helowrd"]
WITHOUT_UNKNOWN: dict[str, models.Model] = {
    "WordLevel": models.WordLevel(vocab=WORDS),
    "Unigram": models.Unigram([*((word, -1.0) for word in WORDS), *LETTERS]),
    "WordPiece": models.WordPiece(vocab=WORDS),
}


@pytest.mark.parametrize("kind", WITHOUT_UNKNOWN)
@pytest.mark.parametrize("backends", [None, BackendSettings()])
def test_a_model_without_a_token_for_what_it_does_not_know_encodes_what_it_knows(
    tmp_path: Path, kind: str, backends: BackendSettings | None
) -> None:
    """Its engine can't encode the others either."""
    tokenizer = Tokenizer(WITHOUT_UNKNOWN[kind])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    loaded = ModelTokenizer.load(str(tmp_path), backends=backends)
    known = loaded.prompt(request(Endpoint.COMPLETIONS, prompt="hello world"))
    assert (known.fidelity, list(known.token_ids)) == (Fidelity.EXACT, [0, 1, 2])
    body = request(messages=[said("hello moon")])
    unknown = loaded.prompt(body)
    assert (unknown.fidelity, unknown.prompt_tokens) == (Fidelity.APPROXIMATE, body.size // 4)
    assert "hf can't encode it" in unknown.reason
