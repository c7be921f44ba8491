"""Tokenizers for tests: the recorded engine's, and small ones made on the spot."""

import json
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from support.captures import FOLDER

from kvrouter.openai.body import Endpoint, RequestBody, parse_body
from kvrouter.tokenize import ModelTokenizer
from kvrouter.tokenize.hf import HfBackend
from kvrouter.tokenize.template import RENDERING
from kvrouter.tokenize.time_limit import TimeLimit

TINY = FOLDER.parent / "tinymodel"


@cache
def tiny(*, parts: bool = False) -> ModelTokenizer:
    """The tiny model's tokenizer, with its own template or the one that loops over parts."""
    return ModelTokenizer.load(
        str(TINY), chat_template=TINY / "chat_template_parts.jinja" if parts else None
    )


def with_config(folder: Path, **config: Any) -> Path:
    """A folder with the tiny model's vocabulary and this `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def with_template(
    folder: Path, template: str, *, rendering: TimeLimit = RENDERING, **config: Any
) -> ModelTokenizer:
    """The tiny model's tokenizer with another chat template."""
    config["chat_template"] = template
    return ModelTokenizer.load(str(with_config(folder, **config)), rendering=rendering)


def request(kind: Endpoint = Endpoint.CHAT, /, **fields: Any) -> RequestBody:
    """A parsed request with these fields."""
    return parse_body(kind, json.dumps(fields).encode())


def said(text: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    """One message."""
    return {"role": role, "content": text, **more}


class Counted:
    """`tokenizers`, and what it was asked for."""

    name = "counted"

    def __init__(self, hf: HfBackend) -> None:
        self._hf = hf
        self.asked: list[str] = []

    def encode(self, text: str) -> "array[int]":
        """See `Backend`."""
        self.asked.append(text)
        return self._hf.encode(text)

    def encode_each(self, texts: Sequence[str]) -> list[bytes]:
        """See `Library`."""
        self.asked += texts
        return self._hf.encode_each(texts)
