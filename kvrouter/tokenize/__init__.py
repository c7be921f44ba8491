"""From a request body to the token ids that the engine will see."""

from kvrouter.tokenize.approximate import BytesTokenizer
from kvrouter.tokenize.backend import PromptTokenizer
from kvrouter.tokenize.choice import BackendSettings
from kvrouter.tokenize.content_format import ContentFormat
from kvrouter.tokenize.location import TokenizerError
from kvrouter.tokenize.pool import PoolSettings, PoolStats, TokenizerPool
from kvrouter.tokenize.remote import RemoteTokenizer
from kvrouter.tokenize.tokenizer import ModelTokenizer, blind

__all__ = [
    "BackendSettings",
    "BytesTokenizer",
    "ContentFormat",
    "ModelTokenizer",
    "PoolSettings",
    "PoolStats",
    "PromptTokenizer",
    "RemoteTokenizer",
    "TokenizerError",
    "TokenizerPool",
    "blind",
]
