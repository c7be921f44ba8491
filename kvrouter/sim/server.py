"""The simulated engine as an OpenAI server: `SimServer`, usable in-process and by a command.

It answers as `vllm serve` does where a router looks: bodies, streams, usage, errors, models,
metrics, and the discovery of event endpoints. In a test, `faults` makes it fail, and `received`,
`active` and `aborted` say what reached it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import zmq.asyncio
from aiohttp import web

from kvrouter.sim.api import Api
from kvrouter.sim.asked import ApiError, Reader
from kvrouter.sim.faults import Faults
from kvrouter.sim.rank import Ports, Rank
from kvrouter.sim.settings import SimSettings
from kvrouter.sim.text import Text, load_text

_MAX_BODY_BYTES = 1 << 30
_BACKLOG = 2048
_SHUTDOWN_S = 0.5
_GUARDED = ("/v1", "/v2", "/inference")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Received:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class SimServer:
    """A simulated engine process.

    `start` and `stop` frame its life; `kill` ends it without a word to anybody, as SIGKILL would,
    and `restart` brings up a new engine with an empty cache on the same ports. `received` keeps the
    last `record` requests. Servers of one process can share a loaded tokenizer: `text`.
    """

    def __init__(
        self,
        settings: SimSettings | None = None,
        *,
        faults: Faults | None = None,
        record: int = 64,
        text: Text | None = None,
    ) -> None:
        self.settings = settings or SimSettings()
        self.faults = faults or Faults()
        self.received: deque[Received] = deque(maxlen=record)
        self.port = self.settings.port
        self.ranks: list[Rank] = []
        self._ports: list[Ports] = []
        self._context: zmq.asyncio.Context | None = None
        self._runner: web.AppRunner | None = None
        self._api: Api | None = None
        self._text = text

    @property
    def active(self) -> int:
        """Inference requests that are being answered."""
        return self._api.active if self._api else 0

    @property
    def aborted(self) -> int:
        """Inference requests since the start whose connection was gone before their end."""
        return self._api.aborted if self._api else 0

    @property
    def url(self) -> str:
        """Where it listens; known once started."""
        if self.settings.uds is not None:
            return f"unix:{self.settings.uds}"
        return f"http://{self.settings.host}:{self.port}"

    async def start(self) -> None:
        """Load the tokenizer, bind all ports, start the engine."""
        settings = self.settings
        if self._text is None:
            self._text = await asyncio.to_thread(load_text, settings.tokenizer)
        reader = Reader(self._text, settings.model, settings.loras, settings.core.max_model_len)
        self._api = Api(settings, reader, self.ranks, self.faults)
        try:
            self._start_engine()
            await self._start_http(self._api)
        except BaseException:
            await self._end(abruptly=True)
            raise

    async def stop(self) -> None:
        """End in order: no new connections, running requests fail, ports are free again."""
        await self._end(abruptly=False)

    async def kill(self) -> None:
        """End as a killed process does: every connection is cut."""
        await self._end(abruptly=True)

    async def restart(self) -> None:
        """Bring up a new engine on the same ports: empty cache, seqnos from 0."""
        if self._runner is not None:
            await self.kill()
        await self.start()

    def _start_engine(self) -> None:
        self._context = zmq.asyncio.Context()
        for number in range(self.settings.dp_size):
            ports = self._ports[number] if self._ports else self.settings.rank_ports(number)
            rank = Rank(self.settings, number, ports, self.faults, self._context)
            rank.start()
            self.ranks.append(rank)
        self._ports = [rank.ports for rank in self.ranks]

    async def _start_http(self, api: Api) -> None:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._around])
        app.add_routes(api.routes())
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=self.settings.keep_alive_s,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await self._runner.setup()
        if self.settings.uds is not None:
            await web.UnixSite(self._runner, self.settings.uds, backlog=_BACKLOG).start()
            return
        site = web.TCPSite(self._runner, self.settings.host, self.port, backlog=_BACKLOG)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _end(self, *, abruptly: bool) -> None:
        runner, self._runner = self._runner, None
        for site in list(runner.sites) if runner else []:
            await site.stop()
        if abruptly and runner and runner.server:
            _cut_all(runner.server)
        for rank in self.ranks:
            await rank.stop()
        self.ranks.clear()
        if runner:
            await runner.cleanup()
        if self._context is not None:
            self._context.destroy(linger=0)

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record the request, ask for the key, and give errors vLLM's form."""
        body = await request.read()
        headers = dict(request.headers)
        self.received.append(Received(request.method, request.path_qs, headers, body))
        if not self._may_enter(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except ApiError as error:
            return web.json_response({"error": error.error}, status=error.status)
        except web.HTTPException as error:
            return web.json_response({"detail": error.reason}, status=error.status)

    def _may_enter(self, request: web.Request) -> bool:
        key = self.settings.api_key
        if key is None or not request.path.startswith(_GUARDED):
            return True
        return request.headers.get("Authorization") == f"Bearer {key}"


def _cut_all(server: web.Server) -> None:
    for connection in server.connections:
        if connection.transport is not None:
            connection.transport.abort()
