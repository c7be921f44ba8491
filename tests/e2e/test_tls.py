"""TLS on both sides, unix sockets and IPv6, with real clients on the loop that `serve` runs on."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import trustme
from support.loops import on_uvloop
from support.stack import engine_settings, router_tables, stack, until

from kvrouter.commands import serve
from kvrouter.config import ConfigError, ServerConfig, parse_config
from kvrouter.http.sockets import listen_at_path
from kvrouter.tls import ServerTls, admin_tls
from kvrouter.wiring import Router, running
from kvrouter.workers import Worker

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


OPENAI_CHAT: Any = CHAT


class Authority:
    """An authority with its certificate in a file, that makes others."""

    def __init__(self, folder: Path, name: str) -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.path = str(folder / f"{name}.pem")
        self._ca.cert_pem.write_to_path(self.path)

    def issue(self, name: str, *hosts: str) -> str:
        """A file with key and certificate for these hosts."""
        path = self._folder / f"{name}.pem"
        path.unlink(missing_ok=True)
        self._ca.issue_cert(*hosts or ("127.0.0.1",)).private_key_and_cert_chain_pem.write_to_path(
            str(path)
        )
        return str(path)

    def trusted(self) -> ssl.SSLContext:
        """How a client of it connects."""
        return ssl.create_default_context(cafile=self.path)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@asynccontextmanager
async def router(engine_url: str, **sections: dict[str, Any]) -> AsyncIterator[Router]:
    """One more router, before an engine or another router."""
    async with running(parse_config(router_tables([engine_url], sections))) as made:
        yield made


def cannot_join(worker: Worker) -> bool:
    return "cannot join" in worker.problem


def joined(made: Router) -> bool:
    return bool(made.fleet.pools)


async def chat(url: str, tls: ssl.SSLContext | bool = True, **fields: Any) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=CHAT | fields, ssl=tls) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
        return text


def test_clients_can_have_tls(authority: Authority) -> None:
    cert = authority.issue("server")

    async def test() -> None:
        async with stack(engine_settings(), server={"tls_cert": cert}) as made:
            url = made.url.replace("http:", "https:")
            assert "usage" in await chat(url, authority.trusted())
            assert "[DONE]" in await chat(url, authority.trusted(), stream=True, max_tokens=50)
            curl = await asyncio.create_subprocess_exec(
                *("curl", "--silent", "--cacert", authority.path, f"{url}/v1/models"),
                stdout=asyncio.subprocess.PIPE,
            )
            assert b'"tiny"' in (await curl.communicate())[0]
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await chat(url)

    on_uvloop(test())


def test_openai_speaks_tls_with_a_private_authority(authority: Authority) -> None:
    """How a company's own certificates are used: `http_client` with a context, or SSL_CERT_FILE."""
    cert = authority.issue("server")

    async def test() -> None:
        async with stack(engine_settings(), server={"tls_cert": cert}) as made:
            url = made.url.replace("http:", "https:") + "/v1"
            http = openai.DefaultAsyncHttpxClient(verify=authority.trusted())
            async with openai.AsyncOpenAI(base_url=url, api_key="-", http_client=http) as client:
                streamed = await client.chat.completions.create(stream=True, **OPENAI_CHAT)
                pieces = [chunk async for chunk in streamed]
                assert pieces[-1].choices[0].finish_reason == "length"
            async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as stranger:
                with pytest.raises(openai.APIConnectionError):
                    await stranger.models.list()

    on_uvloop(test())


def test_a_certificate_is_read_again_while_connections_stay(authority: Authority) -> None:
    """Certificates are renewed every few weeks; a stream must not end for that."""
    cert = authority.issue("server")

    async def test() -> None:
        async with stack(engine_settings(), server={"tls_cert": cert}) as made:
            address = ("127.0.0.1", made.router.port)
            tls = authority.trusted()
            reader, writer = await asyncio.open_connection(*address, ssl=tls)
            before = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
            authority.issue("server")
            assert made.router.tls is not None
            made.router.tls.reload()
            _, other = await asyncio.open_connection(*address, ssl=tls)
            after = other.get_extra_info("ssl_object").getpeercert()["serialNumber"]
            assert after != before
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"200" in await reader.readline()
            Path(cert).write_text("nonsense")  # noqa: ASYNC240 - nothing waits for this test
            with pytest.raises(ConfigError, match=r"server\.tls_cert"):
                made.router.tls.reload()
            _, third = await asyncio.open_connection(*address, ssl=tls)
            assert third.get_extra_info("ssl_object").getpeercert()["serialNumber"] == after
            for each in (writer, other, third):
                each.close()

    on_uvloop(test())


async def health(url: str, tls: ssl.SSLContext) -> int:
    """What the second port answers, on a connection of its own."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health", ssl=tls) as answer:
        return answer.status


def test_the_second_port_can_have_tls_and_ask_for_a_certificate(
    authority: Authority, tmp_path: Path
) -> None:
    """Whoever reaches it may drain workers: elsewhere than on loopback not everybody should."""
    cert = authority.issue("admin")
    server = {"admin_tls_cert": cert, "admin_tls_client_ca": authority.path}
    operator = authority.trusted()
    operator.load_cert_chain(authority.issue("operator", "operator.example"))
    stranger = authority.trusted()
    stranger.load_cert_chain(Authority(tmp_path, "other").issue("stranger"))

    async def test() -> None:
        async with stack(engine_settings(), wait_ready=False, server=server) as made:
            url = made.admin.replace("http:", "https:")
            assert await health(url, operator) == 200
            for wrong in (authority.trusted(), stranger):
                with pytest.raises(aiohttp.ClientError):
                    await health(url, wrong)
            with pytest.raises(aiohttp.ClientError):
                await health(made.admin, operator)
            renewed = Authority(tmp_path, "renewed")
            Path(renewed.issue("new")).replace(cert)  # noqa: ASYNC240 - nothing waits for this test
            serve._reload(made.router.tls, made.router.admin_tls)
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await health(url, operator)
            operator.load_verify_locations(renewed.path)
            assert await health(url, operator) == 200
            async with made.session.get(f"{made.url}/health") as answer:
                assert answer.status == 200, "the first port has none"

    on_uvloop(test())


def test_engines_can_have_tls_and_ask_for_a_certificate(
    authority: Authority, tmp_path: Path
) -> None:
    """The engine is played by a router, which asks its clients for certificates."""
    stranger = Authority(tmp_path, "stranger")
    server = {"tls_cert": authority.issue("server"), "tls_client_ca": authority.path}
    own = authority.issue("router", "router.example")

    async def test() -> None:
        async with stack(engine_settings(), server=server) as engine:
            url = engine.url.replace("http:", "https:")
            good = {"ca": authority.path, "cert": own}
            async with router(url, engine_tls=good) as made:
                await until(lambda: joined(made))
                assert "usage" in await chat(f"http://127.0.0.1:{made.port}")
            for wrong in ({"ca": stranger.path, "cert": own}, {"ca": authority.path}):
                async with router(url, engine_tls=wrong) as made:
                    worker = next(iter(made.fleet.workers.values()))
                    await until(partial(cannot_join, worker))
                    assert not joined(made)

    on_uvloop(test())


def test_local_clients_can_use_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "front.sock"

    async def test() -> None:
        async with stack(engine_settings(), server={"unix_socket": str(path)}):
            connector = aiohttp.UnixConnector(str(path))
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.post("http://front/v1/chat/completions", json=CHAT) as response,
            ):
                assert response.status == 200
        assert not path.exists()

    on_uvloop(test())


@pytest.mark.parametrize("own_name", ["", "\0own name", "own.sock"])
def test_local_clients_may_have_a_name_of_their_own(tmp_path: Path, own_name: str) -> None:
    path = tmp_path / "front.sock"

    async def test() -> None:
        async with stack(engine_settings(), server={"unix_socket": str(path)}):
            client = socket.socket(socket.AF_UNIX)
            if own_name:
                unique = f"{own_name} {tmp_path}"
                client.bind(unique if "\0" in own_name else str(tmp_path / own_name))
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, str(path))
            reader, writer = await asyncio.open_unix_connection(sock=client)
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            async with asyncio.timeout(10):
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()

    on_uvloop(test())


def test_a_dead_processes_socket_is_replaced_and_a_living_ones_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "front.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with listen_at_path(path), pytest.raises(OSError, match="somebody listens"):
        listen_at_path(path)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "*"])
def test_both_sides_speak_ipv6(host: str) -> None:
    """The engine is played by a router."""

    async def test() -> None:
        async with stack(engine_settings(), server={"host": "::1"}) as engine:
            url = f"http://[::1]:{engine.router.port}"
            async with router(url, server={"host": host}) as made:
                await until(lambda: joined(made))
                assert "usage" in await chat(f"http://[::1]:{made.port}")

    on_uvloop(test())


def test_what_is_no_certificate_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.tls_cert: .*missing.pem and its key: No such"):
        ServerTls(str(tmp_path / "missing.pem"), None, None)
    with pytest.raises(ConfigError, match=r"server\.tls_cert: is missing"):
        parse_config({"server": {"tls_key": "key.pem"}})
    with pytest.raises(ConfigError, match=r"server\.admin_tls_cert: is missing"):
        parse_config({"server": {"admin_tls_client_ca": "ca.pem"}})
    with pytest.raises(ConfigError, match=r"server\.admin_tls_cert: .*missing.pem"):
        admin_tls(ServerConfig(admin_tls_cert=str(tmp_path / "missing.pem")))
    with pytest.raises(ConfigError, match=r"engine_tls\.cert: is missing"):
        parse_config({"engine_tls": {"key": "key.pem"}})
