"""Tokenizers in the shapes of real model families, trained small on the texts that ship with us.

What matters of a family is how it cuts text (normalizer, pre-tokenizer, kind of model, flags of
its special tokens); the vocabulary may be small.
"""

import json
from collections.abc import Callable
from functools import cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from kvrouter.tokenize import parity

VOCABULARY = 1500
UNKNOWN = "<unk>"
BYTES = pre_tokenizers.ByteLevel.alphabet()

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"
QWEN_2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"
)
CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{REST}"
)

Shape = Callable[[], Tokenizer]


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _plain_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _trained(tokenizer: Tokenizer, special: list[str], alphabet: list[str] | None = None) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(each, normalized=False, special=True) for each in special],
        initial_alphabet=alphabet or [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(), trainer)


@cache
def _training_texts() -> list[str]:
    return [text for text in parity.texts() if len(text) > 200][:80]


def _byte_bpe(pattern: str | None, *, nfc: bool = False, digits: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pattern == LLAMA_3))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        splits = [_split(pattern)]
        if digits:
            splits = [_split(r"\p{N}{1,3}"), _split(CJK), *splits]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, _plain_bytes()])
    tokenizer.decoder = decoders.ByteLevel()
    _trained(tokenizer, ["<|begin|>", "<|start|>", "<|end|>"], BYTES)
    return tokenizer


def gpt_2() -> Tokenizer:
    return _byte_bpe(None)


def llama_3() -> Tokenizer:
    tokenizer = _byte_bpe(LLAMA_3)
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="$A $B", special_tokens=[("<|begin|>", begin)]
    )
    return tokenizer


def qwen() -> Tokenizer:
    tokenizer = _byte_bpe(QWEN_2, nfc=True)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False, special=False)])
    return tokenizer


def o200k() -> Tokenizer:
    return _byte_bpe(O200K)


def deepseek() -> Tokenizer:
    return _byte_bpe(DEEPSEEK, digits=True)


def _sentence_bpe(normalizer: list[normalizers.Normalizer]) -> Tokenizer:
    """As SentencePiece makes them: a sign for the space, bytes where a character is unknown."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=UNKNOWN, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    _trained(tokenizer, [UNKNOWN, "<s>", "</s>", *tokens], ["▁"])
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]
    spec["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.normalizer = normalizers.Sequence(normalizer)
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="$A $B", special_tokens=[("<s>", begin)]
    )
    return tokenizer


def llama_2() -> Tokenizer:
    return _sentence_bpe([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def mistral() -> Tokenizer:
    tokenizer = _sentence_bpe([])
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def gemma() -> Tokenizer:
    tokenizer = _sentence_bpe([normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("▁▁", normalized=False)])
    return tokenizer


def nfkc_metaspace() -> Tokenizer:
    tokenizer = _sentence_bpe([normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    return tokenizer


def phi_3() -> Tokenizer:
    """Special tokens that swallow the white space behind them."""
    tokenizer = mistral()
    tokenizer.add_special_tokens([AddedToken("<|user|>", rstrip=True, normalized=False)])
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [UNKNOWN, "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(_training_texts(), trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in special[1:]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids
    )
    return tokenizer


SHAPES: dict[str, Shape] = {
    shape.__name__: shape
    for shape in (
        *(gpt_2, llama_3, qwen, o200k, deepseek),
        *(llama_2, mistral, gemma, nfkc_metaspace, phi_3, word_piece),
    )
}


@cache
def shaped(name: str) -> Tokenizer:
    """The tokenizer of a shape, trained once in each process."""
    return SHAPES[name]()
