"""The second port of several processes: asks theirs and answers as one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from kvrouter.admin import MAX_EXPLAIN_BYTES
from kvrouter.config import ServerConfig
from kvrouter.processes.child import NO_REPLY, Child, Reply
from kvrouter.processes.joint_metrics import joined
from kvrouter.processes.supervisor import Supervisor
from kvrouter.tls import ServerTls

APPLY_S = 10.0
"""For a new process to know a worker that an operator has drained."""


class JointAdmin:
    """The handlers. What operators drained is told to processes that start later."""

    def __init__(self) -> None:
        self.supervisor: Supervisor | None = None
        self._drained: set[str] = set()

    def application(self) -> web.Application:
        """The second port as an aiohttp application."""
        app = web.Application(client_max_size=MAX_EXPLAIN_BYTES)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
                web.get("/workers", self._workers),
                web.post("/workers/{name}/{move:drain|resume}", self._move),
                web.route("*", "/{rest:.*}", self._any),
            ]
        )
        return app

    async def started(self, child: Child) -> None:
        """Tell a new process what is drained."""
        for name in list(self._drained):
            for _ in range(int(APPLY_S / 0.1)):
                reply = await child.ask("POST", f"/workers/{name}/drain")
                if reply.status == HTTPStatus.OK:
                    break
                await asyncio.sleep(0.1)

    @property
    def _children(self) -> list[Child]:
        return [] if self.supervisor is None else self.supervisor.children

    async def _ask_all(self, method: str, target: str) -> list[tuple[Child, Reply]]:
        children = self._children
        replies = await asyncio.gather(*(child.ask(method, target) for child in children))
        return list(zip(children, replies, strict=True))

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return _json({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        del request
        replies = await self._ask_all("GET", "/ready")
        missing = [] if replies else ["no process is running"]
        for child, reply in replies:
            if reply.status != HTTPStatus.OK:
                missing += [f"process {child.seat.number}: {why}" for why in _missing(reply)]
        return _json({"ready": not missing, "missing": missing}, status=503 if missing else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        scrapes = {
            str(child.seat.number): reply.body.decode()
            for child, reply in await self._ask_all("GET", "/metrics")
            if reply.status == HTTPStatus.OK
        }
        text = await asyncio.to_thread(joined, scrapes)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _workers(self, request: web.Request) -> web.Response:
        del request
        reports = [
            (child, msgspec.json.decode(reply.body))
            for child, reply in await self._ask_all("GET", "/workers")
            if reply.status == HTTPStatus.OK
        ]
        whole: dict[str, Any] = dict(reports[0][1]) if reports else {}
        whole["processes"] = [self._process(child, report) for child, report in reports]
        return _json(whole)

    def _process(self, child: Child, report: dict[str, Any]) -> dict[str, Any]:
        slots = [] if self.supervisor is None else self.supervisor.slots
        number = child.seat.number
        restarts = sum(slot.restarts.count for slot in slots if slot.number == number)
        return {"process": number, "pid": child.pid, "restarts": restarts, **report}

    async def _move(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        replies = await self._ask_all("POST", request.path)
        reply = next((r for _, r in replies if r.status == HTTPStatus.OK), None)
        if reply is not None:
            change = self._drained.add if request.path.endswith("drain") else self._drained.discard
            change(name)
        return _passed_on(reply or (replies[0][1] if replies else NO_REPLY))

    async def _any(self, request: web.Request) -> web.Response:
        """What any process can answer for all."""
        children = self._children
        if not children:
            return _passed_on(NO_REPLY)
        reply = await children[0].ask(request.method, request.path_qs, await request.read())
        return _passed_on(reply)


def _missing(reply: Reply) -> Sequence[str]:
    try:
        missing: list[str] = msgspec.json.decode(reply.body)["missing"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return [reply.body.decode("utf-8", "replace").strip()]
    return missing


def _passed_on(reply: Reply) -> web.Response:
    return web.Response(
        status=reply.status, body=reply.body, headers={"Content-Type": reply.content_type}
    )


def _json(value: object, *, status: int = 200) -> web.Response:
    body = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    return web.Response(status=status, body=body, content_type="application/json")


@asynccontextmanager
async def joint_admin_listening(
    admin: JointAdmin, server: ServerConfig, tls: ServerTls | None
) -> AsyncIterator[int]:
    """Serve the second port while the context is open; gives its port. Raises OSError."""
    runner = web.AppRunner(admin.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        context = None if tls is None else tls.context
        await web.TCPSite(runner, server.admin_host, server.admin_port, ssl_context=context).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
