"""The HTTP API of the simulated engine: what it does with each path."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from kvrouter.openai.body import Endpoint, RequestBody, parse_body
from kvrouter.sim import pages
from kvrouter.sim.asked import ApiError, Asked, Choice, Reader, bad_request, json_object
from kvrouter.sim.conversations import Conversations
from kvrouter.sim.driver import EngineDiedError
from kvrouter.sim.engine import Output
from kvrouter.sim.faults import Faults
from kvrouter.sim.rank import Rank
from kvrouter.sim.replies import DONE, REPLIES, Reply, data_event, encode
from kvrouter.sim.settings import SimSettings

_READ_ON_LOOP_BYTES = 32 * 1024
_DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class Api:
    """Answers requests on the given ranks.

    `active` and `aborted` count inference requests: those running now, and those whose connection
    was gone before their end.
    """

    def __init__(
        self, settings: SimSettings, reader: Reader, ranks: Sequence[Rank], faults: Faults
    ) -> None:
        self.active = 0
        self.aborted = 0
        self._settings = settings
        self._reader = reader
        self._ranks = ranks
        self._faults = faults
        self._created = int(time.time())
        self._names = itertools.count()
        self._turn = itertools.count()
        self._conversations = Conversations()

    def routes(self) -> list[web.RouteDef]:
        """Return all paths."""
        inference = [web.post(endpoint.value, self._infer) for endpoint in Endpoint]
        return [
            *inference,
            web.get("/v1/responses/{id}", self._kept_response),
            web.post("/v1/responses/{id}/cancel", self._cancel_response),
            web.post("/v1/messages/count_tokens", self._count_tokens),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
            web.get("/v1/models", self._models),
            web.get("/kv_event_sources", self._event_sources),
            web.get("/metrics", self._metrics),
            web.get("/health", _empty),
            web.get("/ping", _empty),
            web.get("/version", _version),
        ]

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        self.active += 1
        try:
            return await self._answer(request)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.active -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if self._faults.refuse:
            return self._refusal(self._faults.refuse.popleft())
        if self._faults.hang_before_first_byte:
            await _forever()
        endpoint = Endpoint(request.path)
        if endpoint is Endpoint.RESPONSES:
            data = self._conversations.continued(data)
        asked = await self._read(endpoint, data)
        rank = self._rank_for(request, endpoint)
        request_id = request.headers.get("X-Request-Id", "")
        details = self._settings.prompt_tokens_details
        block_size = self._settings.core.block_size
        reply = REPLIES[endpoint](asked, request_id, block_size, details=details)
        try:
            response = await self._run(request, rank, asked, reply)
        except EngineDiedError:
            raise ApiError(500, _DIED, "InternalServerError") from None
        if endpoint is Endpoint.RESPONSES:
            self._conversations.keep(reply)
        return response

    async def _run(
        self, request: web.Request, rank: Rank, asked: Asked, reply: Reply
    ) -> web.StreamResponse:
        name = str(next(self._names))
        wanted = asked.engine_requests(name)
        choices = {r.request_id: c for r, c in zip(wanted, asked.choices, strict=True)}
        async with rank.driver.running(wanted) as outputs:
            if asked.body.stream:
                return await self._stream(request, reply, outputs, choices)
            async for output in outputs:
                self._note(reply, choices[output.request_id], output)
            return web.Response(body=encode(reply.whole()), content_type="application/json")

    async def _stream(
        self,
        request: web.Request,
        reply: Reply,
        outputs: AsyncIterator[Output],
        choices: dict[str, Choice],
    ) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream; charset=utf-8"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        try:
            number = 0
            async for output in outputs:
                choice = choices[output.request_id]
                self._note(reply, choice, output)
                opening = () if number else reply.opening()
                for event in itertools.chain(opening, reply.chunk(choice)):
                    await self._fail_if_told(request, number)
                    await response.write(event)
                    number += 1
            await response.write(b"".join(reply.closing()))
        except EngineDiedError:
            error = ApiError(500, _DIED, "InternalServerError").error
            await response.write(data_event({"error": error}) + DONE)
        return response

    async def _fail_if_told(self, request: web.Request, chunks: int) -> None:
        """Fail as `faults` says, when this many chunks of the stream have been sent."""
        if chunks == self._faults.hang_after_chunks:
            await _forever()
        if chunks == self._faults.die_after_chunks:
            if self._faults.error_chunk:
                raise EngineDiedError
            _cut(request)
            raise ConnectionResetError

    def _note(self, reply: Reply, choice: Choice, output: Output) -> None:
        piece = self._reader.text.piece(output.token)
        reply.output(choice, output.token, piece, output.cached_tokens)

    async def _read(self, endpoint: Endpoint, data: bytes) -> Asked:
        if len(data) <= _READ_ON_LOOP_BYTES:
            return self._reader.read(endpoint, data)
        return await asyncio.to_thread(self._reader.read, endpoint, data)

    def _rank_for(self, request: web.Request, endpoint: Endpoint) -> Rank:
        """Return the rank asked for by header, else the least loaded, by turns."""
        asked = request.headers.get("X-data-parallel-rank", "")
        if asked.isdecimal() and endpoint is not Endpoint.RESPONSES:
            if int(asked) >= len(self._ranks):
                count = len(self._ranks)
                raise bad_request(f"data_parallel_rank {asked} is out of range [0, {count}).")
            return self._ranks[int(asked)]
        turn = next(self._turn)
        count = len(self._ranks)
        return min(self._ranks, key=lambda rank: (rank.load, (rank.number - turn) % count))

    def _refusal(self, status: int) -> web.Response:
        headers = {}
        if self._faults.retry_after_s is not None:
            headers["Retry-After"] = str(self._faults.retry_after_s)
        error = ApiError(status, "Refused by the simulated engine.", "ServiceUnavailable").error
        return web.json_response({"error": error}, status=status, headers=headers)

    async def _kept_response(self, request: web.Request) -> web.Response:
        return web.json_response(self._conversations.response(request.match_info["id"]))

    async def _cancel_response(self, request: web.Request) -> web.Response:
        self._conversations.response(request.match_info["id"])
        raise bad_request("Cannot cancel a synchronous response.")

    async def _tokenize(self, request: web.Request) -> web.Response:
        data = await request.read()
        fields = json_object(data)
        self._reader.adapter(fields.get("model") or self._settings.model)
        endpoint = Endpoint.CHAT if "messages" in fields else Endpoint.COMPLETIONS
        tokens = self._reader.tokens(_body(endpoint, data))
        answer = {
            "count": len(tokens),
            "max_model_len": self._settings.core.max_model_len,
            "tokens": tokens.tolist(),
            "token_strs": None,
        }
        return web.json_response(answer)

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = json_object(await request.read()).get("tokens")
        try:
            return web.json_response({"prompt": self._reader.text.decode(tokens or [])})
        except (TypeError, OverflowError) as error:
            raise bad_request(f"tokens must be a list of ids: {error}") from error

    async def _count_tokens(self, request: web.Request) -> web.Response:
        tokens = self._reader.tokens(_body(Endpoint.MESSAGES, await request.read()))
        return web.json_response({"input_tokens": len(tokens)})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        preempt = request.query.get("reset_running_requests", "").lower() == "true"
        results = [
            await rank.driver.call(lambda core: core.clear_cache(preempt_running=preempt))
            for rank in self._ranks
        ]
        return web.json_response({"success": all(results)})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(pages.models(self._settings, self._created))

    async def _event_sources(self, _: web.Request) -> web.Response:
        return web.json_response(pages.event_sources(self._settings, self._ranks))

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=pages.metrics(self._settings, self._ranks))


def _body(endpoint: Endpoint, data: bytes) -> RequestBody:
    json_object(data)
    return parse_body(endpoint, data)


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def _forever() -> None:
    await asyncio.Event().wait()


async def _empty(_: web.Request) -> web.Response:
    return web.Response()


async def _version(_: web.Request) -> web.Response:
    return web.json_response({"version": pages.VERSION})
