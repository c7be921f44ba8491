"""Known stretches of text: how far they are followed, when they are others, how much is kept."""

import json

import pytest
from support.shapes import shaped
from support.tokenizers import Counted

from kvrouter.tokenize import stretches
from kvrouter.tokenize.cuts import Cuts, cuts_of
from kvrouter.tokenize.hf import HfBackend
from kvrouter.tokenize.stretches import Part, StretchedBackend, Stretches

LENGTH = 100
WORDS = "all work and no play makes a dull text "


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "LONG", 4 * LENGTH)
    monkeypatch.setattr(stretches, "SHORT", LENGTH)


class Stretched:
    """A backend with all that a test wants to see of it."""

    def __init__(self, shape: str, max_bytes: int = 1_000_000) -> None:
        self.hf = HfBackend(shaped(shape))
        self.library = Counted(self.hf)
        cuts = cuts_of(json.loads(self.hf.spec))
        self.known = Stretches(max_bytes, cuts)
        self.backend = StretchedBackend(self.library, cuts, self.known)

    def encode(self, text: str) -> int:
        """Characters that had to be encoded; the ids are compared with the whole's."""
        before = sum(map(len, self.library.asked))
        assert self.backend.encode(text) == self.hf.encode(text)
        self.known.check()
        return sum(map(len, self.library.asked)) - before


def test_of_a_text_that_grows_only_the_end_is_encoded() -> None:
    stretched = Stretched("mistral")
    text = WORDS * 30
    assert stretched.encode(text) >= len(text)
    assert stretched.encode(text + "and one line more") < 2 * LENGTH


def test_a_text_that_parts_from_a_known_one_is_encoded_from_there() -> None:
    """A document that was edited, a chat that was taken up again."""
    stretched = Stretched("llama_3")
    text = WORDS * 30
    stretched.encode(text)
    at = len(text) // 2
    assert at <= stretched.encode(text[:at] + "x" + text[at:]) < at + 2 * LENGTH
    assert stretched.encode(text[:at] + "x" + text[at:]) < 2 * LENGTH


def test_the_same_text_elsewhere_is_another_one() -> None:
    """A prefix space is put before the first stretch only."""
    stretched = Stretched("mistral")
    stretched.encode(WORDS * 12)
    assert stretched.encode("<s>" + WORDS * 12) > len(WORDS) * 11


def test_short_texts_are_not_looked_up() -> None:
    stretched = Stretched("llama_3")
    for _ in range(2):
        assert stretched.encode(WORDS * 10) == len(WORDS) * 10
    assert stretched.known.size_bytes == 0


TOKENS = Cuts(None, {}, None, within=False, longest_token=5)


def remembered(known: Stretches, text: str, *parts: Part) -> None:
    known.remember(text, known.follow(text), parts)


def followed(known: Stretches, text: str) -> tuple[list[bytes], int]:
    found = known.follow(text)
    return [*found.long, *(part.ids for part in found.short)], found.end


def test_what_is_behind_a_stretch_belongs_to_it() -> None:
    """Its end was a cut because of what followed: a space and a letter, or a token's end."""
    known = Stretches(10_000, TOKENS)
    own, behind = "a" * 120, "<end>bc"
    remembered(known, own + behind, Part(120, b"ids!"))
    assert followed(known, own + behind + "d") == ([b"ids!"], 120)
    assert followed(known, own + "<end>b") == ([], 0)
    assert followed(known, own + "<end>bd") == ([], 0)
    assert followed(known, "b" + own[1:] + behind) == ([], 0)


def test_a_stretch_whose_follower_is_not_known_yet_is_not_kept() -> None:
    """The text may go on with what makes its last token another one."""
    known = Stretches(10_000, TOKENS)
    remembered(known, "a" * 120 + "<end>b", Part(120, b"ids!"))
    assert known.size_bytes == 0


def test_short_stretches_become_a_long_one() -> None:
    """A message that grows turn by turn."""
    known = Stretches(10_000, Cuts(None, {}, None, within=False))
    text = "".join(f"{number:099} " for number in range(6))
    for turns in range(1, 5):
        remembered(known, text[: turns * 100 + 50], Part(turns * 100, b"id%02d" % turns))
    found = known.follow(text)
    assert (found.long, found.long_end, found.short) == ([b"id01id02id03id04"], 400, [])
    found = known.follow(text[:350] + "x" * 100)
    assert [part.ids for part in found.short] == [b"id01", b"id02", b"id03"]
    known.check()


def test_texts_that_part_within_a_stretch_are_known_side_by_side() -> None:
    """A system prompt that names the user, and goes on in the same way for all."""
    stretched = Stretched("llama_3")
    texts = [f"you talk to user {number:03} and " + WORDS * 30 for number in range(20)]
    for text in texts:
        stretched.encode(text)
    for text in texts:
        assert stretched.encode(text) < 2 * LENGTH


@pytest.mark.parametrize("max_bytes", [0, 1000, 5000])
def test_memory_stays_within_its_bound(max_bytes: int) -> None:
    stretched = Stretched("gpt_2", max_bytes)
    for number in range(30):
        stretched.encode(f"text number {number} " + WORDS * 12)
    assert stretched.known.size_bytes <= max_bytes


def test_the_least_recently_used_goes_first() -> None:
    stretched = Stretched("gpt_2", 5000)
    kept = "kept " + WORDS * 12
    stretched.encode(kept)
    for number in range(20):
        stretched.encode(f"other {number} " + WORDS * 12)
        assert stretched.encode(kept) < 2 * LENGTH


def test_all_is_forgotten_when_asked() -> None:
    """What was met in the proof at start is of no use to clients."""
    stretched = Stretched("gpt_2")
    stretched.encode(WORDS * 12)
    stretched.known.clear()
    assert stretched.known.size_bytes == 0
    assert stretched.encode(WORDS * 12) >= len(WORDS) * 12
