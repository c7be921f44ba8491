"""What turns text into token ids, and what every backend shares."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvrouter.openai.body import RequestBody
from kvrouter.prompt import Prompt

BYTES_PER_TOKEN = 4
"""What a token is taken to cost where nothing better is known."""

ID_BYTES = 4
"""A token id in `encode_each`: a native uint32, as an item of `array("I")`."""


def estimated_tokens(size: int) -> int:
    """The tokens of a text, from its bytes alone; at least one."""
    return max(1, size // BYTES_PER_TOKEN)


class EncoderReport(NamedTuple):
    """Which encoder a model's prompts go through, for those who look."""

    name: str
    why: str
    checked: int = 0
    """Texts that were encoded by the reference too."""
    mismatched: int = 0
    """Of these, with other ids."""
    failed: int = 0
    """Texts that the encoder in use could not encode."""
    resting: int = 0
    """Engines that are not asked at present, because they did not answer."""


class PromptTokenizer(Protocol):
    """From requests for one model to prompts. It is used by several threads at once.

    `chat_problem` says what is wrong with chats, empty when nothing is. `speed` is how many times
    as fast as `tokenizers` it encodes new text, about; 0 where it waits for somebody's answer.
    """

    chat_problem: str

    @property
    def speed(self) -> float:
        """See above."""

    @property
    def report(self) -> EncoderReport:
        """What encodes."""

    @property
    def has_sample(self) -> bool:
        """Whether `check_sample` has something to do."""

    def check_sample(self) -> None:
        """Compare a sample with the reference: CPU work, at leisure."""

    def prompt(self, request: RequestBody, *, namespace: bytes = b"") -> Prompt:
        """Tokenize a request; never raises for what a client sent."""

    def known_prompt(
        self, request: RequestBody, *, namespace: bytes, new_chars: int
    ) -> Prompt | None:
        """The same where no more of its text than this has to be encoded; else None, soon.

        None too where that can't be said without encoding it.
        """


class EncodeError(Exception):
    """A text can't be encoded; says by what and why. `panicked`: the library may be broken now."""

    def __init__(self, message: str, *, panicked: bool = False) -> None:
        super().__init__(message)
        self.panicked = panicked


class TooMuchError(Exception):
    """More new text than is allowed."""


class Allowance:
    """How much new text may be encoded, in characters."""

    __slots__ = ("left",)

    def __init__(self, chars: int) -> None:
        self.left = chars

    def spend(self, chars: int) -> None:
        """So much is to be encoded now; raises `TooMuchError` when it may not."""
        self.left -= chars
        if self.left < 0:
            raise TooMuchError


class Backend(Protocol):
    """An encoder of one model. It is used by several threads at once."""

    @property
    def name(self) -> str:
        """Which library does it, for reports."""

    def encode(self, text: str) -> "array[int]":
        """The ids of a text, without what the tokenizer may add around it.

        Raises `EncodeError`; a library that is not guarded, anything.
        """


class SparingBackend(Backend, Protocol):
    """A backend that knows before it encodes how much of a text is new."""

    def encode(self, text: str, allowance: Allowance | None = None) -> "array[int]":
        """See `Backend`; raises `TooMuchError`."""


class Library(Backend, Protocol):
    """A backend that encodes many texts in one call; what the cache stands in front of."""

    def encode_each(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, `ID_BYTES` each."""


class Around(NamedTuple):
    """The ids that the tokenizer puts before and behind a text when special tokens are wanted."""

    before: "array[int]" = array("I")
    after: "array[int]" = array("I")

    def added_to(self, ids: "array[int]") -> "array[int]":
        """The ids with these around them."""
        return self.before + ids + self.after if self.before or self.after else ids

    def cut_and_added_to(self, ids: "array[int]", keep_last: int) -> "array[int]":
        """At most `keep_last` ids: the text is cut on the left, what is added stays."""
        room = max(0, keep_last - len(self.before) - len(self.after))
        return self.added_to(ids[-room:] if room else ids[:0])


NOTHING_AROUND = Around()
