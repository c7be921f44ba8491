"""The cache of encoded pieces: what is encoded again, what is kept, how much."""

import json
from sys import getsizeof

import pytest
from support.shapes import shaped
from support.tokenizers import Counted

from kvrouter.tokenize.cuts import UNCUT, Cuts, cuts_of
from kvrouter.tokenize.hf import HfBackend
from kvrouter.tokenize.segments import PART, PIECE, CachedBackend, SegmentCache
from kvrouter.tokenize.stretches import SHORT, Stretches

WORDS = "all work and no play makes a dull text "


class Cached:
    """A cached backend with all that a test wants to see of it."""

    def __init__(self, shape: str, max_bytes: int = 1_000_000, cuts: Cuts | None = None) -> None:
        self.hf = HfBackend(shaped(shape))
        self.library = Counted(self.hf)
        self.cache = SegmentCache(max_bytes)
        rule = cuts_of(json.loads(self.hf.spec)) if cuts is None else cuts
        self.backend = CachedBackend(self.library, rule, self.cache, Stretches(max_bytes, rule))

    def encode(self, text: str) -> list[str]:
        """What had to be encoded for this text; its ids are compared with the whole's."""
        before = len(self.library.asked)
        assert self.backend.encode(text) == self.hf.encode(text)
        self.cache.check()
        return self.library.asked[before:]


def test_the_next_turn_of_a_chat_encodes_the_new_messages_only() -> None:
    cached = Cached("llama_3")
    first = "<|begin|><|start|>user<|end|>Hi there.<|end|>"
    assert cached.encode(first)
    answer = "<|start|>assistant<|end|>Hello!<|end|>"
    asked = cached.encode(first + answer)
    assert [text.removeprefix("<|begin|>") for text in asked] == ["assistant", "Hello!"]
    assert cached.encode(first + answer) == []


def test_a_long_text_that_grows_encodes_its_end_only() -> None:
    """A document with more behind it, a completion that goes on."""
    cached = Cached("mistral")
    text = "Document: " + WORDS * 200
    assert len(cached.encode(text)) > 5
    (end,) = cached.encode(text + "and one more line\n")
    assert end.endswith("and one more line\n")
    assert len(end) < PART + 100


def test_a_message_that_grows_line_by_line_encodes_no_more_than_a_part_of_what_was_known() -> None:
    """A short one, a long one, one that gets as long as a piece meanwhile."""
    cached = Cached("llama_3")
    text = ""
    for number in range(100):
        line = f"line {number} of it: {WORDS}\n"
        text += line
        asked = cached.encode(f"<|start|>{text}<|end|>\n")
        assert sum(map(len, asked)) < len(line) + PART + 100


def test_much_that_comes_behind_a_known_piece_is_cut_into_few_pieces() -> None:
    """A document that is added to a message."""
    cached = Cached("llama_3")
    start, document = WORDS * 5, WORDS * 200
    cached.encode(start)
    most = len(start + document) / PIECE + 2 * PIECE / PART
    assert len(cached.encode(start + document)) < most


def test_another_question_behind_a_document_encodes_its_own_piece_only() -> None:
    cached = Cached("gemma")
    document = WORDS * 100
    cached.encode(document + "Question: why is that so?")
    (end,) = cached.encode(document + "Question: who did that?")
    assert end.endswith("who did that?")


def test_what_begins_a_text_is_not_what_follows_a_token() -> None:
    """A prefix space is put before the first only."""
    cached = Cached("mistral")
    assert cached.encode("word") == ["word"]
    assert len(cached.encode("<s>word")) == 2
    assert cached.encode("word</s>word") == []


def test_a_stretch_that_follows_a_token_is_not_what_begins_a_text() -> None:
    """The same of a text too long to be followed by the piece."""
    cached = Cached("mistral")
    behind = WORDS * 60
    cached.encode("x" * (SHORT + 1) + "</s>" + behind)
    assert cached.encode(behind)


def test_kinds_without_a_rule_are_cut_at_special_tokens_only() -> None:
    cached = Cached("llama_2")
    text = "</s>" + WORDS * 100
    assert len(cached.encode(text)) == 2
    assert len(cached.encode(text + "x")) == 1


def test_what_must_not_be_cut_is_cached_as_a_whole() -> None:
    cached = Cached("llama_3", cuts=UNCUT)
    assert cached.encode("a<|end|>b") == ["a<|end|>b"]
    assert cached.encode("a<|end|>b") == []


@pytest.mark.parametrize("max_bytes", [0, 300, 3000])
def test_memory_stays_within_its_bound(max_bytes: int) -> None:
    cached = Cached("gpt_2", max_bytes)
    for number in range(60):
        cached.encode(f"text number {number} <|end|>" * 3)
    assert cached.cache.stats.bytes <= max_bytes


def test_a_character_that_others_encode_too_leaves_the_count_right() -> None:
    cache, character = SegmentCache(1000), "\x9f"
    before = getsizeof(character)
    cache.add([character], [b"1234"])
    HfBackend(shaped("word_piece")).encode(character)
    assert getsizeof(character) > before
    cache.check()


def test_the_least_recently_used_goes_first() -> None:
    cached = Cached("gpt_2", 1200)
    cached.encode("kept")
    for number in range(20):
        cached.encode(f"other {number}")
        assert cached.encode("kept") == []
    assert cached.encode("other 0") == ["other 0"]


def test_hits_and_misses_are_counted() -> None:
    cached = Cached("gpt_2")
    cached.encode("a<|end|>b")
    cached.encode("a<|end|>c")
    stats = cached.cache.stats
    assert (stats.hits, stats.misses, stats.entries) == (1, 3, 3)
    cached.cache.clear()
    assert cached.cache.stats.bytes == 0
