"""What the demo's users ask: conversations about documents, several turns each. Pure.

Each conversation is about one of a few documents, which stands at its beginning, as a RAG service
or an agent would put it there. All documents together do not fit into one engine's cache, but
each fits well: whoever spreads the conversations blindly lets engines evict each other's work.
"""

from dataclasses import dataclass
from random import Random

_WORDS = (  # noqa: SIM905  # a list of words reads best as text
    "harbour ship anchor tide captain cargo crane ledger storm signal lantern compass chart rope "
    "sail deck engine bridge cable buoy channel pilot customs office invoice contract schedule "
    "delay repair inspection permit warehouse container berth gate route engineer report"
).split()

_QUESTIONS = (
    "What does the document say about the {word}?",
    "Who is responsible for the {word}, and since when?",
    "List the steps that concern the {word}.",
    "Is there a conflict between the {word} and the {other}?",
    "Summarize what has changed for the {word}.",
)


@dataclass(frozen=True)
class WorkloadSettings:
    """How much is asked. `document_words` are about 1.3 tokens each in the demo's tokenizer."""

    documents: int = 24
    document_words: int = 700
    conversations: int = 56
    turns: int = 3
    output_tokens: int = 16
    seed: int = 7


@dataclass(frozen=True)
class Conversation:
    """One user: the system message with the document, then the questions in turn."""

    system: str
    questions: tuple[str, ...]


def conversations(settings: WorkloadSettings) -> list[Conversation]:
    """All conversations, in the order in which they begin; the same for the same seed."""
    rng = Random(settings.seed)
    documents = [_document(rng, number, settings) for number in range(settings.documents)]
    return [
        Conversation(rng.choice(documents), tuple(_question(rng) for _ in range(settings.turns)))
        for _ in range(settings.conversations)
    ]


def _document(rng: Random, number: int, settings: WorkloadSettings) -> str:
    words = " ".join(rng.choice(_WORDS) for _ in range(settings.document_words))
    return f"Answer from this document only.\n\nDocument {number}: {words}."


def _question(rng: Random) -> str:
    return rng.choice(_QUESTIONS).format(word=rng.choice(_WORDS), other=rng.choice(_WORDS))
