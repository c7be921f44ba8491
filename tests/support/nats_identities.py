"""Identities for a nats-server: NKEYs, and users of an operator with their .creds files."""

import base64
import hashlib
import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]  # it has no types


@dataclass
class Identity:
    """A key pair of a kind: nkeys.PREFIX_BYTE_USER and the like."""

    kind: int
    seed: bytes = b""
    keys: Any = field(init=False)

    def __post_init__(self) -> None:
        self.seed = nkeys.encode_seed(secrets.token_bytes(32), self.kind)
        self.keys = nkeys.from_seed(bytearray(self.seed))

    @property
    def public(self) -> str:
        return str(bytes(self.keys.public_key).decode()).rstrip("=")

    def write_seed(self, path: Path) -> str:
        path.write_bytes(self.seed)
        return str(path)

    def token_for(self, subject: str, nats: dict[str, Any]) -> str:
        """A JWT in which this identity vouches for `subject`."""
        claims = {"iss": self.public, "sub": subject, "iat": 1, "nats": {"version": 2} | nats}
        claims["jti"] = base64.b32encode(
            hashlib.sha256(json.dumps(claims).encode()).digest()
        ).decode()
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        signed = ".".join(_encoded(json.dumps(part).encode()) for part in (head, claims))
        return f"{signed}.{_encoded(self.keys.sign(signed.encode()))}"


class Operator:
    """An operator with one account, as a server's configuration, and users of that account."""

    def __init__(self) -> None:
        operator, self._account = (
            Identity(kind) for kind in (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT)
        )
        itself = operator.token_for(operator.public, {"type": "operator"})
        limits = {"subs": -1, "data": -1, "payload": -1, "conn": -1, "leaf": -1}
        account = operator.token_for(self._account.public, {"type": "account", "limits": limits})
        self.configuration = (
            f"operator: {itself}\nresolver: MEMORY\n"
            f"resolver_preload: {{ {self._account.public}: {account} }}\n"
        )

    def write_credentials(self, path: Path) -> str:
        """The .creds file of a new user."""
        user = Identity(nkeys.PREFIX_BYTE_USER)
        limits = {"subs": -1, "data": -1, "payload": -1}
        token = self._account.token_for(user.public, {"type": "user"} | limits)
        path.write_text(
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n"
            "------END USER NKEY SEED------\n"
        )
        return str(path)


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
