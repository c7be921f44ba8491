"""From a request body to the token ids that the engine will see."""

from kvrouter.tokenize.location import TokenizerError
from kvrouter.tokenize.tokenizer import ModelTokenizer

__all__ = ["ModelTokenizer", "TokenizerError"]
