"""Prompts of models whose tokenizer nobody has: four bytes of text are taken for a token.

Their blocks are never those that an engine reports. But equal beginnings get equal blocks, so what
was sent to a worker a moment ago is expected there, and the length is about right. All of it is
marked approximate.
"""

from array import array

from kvrouter.openai.body import Endpoint, RequestBody
from kvrouter.prompt import Fidelity, Prompt
from kvrouter.tokenize.backend import BYTES_PER_TOKEN, EncoderReport, estimated_tokens
from kvrouter.tokenize.given import given_ids

_REASON = f"{BYTES_PER_TOKEN} bytes are taken for a token"
_TEXT_FIELDS = {
    Endpoint.COMPLETIONS: ("prompt",),
    Endpoint.CHAT: ("tools", "messages"),
    Endpoint.RESPONSES: ("tools", "instructions", "input"),
    Endpoint.MESSAGES: ("tools", "system", "messages"),
}


class BytesTokenizer:
    """Takes the JSON of what a client says, as it came, for its text."""

    speed = 100
    has_sample = False

    def __init__(self, chat_problem: str) -> None:
        self.chat_problem = chat_problem

    @property
    def report(self) -> EncoderReport:
        """What encodes, for those who look."""
        return EncoderReport("bytes", self.chat_problem)

    def check_sample(self) -> None:
        """Nothing to compare with."""

    def known_prompt(
        self, request: RequestBody, *, namespace: bytes, new_chars: int
    ) -> Prompt | None:
        """Nothing of it has to be encoded."""
        del new_chars
        return self.prompt(request, namespace=namespace)

    def prompt(self, request: RequestBody, *, namespace: bytes = b"") -> Prompt:
        """An approximate prompt; exact where the client sent ids."""
        ids = given_ids(request)
        if ids is not None:
            return Prompt(ids, namespace=namespace)
        text = b"".join(map(request.raw, _TEXT_FIELDS[request.endpoint]))
        ids = array("I")
        ids.frombytes(text[: len(text) // BYTES_PER_TOKEN * BYTES_PER_TOKEN])
        return Prompt(
            ids,
            prompt_tokens=estimated_tokens(len(text)),
            namespace=namespace,
            fidelity=Fidelity.APPROXIMATE,
            reason=_REASON,
        )
