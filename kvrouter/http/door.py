"""The front door: every request of a client comes in here and leaves with a response.

Finds out what a request wants, turns it into a job for the exchange, and turns every fault into
a response in OpenAI's form.
"""

import asyncio
import logging
import time
from collections.abc import Collection
from random import getrandbits
from typing import Any

import msgspec

from kvrouter.fleet import Fleet, Route
from kvrouter.http import headers as hdr
from kvrouter.http.client import Client, send_whole
from kvrouter.http.cors import Cors, is_preflight
from kvrouter.http.exchange import Exchange, Job
from kvrouter.metrics import Metrics
from kvrouter.openai.body import BadBody, Endpoint, RequestBody, parse_body
from kvrouter.openai.errors import Fault, RequestError
from kvrouter.openai.paths import HEALTH, MODELS, ON_THE_SECOND_PORT, Path, PathTable
from kvrouter.openai.prompt_ids import may_send_ids, with_prompt_ids
from kvrouter.openai.rewrite import without_report_mode
from kvrouter.prompt import Fidelity, Prompt
from kvrouter.sticky import ResponseOwners
from kvrouter.tokenize import EncodingThreads, blind

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4
"""For bodies that are not tokenized: a usual figure for English text in large vocabularies."""


REWRITE_INLINE_BYTES = 65_536

NO_TOKENIZER = "no tokenizer for the model"


class FrontDoor:
    """What clients talk to."""

    def __init__(
        self,
        fleet: Fleet,
        exchange: Exchange,
        tokenizers: EncodingThreads,
        owners: ResponseOwners,
        metrics: Metrics,
        paths: PathTable,
        *,
        cors: Cors,
        max_active_requests: int,
        max_held_bytes: int,
        send_ids: Collection[str] = (),
    ) -> None:
        self._fleet = fleet
        self._exchange = exchange
        self._tokenizers = tokenizers
        self._owners = owners
        self._metrics = metrics
        self._paths = paths
        self._cors = cors
        self._max_active = max_active_requests
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._send_ids = frozenset(send_ids)
        self.active_requests = 0

    async def handle(self, client: Client) -> None:
        """Serve one request; returns when the response is whole or the connection is cut."""
        self.active_requests += 1
        started_at = time.perf_counter()
        path = self._paths.find(client.method, client.path)
        label = self._paths.label(client.path) if path is None else path.label
        fault: Fault | None = None
        if "origin" in client.fields:
            client.add_headers(self._cors.on_response(client.fields["origin"]))
        try:
            if path is None:
                self._answer_unserved(client)
            elif path.handling is HEALTH:
                send_whole(client, 200, [], b"")
            elif path.handling is MODELS:
                _send_json(client, self._fleet.models())
            else:
                await self._admit(client, path)
        except RequestError as error:
            fault = error.fault
            _answer_error(client, error)
        except Exception:
            log.exception("request to %s failed inside the router", label)
            fault = Fault.INTERNAL
            _answer_error(client, RequestError(fault, "the router failed; see its log"))
        finally:
            self.active_requests -= 1
            self._metrics.request_ended(label, fault, time.perf_counter() - started_at)

    async def _admit(self, client: Client, path: Path) -> None:
        """Serve a request for an engine, if there is room for it."""
        if self.active_requests > self._max_active:
            message = f"more than {self._max_active} requests are active"
            raise RequestError(Fault.OVERLOADED, message, retry_after_s=1)
        held_bytes = client.announced_bytes
        if self._held_bytes and self._held_bytes + held_bytes > self._max_held_bytes:
            message = f"more than {self._max_held_bytes} bytes of requests are held"
            raise RequestError(Fault.OVERLOADED, message, retry_after_s=1)
        self._held_bytes += held_bytes
        try:
            job = await self._job(client, path)
            self._held_bytes += len(job.body) - held_bytes
            held_bytes = len(job.body)
            await self._exchange.run(client, job)
        finally:
            self._held_bytes -= held_bytes

    def _answer_unserved(self, client: Client) -> None:
        """Answer a method and path that lead nowhere. Raises RequestError, except to OPTIONS."""
        methods = self._paths.methods(client.path)
        if not methods:
            hint = " but on the second port" if client.path in ON_THE_SECOND_PORT else ""
            message = f"{client.method} {client.path} is not served here{hint}"
            raise RequestError(Fault.NO_SUCH_PATH, message)
        methods = (*methods, "OPTIONS")
        if client.method != "OPTIONS":
            message = f"{client.path} has no {client.method} but {', '.join(methods)}"
            raise RequestError(Fault.METHOD_NOT_ALLOWED, message, allowed=methods)
        headers = [("Allow", ", ".join(methods))]
        if is_preflight(client.method, client.fields):
            origin = client.fields["origin"]
            if not self._cors.admits(origin):
                message = f"pages of {origin} may not call this: server.cors_origins lacks it"
                raise RequestError(Fault.ORIGIN_NOT_ALLOWED, message)
            headers += self._cors.on_preflight(client.fields, methods)
        send_whole(client, 204, headers, b"")

    async def _job(self, client: Client, path: Path) -> Job:
        body = await client.body()
        if path.response_id is not None:
            return self._response_job(client, path, path.response_id, body)
        fields = _read_body(path.endpoint, body, for_prompt=self._fleet.has_tokenizers)
        route = self._fleet.route(fields.model if fields else None)
        pinned = self._previous_owner(fields)
        if fields is None or path.endpoint is None:
            prompt = Prompt.blind(len(body) // BYTES_PER_TOKEN, "this path is not tokenized")
        else:
            if route.pool.tokenizer is None:
                prompt = blind(fields, NO_TOKENIZER)
            else:
                prompt = await self.prompt(route, fields)
            if fields.has_report_mode:
                body = without_report_mode(body)
            if self._send_ids and self._sends_ids(route, fields, prompt):
                prompt.ids_sent = True
                self._metrics.ids_sent()
                body = await _with_ids(body, path.endpoint, prompt)
        return _new_job(client, route, prompt, body, path.label, pinned)

    async def prompt(self, route: Route, fields: RequestBody) -> Prompt:
        """The prompt of a request as its pool's engines see it."""
        tokenizer = route.pool.tokenizer
        if tokenizer is None:
            return blind(fields, NO_TOKENIZER)
        return await self._tokenizers.prompt(
            tokenizer,
            fields,
            namespace=route.namespace(fields.cache_salt),
            block_sizes=route.pool.block_sizes(),
        )

    def _sends_ids(self, route: Route, fields: RequestBody, prompt: Prompt) -> bool:
        return (
            route.pool.model in self._send_ids
            and prompt.fidelity is Fidelity.EXACT
            and len(prompt.token_ids) > 0
            and may_send_ids(fields)
            and route.pool.lets_ids_be_sent()
        )

    def _previous_owner(self, fields: RequestBody | None) -> str | None:
        """A stored response can only be continued on the engine that has it, where we know it."""
        if fields is None or fields.previous_response_id is None:
            return None
        return self._owners.find(fields.previous_response_id)

    def _response_job(self, client: Client, path: Path, response_id: str, body: bytes) -> Job:
        owner = self._owners.find(response_id)
        if owner is None or owner not in self._fleet.workers:
            message = f"no worker is known to have made the response {response_id!r}"
            raise RequestError(Fault.NO_SUCH_RESPONSE, message)
        route = self._fleet.route_to(owner)
        prompt = Prompt.blind(1, "a stored response")
        return _new_job(client, route, prompt, body, path.label, owner)


def _new_job(
    client: Client, route: Route, prompt: Prompt, body: bytes, label: str, pinned: str | None
) -> Job:
    headers = hdr.to_engine(client.headers)
    request_id = client.fields.get(hdr.REQUEST_ID)
    if not request_id:
        request_id = f"{getrandbits(128):032x}"
        headers.append((hdr.REQUEST_ID, request_id))
    return Job(
        route=route,
        prompt=prompt,
        method=client.method,
        target=client.target,
        headers=headers,
        body=body,
        path=label,
        request_id=request_id,
        explain=hdr.EXPLAIN in client.fields,
        pinned=pinned,
        tried=set(),
    )


async def _with_ids(body: bytes, endpoint: Endpoint, prompt: Prompt) -> bytes:
    """The body with the prompt's ids; in a thread where that takes more than 0.5 ms."""
    if len(body) <= REWRITE_INLINE_BYTES:
        return with_prompt_ids(body, endpoint, prompt.token_ids)
    return await asyncio.to_thread(with_prompt_ids, body, endpoint, prompt.token_ids)


def _read_body(endpoint: Endpoint | None, body: bytes, *, for_prompt: bool) -> RequestBody | None:
    """The fields of a body; None for one that need not be a JSON object (audio, say)."""
    try:
        return parse_body(endpoint or Endpoint.COMPLETIONS, body, for_prompt=for_prompt)
    except BadBody as error:
        if endpoint is None:
            return None
        raise RequestError(Fault.BAD_REQUEST, str(error)) from error


def _send_json(client: Client, value: Any) -> None:
    send_whole(client, 200, [("Content-Type", "application/json")], msgspec.json.encode(value))


def _answer_error(client: Client, error: RequestError) -> None:
    if client.begun:
        client.abort()
        return
    headers = list(error.headers().items())
    request_id = client.fields.get(hdr.REQUEST_ID)
    if request_id:
        headers.append((hdr.REQUEST_ID, request_id))
    send_whole(client, error.fault.status, headers, error.body())
