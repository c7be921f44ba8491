"""The second port: health, readiness, metrics, workers, explain, drain. Not for clients.

By default it listens on loopback only: whoever reaches it may drain workers and read topology.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from events.nats_link import NatsLink
from kvrouter import report
from kvrouter.config import ServerConfig
from kvrouter.explain import Explainer
from kvrouter.fleet import Fleet
from kvrouter.metrics import Metrics
from kvrouter.openai.errors import RequestError
from kvrouter.tls import ServerTls
from kvrouter.workers import WorkerEvent

log = logging.getLogger(__name__)

MAX_EXPLAIN_BYTES = 64 * 1024 * 1024


class Admin:
    """The handlers of the second port."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        explainer: Explainer,
        replicas: Callable[[], dict[str, Any]],
        link: NatsLink | None,
    ) -> None:
        self._fleet = fleet
        self._link = link
        self._replicas = replicas
        self._metrics = metrics
        self._explainer = explainer

    def application(self) -> web.Application:
        """The second port as an aiohttp application."""
        app = web.Application(client_max_size=MAX_EXPLAIN_BYTES)
        app.add_routes(
            [
                web.get("/", self._index),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._serve_metrics),
                web.get("/workers", self._workers),
                web.get("/prefixes", self._prefixes),
                web.post("/workers/{name}/drain", self._drain),
                web.post("/workers/{name}/resume", self._resume),
                web.post("/explain", self._explain),
            ]
        )
        return app

    async def _index(self, request: web.Request) -> web.Response:
        del request
        return web.Response(text=_INDEX)

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return _json({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        del request
        missing = report.readiness(self._fleet, self._link)
        return _json({"ready": not missing, "missing": missing}, status=503 if missing else 200)

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        del request
        text = generate_latest(self._metrics.registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _workers(self, request: web.Request) -> web.Response:
        del request
        return _json(report.workers(self._fleet) | {"replicas": self._replicas()})

    async def _prefixes(self, request: web.Request) -> web.Response:
        del request
        return _json(report.prefixes(self._fleet))

    async def _drain(self, request: web.Request) -> web.Response:
        return self._move(request, WorkerEvent.DRAIN)

    async def _resume(self, request: web.Request) -> web.Response:
        return self._move(request, WorkerEvent.RESUME)

    def _move(self, request: web.Request, event: WorkerEvent) -> web.Response:
        worker = self._fleet.workers.get(request.match_info["name"])
        if worker is None:
            known = ", ".join(self._fleet.workers)
            return _json({"error": f"no such worker; there are: {known}"}, status=404)
        if worker.happened(event):
            log.info("worker %s: %s by an operator", worker.name, worker.state)
        return _json({"worker": worker.name, "state": worker.state.value})

    async def _explain(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            return _json(await self._explainer.explain(body, request.query.get("path")))
        except RequestError as error:
            return web.Response(
                status=error.fault.status, body=error.body(), headers=error.headers()
            )


_INDEX = """kvrouter, second port

GET  /health                 the process is alive
GET  /ready                  a worker is ready and its tokenizer loaded
GET  /metrics                Prometheus metrics
GET  /workers                state of each worker and rank
GET  /prefixes               the prefixes that most ranks hold
POST /workers/NAME/drain     no new requests for a worker
POST /workers/NAME/resume    the worker is back
POST /explain[?path=/v1/...] where a request body would go, and why; nothing is sent
"""


def _json(value: object, *, status: int = 200) -> web.Response:
    body = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    return web.Response(status=status, body=body, content_type="application/json")


@asynccontextmanager
async def admin_listening(
    admin: Admin, server: ServerConfig, tls: ServerTls | None = None, *, path: str | None = None
) -> AsyncIterator[int]:
    """Serve the second port while the context is open; gives its port number.

    At a unix socket's `path` instead, where one is given (and 0), without TLS. Raises OSError when
    the address cannot be bound.
    """
    runner = web.AppRunner(admin.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        if path is None:
            context = None if tls is None else tls.context
            await web.TCPSite(
                runner, server.admin_host, server.admin_port, ssl_context=context
            ).start()
        else:
            await web.UnixSite(runner, path).start()
        yield runner.addresses[0][1] if path is None else 0
    finally:
        await runner.cleanup()
