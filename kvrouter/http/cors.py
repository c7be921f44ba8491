"""Pages of other origins that may call the front door from a browser (CORS). Pure.

Off unless origins are configured. A browser asks first (OPTIONS with the method and the headers
that it is about to send), and shows a page a response only if that names the page's origin.
"""

from collections.abc import Collection, Mapping, Sequence

from kvrouter.http.headers import Headers

ANY = "*"
MAX_AGE_S = 600
"""How long a browser need not ask again."""

_VARY = ("Vary", "Origin")


class Cors:
    """The rules for origins."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def admits(self, origin: str) -> bool:
        """Whether pages of this origin may call."""
        return ANY in self._origins or origin in self._origins

    def on_response(self, origin: str) -> Headers:
        """The headers of a response that let pages of this origin read it."""
        if not self._origins:
            return []
        if not self.admits(origin):
            return [_VARY]
        return [
            ("Access-Control-Allow-Origin", origin),
            ("Access-Control-Expose-Headers", ANY),
            _VARY,
        ]

    def on_preflight(self, fields: Mapping[str, str], methods: Sequence[str]) -> Headers:
        """The headers of the answer to a browser that asks whether it may call."""
        headers = [
            ("Access-Control-Allow-Methods", ", ".join(methods)),
            ("Access-Control-Max-Age", str(MAX_AGE_S)),
        ]
        asked = fields.get("access-control-request-headers")
        if asked:
            headers.append(("Access-Control-Allow-Headers", asked))
        return headers


def is_preflight(method: str, fields: Mapping[str, str]) -> bool:
    """Whether a request is a browser's question before the real one."""
    return method == "OPTIONS" and "origin" in fields and "access-control-request-method" in fields
