"""The files by which a router is known to NATS, looked at before anything starts.

The client reads them at each connection, and with one that is not what it should be it fails in
the oddest ways, or never returns.
"""

import ssl
from pathlib import Path

import nkeys  # type: ignore[import-untyped]  # it has no types

from events.nats_link import CREDENTIALS_JWT, CREDENTIALS_SEED
from kvrouter.config import ConfigError, NatsConfig
from kvrouter.tls import load_authorities, load_chain


def check_nats_files(nats: NatsConfig) -> None:
    """Raises ConfigError when one of the files cannot be read or is something else."""
    if nats.credentials is not None:
        text = _text("nats.credentials", nats.credentials)
        if CREDENTIALS_JWT not in text or CREDENTIALS_SEED not in text:
            raise ConfigError(
                f"nats.credentials: {nats.credentials}: is no .creds file: a JWT and a seed"
            )
    if nats.nkey_seed is not None:
        seed = _text("nats.nkey_seed", nats.nkey_seed).strip()
        try:
            nkeys.from_seed(bytearray(seed.encode())).wipe()
        except (nkeys.NkeysError, ValueError) as error:
            raise ConfigError(f"nats.nkey_seed: {nats.nkey_seed}: is no NKEY seed") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if nats.tls_ca is not None:
        load_authorities(context, "nats.tls_ca", nats.tls_ca)
    if nats.tls_cert is not None:
        load_chain(context, "nats.tls_cert", nats.tls_cert, nats.tls_key)


def _text(field: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError as error:
        raise ConfigError(f"{field}: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{field}: {path}: is no text") from error
