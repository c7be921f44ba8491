"""TLS of the two ports, with certificates that can change, and towards engines."""

import ssl
from functools import cache

from kvrouter.config import ConfigError, EngineTlsConfig, ServerConfig


class ServerTls:
    """A port's certificate. Connections that begin after `reload` get the new one.

    `prefix` is what the settings of the port begin with. Raises ConfigError when the files are not
    what they should be.
    """

    def __init__(
        self, cert: str, key: str | None, client_ca: str | None, *, prefix: str = "server.tls_"
    ) -> None:
        self._prefix = prefix
        self.path = cert
        self._key = key
        self._client_ca = client_ca
        self._current = self._load()
        self.context = self._load()
        """What to listen with. The authorities of clients stay those of the start."""
        self.context.sni_callback = self._choose  # called for each handshake, named or not

    def reload(self) -> None:
        """Read certificate and key again. Raises ConfigError; what was read before stays then."""
        self._current = self._load()

    def _choose(
        self,
        connection: ssl.SSLObject | ssl.SSLSocket,
        name: str | None,
        context: ssl.SSLContext,
    ) -> None:
        del name, context
        connection.context = self._current

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        load_chain(context, f"{self._prefix}cert", self.path, self._key)
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            load_authorities(context, f"{self._prefix}client_ca", self._client_ca)
        return context


def server_tls(server: ServerConfig) -> ServerTls | None:
    """What to listen for clients with, where TLS is configured. Raises ConfigError."""
    if server.tls_cert is None:
        return None
    return ServerTls(server.tls_cert, server.tls_key, server.tls_client_ca)


def admin_tls(server: ServerConfig) -> ServerTls | None:
    """What to listen with at the second port, where TLS is configured. Raises ConfigError."""
    if server.admin_tls_cert is None:
        return None
    files = server.admin_tls_cert, server.admin_tls_key, server.admin_tls_client_ca
    return ServerTls(*files, prefix="server.admin_tls_")


@cache
def engine_tls(config: EngineTlsConfig) -> ssl.SSLContext:
    """How `https` workers are spoken to. Raises ConfigError."""
    if config.ca is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authorities(context, "engine_tls.ca", config.ca)
    if config.cert is not None:
        load_chain(context, "engine_tls.cert", config.cert, config.key)
    return context


def load_chain(context: ssl.SSLContext, field: str, cert: str, key: str | None) -> None:
    """Take this certificate as ours. Raises ConfigError that names `field`."""
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:  # SSLError is one
        raise ConfigError(f"{field}: {cert} and its key: {_reason(error)}") from error


def load_authorities(context: ssl.SSLContext, field: str, path: str) -> None:
    """Trust those of this file. Raises ConfigError that names `field`."""
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigError(f"{field}: {path}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
