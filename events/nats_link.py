"""One connection to NATS that comes back: what is published on it, and who listens.

Every connection is a new client: what could not be sent is dropped and counted, not kept for later,
because everything here is numbered and asked for again, and news from before an outage are none.
The servers are tried in turn, those of the cluster that the first one tells of among them, with
pauses that grow and are spread by chance. Nothing here ever waits for NATS but `run`.
"""

import asyncio
import logging
import random
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias
from urllib.parse import unquote

import nats.errors
import nkeys  # type: ignore[import-untyped]  # it has no types
from nats.aio.client import Client, RawCredentials
from nats.aio.msg import Msg

from events.sparingly import TOLD_AT_ONCE, Sparingly

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 32 * 2**20
MAX_LEARNED = 64
"""Servers of the cluster that are remembered besides the given ones."""
_COMPLAIN_EVERY_S = 60.0

CREDENTIALS_JWT = "BEGIN NATS USER JWT"
CREDENTIALS_SEED = "BEGIN USER NKEY SEED"
"""What a .creds file has, each before a line with the thing itself."""


class Received(NamedTuple):
    """A message."""

    subject: str
    payload: bytes
    reply: str


Handler: TypeAlias = Callable[[Received], None]
"""Called on the event loop; must not block or raise."""


class Changed(Protocol):
    """Who wants to know when the connection comes and goes."""

    def __call__(self, *, connected: bool) -> None:
        """It has come, and all subscriptions stand; or it is gone."""


class _Login(NamedTuple):
    """Who we are to a server: user and password, or a token, or nobody."""

    user: str | None
    password: str | None
    token: str | None


class LinkState(StrEnum):
    """Whether there is a connection."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    LOST = "lost"


@dataclass(frozen=True)
class NatsSettings:
    """Where NATS is, who we are there, and how patient to be.

    `credentials` is a .creds file, `nkey_seed` a file with a seed. With any of the TLS files, or a
    tls:// server, the connection is encrypted or not made; the server's certificate is checked
    against `tls_ca` (or the system's authorities), and `tls_cert` with `tls_key` is ours.
    `servers` may have a user and password, or a token, before an `@`: percent-encoded, and of the
    first that has them where another one has none, as those have that the cluster tells of.
    `learn_servers`: also use the servers that the cluster tells of.
    """

    servers: tuple[str, ...]
    name: str = "kvrouter"
    user: str | None = None
    password: str | None = None
    token: str | None = None
    credentials: str | None = None
    nkey_seed: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    learn_servers: bool = True
    connect_timeout_s: float = 2.0
    retry_s: float = 0.2
    retry_max_s: float = 5.0
    ping_s: float = 3.0
    """A server that leaves two pings in a row unanswered is given up."""
    max_untaken: int = 65_536
    """Messages of one subscription that may wait to be taken; the client drops what is above."""


@dataclass
class LinkStats:
    """Counters since the start."""

    connects: int = 0
    failed_connects: int = 0
    unsent: int = 0
    slow: int = 0
    """Messages that the client dropped because we did not take them in time."""
    refused: int = 0
    """Subjects that the server does not allow us."""


@dataclass(eq=False)
class Subscription:
    """A subject that is listened to, on each connection anew."""

    subject: str
    handler: Handler
    ended: bool = False
    on_server: Any = field(default=None, repr=False)


_Todo: TypeAlias = tuple[str, bytes, str] | Subscription


class _Client(Client):
    """A client that sends nothing in the clear where it is to encrypt.

    The library goes by what the server says of itself, and anyone in its place may say that no
    encryption is needed, to be told the password. It also forgets no server that it was ever told
    of; `named` are those of the cluster that the server named last, and `learn` is called with each
    later word of it.
    """

    def __init__(self, *, must_encrypt: bool, learn: Callable[["_Client"], None]) -> None:
        super().__init__()
        self.named: list[str] = []
        self._must_encrypt = must_encrypt
        self._learn = learn

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if self._must_encrypt and initial_connection and not info.get("tls_required"):
            raise nats.errors.SecureConnRequiredError
        await super()._process_info(info, initial_connection)
        self.named = [str(address) for address in info.get("connect_urls") or ()]
        if not initial_connection:
            self._learn(self)

    async def _process_op_err(self, e: Exception) -> None:
        """The connection is lost.

        What waits to be sent goes nowhere: the library would try it nevertheless, and fail over
        that before it has closed anything or told anybody. Who waits for it to be sent would wait
        for ever, as the library ends the task that sends.
        """
        self._pending, self._pending_data_size = [], 0
        try:
            await super()._process_op_err(e)
        finally:
            while self._flush_queue is not None and not self._flush_queue.empty():
                sent = self._flush_queue.get_nowait()
                if not sent.done():
                    sent.set_result(None)


class NatsLink:
    """A connection to one of several servers."""

    def __init__(self, settings: NatsSettings) -> None:
        self.stats = LinkStats()
        self.state = LinkState.CONNECTING
        self.state_since = time.time()
        self.problem = ""
        self._cause: Exception | None = None  # of a failed connect, where the library tells of it
        self.server = ""
        self.max_payload = 2**20
        self._settings = settings
        self._servers = deque(map(_without_login, settings.servers))
        self._given = frozenset(map(_address, settings.servers))
        self._logins = _logins(settings.servers)
        given = _Login(settings.user, settings.password, settings.token)
        self._usual_login = next(iter(self._logins.values()), given)
        self._tls = _tls(settings)
        self._subscriptions: dict[Subscription, None] = {}
        self._watchers: list[Changed] = []
        self._todo: deque[_Todo] = deque()
        self._unsent_bytes = 0
        self._wake = asyncio.Event()
        self._lost = asyncio.Event()
        self._is_sent_away = False
        self._refusals = Sparingly(_COMPLAIN_EVERY_S, burst=TOLD_AT_ONCE)
        self._failures = Sparingly(_COMPLAIN_EVERY_S, burst=TOLD_AT_ONCE)
        self._excesses = Sparingly(_COMPLAIN_EVERY_S)

    @property
    def is_connected(self) -> bool:
        """Whether what is published now is sent."""
        return self.state is LinkState.CONNECTED

    def watch(self, changed: Changed) -> None:
        """Call this when the connection comes and goes."""
        self._watchers.append(changed)

    def unwatch(self, changed: Changed) -> None:
        """Call it no more."""
        self._watchers.remove(changed)

    def publish(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """Send soon. False, and nothing is sent, without a connection or room."""
        if not self.is_connected or self._unsent_bytes > MAX_UNSENT_BYTES:
            self.stats.unsent += 1
            return False
        self._todo.append((subject, payload, reply))
        self._unsent_bytes += len(payload)
        self._wake.set()
        return True

    def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Listen to a subject from now on; in order with what is published."""
        subscription = Subscription(subject, handler)
        self._subscriptions[subscription] = None
        self._todo.append(subscription)
        self._wake.set()
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Listen no more. Again: no effect."""
        if subscription.ended:
            return
        subscription.ended = True
        self._subscriptions.pop(subscription, None)
        self._todo.append(subscription)
        self._wake.set()

    # The connection

    async def run(self) -> None:
        """Be connected, again and again, until cancelled."""
        pause_s = self._settings.retry_s
        while True:
            client = await self._connect()
            _heed_cancellation()
            if client is not None:
                pause_s = self._settings.retry_s
                await self._serve(client)
                _heed_cancellation()
            else:
                pause_s = min(2 * pause_s, self._settings.retry_max_s)
            # Spread, so that the routers of a fleet don't come back all at once.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _connect(self) -> _Client | None:
        """A client of the next server; None if that one does not have us."""
        self._servers.rotate(-1)
        server = self._servers[-1]
        must_encrypt = self._tls is not None or server.startswith("tls://")
        client = _Client(must_encrypt=must_encrypt, learn=self._learn_servers)
        settings = self._settings
        login = self._logins.get(server, self._usual_login)

        self._lost.clear()
        self._is_sent_away = False
        self._cause = None
        try:
            await client.connect(
                servers=[server],
                name=settings.name,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=settings.connect_timeout_s,  # type: ignore[arg-type]  # any number will do
                ping_interval=settings.ping_s,  # type: ignore[arg-type]  # likewise
                user=login.user,
                password=login.password,
                token=login.token,
                user_credentials=_credentials(settings.credentials),
                nkeys_seed=settings.nkey_seed,
                tls=self._tls,
                error_cb=self._failed,
                disconnected_cb=self._gone,
                closed_cb=self._gone,
                lame_duck_mode_cb=self._sent_away,
                skip_subject_validation=True,
            )
        except (OSError, TimeoutError, nats.errors.Error, nkeys.NkeysError, ValueError) as error:
            self._cannot_connect(server, client.last_error or error)
            await _closed(client)
            return None
        self.server = server
        self.max_payload = client.max_payload
        return client

    def _cannot_connect(self, server: str, error: Exception) -> None:
        self.stats.failed_connects += 1
        if isinstance(error, nats.errors.NoServersError):  # as is true after any failure
            error = self._cause or error
        problem = f"{server}: {_words(error)}"
        # Of several servers that are all gone each has a problem of its own, again and again.
        if problem != self.problem and self._failures.due(time.monotonic()):
            log.warning("no connection to NATS: %s", problem)
        self.problem = problem

    async def _sent_away(self) -> None:
        self._is_sent_away = True
        await self._gone()

    async def _gone(self) -> None:
        self._lost.set()
        self._wake.set()

    async def _failed(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.stats.slow += 1
        elif "permissions violation" in str(error).lower():
            self.stats.refused += 1
            times = self._refusals.due(time.monotonic())
            if times:
                log.warning("NATS: %s (%d such since the last line)", error, times)
            self.problem = str(error)
        else:
            self._cause = error
            log.debug("NATS: %r", error)

    async def _serve(self, client: _Client) -> None:
        """Send and listen on a connection until it is gone."""
        try:
            self._todo.clear()
            self._unsent_bytes = 0
            for subscription in list(self._subscriptions):
                await self._subscribe_on(client, subscription)
            await client.flush(timeout=round(max(1.0, self._settings.connect_timeout_s)))
            self._learn_servers(client)
            self.stats.connects += 1
            self.problem = ""
            self._change(LinkState.CONNECTED)
            while not self._lost.is_set():
                await self._send(client)
                _heed_cancellation()
                self._wake.clear()
                if not self._todo and not self._lost.is_set():
                    await self._wake.wait()
            self.problem = f"{self.server}: {self._why_lost(client)}"
        except (OSError, TimeoutError, nats.errors.Error) as error:
            self.problem = f"{self.server}: {_words(error)}"
        except asyncio.CancelledError:
            self.problem = ""
            await self._say_last_words(client)
            raise
        finally:
            for subscription in self._subscriptions:
                subscription.on_server = None
            self._change(LinkState.LOST)
            await _closed(client)

    def _why_lost(self, client: Client) -> str:
        if self._is_sent_away:
            return "the server is about to stop"
        error = client.last_error
        return "the server has closed the connection" if error is None else _words(error)

    async def _say_last_words(self, client: Client) -> None:
        try:
            async with asyncio.timeout(1.0):
                await self._send(client)
                await client.flush(timeout=1)
        except (OSError, TimeoutError, nats.errors.Error):
            pass

    def _change(self, state: LinkState) -> None:
        if self.state is state:
            return
        self.state, self.state_since = state, time.time()
        level = logging.WARNING if self.problem else logging.INFO  # none where we are to stop
        log.log(level, "NATS %s: %s", state, self.problem or self.server)
        for changed in list(self._watchers):
            changed(connected=state is LinkState.CONNECTED)

    def _learn_servers(self, client: _Client) -> None:
        """The other servers of the cluster; they encrypt if the one does that tells of them.

        They take the place of those that were learned before, unless there are none: a server that
        has lost all others tells of none, and when it is lost, too, they may be back.
        """
        current = self._servers[-1]
        others = set(client.named[:MAX_LEARNED]) - {_address(current)}
        if not self._settings.learn_servers or not others:
            return
        named = others - self._given
        scheme = current.partition("://")[0]
        kept = [
            server
            for server in self._servers
            if server == current or _address(server) in self._given | others
        ]
        new = named - set(map(_address, kept))
        self._servers = deque([*(f"{scheme}://{address}" for address in new), *kept])

    async def _send(self, client: Client) -> None:
        while self._todo:
            todo = self._todo.popleft()
            if isinstance(todo, Subscription):
                await self._subscribe_on(client, todo)
            else:
                subject, payload, reply = todo
                self._unsent_bytes -= len(payload)
                if len(payload) > client.max_payload:
                    self._leave_out(subject, len(payload), client.max_payload)
                else:
                    await client.publish(subject, payload, reply=reply)

    def _leave_out(self, subject: str, size: int, limit: int) -> None:
        """The server would end the connection for it, and the next one too: it is asked again."""
        self.stats.unsent += 1
        times = self._excesses.due(time.monotonic())
        if times:
            log.warning(
                "NATS: not sent: %d bytes for %s, but max_payload of %s is %d; 1 MB, its usual "
                "value, is enough (%d such since the last line)",
                size,
                subject,
                self.server,
                limit,
                times,
            )

    async def _subscribe_on(self, client: Client, subscription: Subscription) -> None:
        if subscription.ended:
            if subscription.on_server is not None:
                await subscription.on_server.unsubscribe()
                subscription.on_server = None
            return
        if subscription.on_server is not None:
            return
        handler = subscription.handler

        async def take(message: Msg) -> None:
            if not subscription.ended:
                handler(Received(message.subject, message.data, message.reply))

        subscription.on_server = await client.subscribe(
            subscription.subject, cb=take, pending_msgs_limit=self._settings.max_untaken
        )


def _heed_cancellation() -> None:
    """Raise CancelledError if this task is cancelled.

    The library may have swallowed it (its flush does, and `asyncio.wait_for` of Python 3.11).
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _closed(client: Client) -> None:
    try:
        async with asyncio.timeout(1.0):
            await client.close()
    except (OSError, TimeoutError, nats.errors.Error):
        pass
    except AssertionError:
        pass  # the library's word for: it had not even begun, as without a readable seed


def _tls(settings: NatsSettings) -> ssl.SSLContext | None:
    if not (settings.tls_ca or settings.tls_cert):
        return None
    context = ssl.create_default_context(cafile=settings.tls_ca)
    if settings.tls_cert:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    return context


def _credentials(path: str | None) -> RawCredentials | None:
    """The text of a .creds file, which may have been replaced since the last connection.

    Raises OSError, and ValueError for a file in which the library would look for ever.
    """
    if path is None:
        return None
    text = Path(path).read_text(encoding="ascii")
    if CREDENTIALS_JWT not in text or CREDENTIALS_SEED not in text:
        raise ValueError(f"{path} is no .creds file: a JWT and a seed")
    return RawCredentials(text)


def _logins(servers: Iterable[str]) -> dict[str, _Login]:
    """What stands before an `@`, by server."""
    logins: dict[str, _Login] = {}
    for server in servers:
        before, at, _ = server.partition("//")[2].rpartition("@")
        user, colon, password = before.partition(":")
        if colon:
            logins[_without_login(server)] = _Login(unquote(user), unquote(password), None)
        elif at:
            logins[_without_login(server)] = _Login(None, None, unquote(user))
    return logins


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _address(server: str) -> str:
    return server.rpartition("//")[2].rpartition("@")[2].rstrip("/")


def _without_login(server: str) -> str:
    return f"{server.partition('//')[0]}//{_address(server)}"
