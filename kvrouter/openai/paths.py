"""Which paths exist at the front door, and what the router does with each.

Everything else an engine serves (its dev and admin routes above all) is not reachable from
outside, unless the configuration names it.
"""

import re
from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

from kvrouter.openai.body import Endpoint


class Handling(Enum):
    """What happens to a request."""

    BY_PREFIX = auto()
    """The prompt is tokenized, and the worker chosen with its blocks in view."""
    BY_LOAD = auto()
    """The worker is chosen by load alone."""
    BY_RESPONSE = auto()
    """The worker is the one that made the response named in the path."""
    MODELS = auto()
    """Answered by the router."""
    HEALTH = auto()
    """Answered by the router."""


class Path(NamedTuple):
    """A known path: its handling, and what the handling needs to know."""

    handling: Handling
    label: str
    """As a metric label: one of a closed set."""
    endpoint: Endpoint | None = None
    response_id: str | None = None


BY_PREFIX, BY_LOAD, BY_RESPONSE, MODELS, HEALTH = Handling
"""By names of their own: looking one up in its class costs as much as a call."""

OTHER = "other"
_A_RESPONSE = "/v1/responses/{id}"

_BY_LOAD = (
    "/v1/chat/completions/batch",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v2/rerank",
    "/v2/embed",
    "/inference/v1/generate",
    "/invocations",
    "/generative_scoring",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/tokenize",
    "/detokenize",
)

_METHODS = ("GET", "HEAD", "POST")

ON_THE_SECOND_PORT = frozenset(("/metrics", "/ready", "/workers", "/explain"))

_RESPONSE = re.compile(r"/v1/responses/([\w\-.]+)(/cancel)?")


class PathTable:
    """Maps (method, path) to its handling."""

    def __init__(self, extra_paths: Iterable[str] = ()) -> None:
        self._posts = {path: Path(BY_LOAD, path) for path in (*_BY_LOAD, *extra_paths)}
        for endpoint in Endpoint:
            self._posts[endpoint.value] = Path(BY_PREFIX, endpoint.value, endpoint)

    def find(self, method: str, path: str) -> Path | None:
        """What to do with the request, None where there is no such path."""
        if method == "POST" and (known := self._posts.get(path)):
            return known
        if method in ("GET", "HEAD"):
            if path == "/v1/models":
                return Path(MODELS, path)
            if path in ("/health", "/ping"):
                return Path(HEALTH, OTHER)
        return self._find_response(method, path)

    def methods(self, path: str) -> tuple[str, ...]:
        """The methods that a path has; none where there is no such path."""
        return tuple(method for method in _METHODS if self.find(method, path) is not None)

    def label(self, path: str) -> str:
        """The label of a path, whatever the method."""
        if path in self._posts or path == "/v1/models":
            return path
        return _A_RESPONSE if _RESPONSE.fullmatch(path) else OTHER

    def _find_response(self, method: str, path: str) -> Path | None:
        match = _RESPONSE.fullmatch(path)
        if match is None or method != ("POST" if match[2] else "GET"):
            return None
        return Path(BY_RESPONSE, _A_RESPONSE, response_id=match[1])
