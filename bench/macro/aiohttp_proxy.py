"""The least that a proxy on aiohttp can do: what a Python front door is usually made of.

python bench/macro/aiohttp_proxy.py PORT ENGINE_URL
"""

import sys
from collections.abc import AsyncIterator

import aiohttp
import uvloop
from aiohttp import web

SESSION = web.AppKey("session", aiohttp.ClientSession)


async def proxy(request: web.Request) -> web.StreamResponse:
    """Pass one request on, and its response back."""
    headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "connection")}
    data = await request.read()
    async with request.app[SESSION].request(
        request.method, sys.argv[2] + request.path_qs, data=data, headers=headers
    ) as upstream:
        response = web.StreamResponse(status=upstream.status)
        response.content_type = upstream.content_type
        if upstream.content_length is not None:
            response.content_length = upstream.content_length
        await response.prepare(request)
        async for piece in upstream.content.iter_any():
            await response.write(piece)
        await response.write_eof()
        return response


async def session(app: web.Application) -> AsyncIterator[None]:
    """The connections to the engine."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as made:
        app[SESSION] = made
        yield


if __name__ == "__main__":
    app = web.Application()
    app.cleanup_ctx.append(session)
    app.router.add_route("*", "/{path:.*}", proxy)
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
