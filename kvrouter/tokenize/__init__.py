"""From a request body to the token ids that the engine will see."""

from kvrouter.tokenize.approximate import BytesTokenizer
from kvrouter.tokenize.backend import PromptTokenizer
from kvrouter.tokenize.choice import BackendSettings
from kvrouter.tokenize.content_format import ContentFormat
from kvrouter.tokenize.encoding_threads import EncodingThreads, ThreadSettings, ThreadStats
from kvrouter.tokenize.location import TokenizerError
from kvrouter.tokenize.remote import RemoteTokenizer
from kvrouter.tokenize.tokenizer import ModelTokenizer, blind, read_template

__all__ = [
    "BackendSettings",
    "BytesTokenizer",
    "ContentFormat",
    "EncodingThreads",
    "ModelTokenizer",
    "PromptTokenizer",
    "RemoteTokenizer",
    "ThreadSettings",
    "ThreadStats",
    "TokenizerError",
    "blind",
    "read_template",
]
