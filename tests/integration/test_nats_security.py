"""Encrypted connections and identities, with a real nats-server, by the configuration's names."""

from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]  # it has no types
import pytest
import trustme
from support.nats import nats_server
from support.nats_identities import Identity, Operator
from support.streams import eventually, running

from events.nats_link import NatsLink
from kvrouter.config import parse_config
from kvrouter.sharing import nats_settings


class Certificates:
    """An authority, and what it has signed, as files."""

    def __init__(self, folder: Path, name: str = "127.0.0.1") -> None:
        folder.mkdir()
        authority = trustme.CA()
        self.ca, self.cert, self.key = (str(folder / file) for file in ("ca", "cert", "key"))
        authority.cert_pem.write_to_path(self.ca)
        issued = authority.issue_cert(name)
        issued.private_key_pem.write_to_path(self.key)
        for blob in issued.cert_chain_pems:
            blob.write_to_path(self.cert, append=True)

    def server(self, *, verify: bool = False) -> tuple[str, ...]:
        """Arguments of a server; with `verify` it wants a certificate of its clients too."""
        files = ("--tlscert", self.cert, "--tlskey", self.key, "--tlscacert", self.ca)
        return ("--tls", "--tlsverify", *files) if verify else ("--tls", *files)


@pytest.fixture
def ours(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "theirs")


def link_by(url: str, **nats: Any) -> NatsLink:
    """As a router with these settings makes it."""
    config = parse_config({"nats": {"servers": [url]} | nats})
    return NatsLink(nats_settings(config.nats, "test"))


async def connects(link: NatsLink) -> None:
    async with running(link):
        await eventually(lambda: link.is_connected)


async def fails(link: NatsLink, *words: str) -> None:
    """It never is connected, and says why."""
    async with running(link):
        await eventually(lambda: link.stats.failed_connects > 0)
        assert not link.is_connected
        assert any(word in link.problem.lower() for word in words), link.problem


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_a_server_of_a_known_authority_is_trusted(ours: Certificates, scheme: str) -> None:
    async with nats_server(*ours.server()) as server:
        await connects(link_by(server.url.replace("nats:", f"{scheme}:"), tls_ca=ours.ca))


async def test_a_server_of_another_authority_is_not(
    ours: Certificates, theirs: Certificates
) -> None:
    async with nats_server(*theirs.server()) as server:
        await fails(link_by(server.url, tls_ca=ours.ca), "certificate")
        await fails(link_by(server.url.replace("nats:", "tls:")), "certificate")


async def test_a_server_with_the_certificate_of_another_host_is_not(tmp_path: Path) -> None:
    elsewhere = Certificates(tmp_path / "elsewhere", "nats.example.org")
    async with nats_server(*elsewhere.server()) as server:
        await fails(link_by(server.url, tls_ca=elsewhere.ca), "certificate")


async def test_nothing_is_sent_to_a_server_that_does_not_encrypt(ours: Certificates) -> None:
    """The password must not go out in the clear because someone answers in the server's place."""
    async with nats_server("--user", "u", "--pass", "p") as server:
        link = link_by(server.url, tls_ca=ours.ca, user="u", password="p")  # noqa: S106  a test's
        await fails(link, "secure connection required")
        await fails(link_by(server.url.replace("nats:", "tls:")), "secure connection required")


async def test_a_server_that_wants_a_certificate_gets_ours(
    ours: Certificates, theirs: Certificates
) -> None:
    async with nats_server(*ours.server(verify=True)) as server:
        await connects(link_by(server.url, tls_ca=ours.ca, tls_cert=ours.cert, tls_key=ours.key))
        without = link_by(server.url, tls_ca=ours.ca)
        foreign = link_by(server.url, tls_ca=ours.ca, tls_cert=theirs.cert, tls_key=theirs.key)
        for link in (without, foreign):
            await fails(link, "certificate", "alert", "lost", "closed", "reset", "pipe")


async def test_an_nkey_is_needed_where_the_server_wants_one(tmp_path: Path) -> None:
    known, unknown = (Identity(nkeys.PREFIX_BYTE_USER) for _ in range(2))
    config = tmp_path / "nats.conf"
    config.write_text(f"authorization {{ users = [ {{ nkey: {known.public} }} ] }}")
    async with nats_server("--config", str(config)) as server:
        await connects(link_by(server.url, nkey_seed=known.write_seed(tmp_path / "known.nk")))
        seed = unknown.write_seed(tmp_path / "unknown.nk")
        await fails(link_by(server.url, nkey_seed=seed), "authorization")


async def test_credentials_are_needed_where_an_operator_wants_them(tmp_path: Path) -> None:
    operator, other = Operator(), Operator()
    config = tmp_path / "nats.conf"
    config.write_text(operator.configuration)
    async with nats_server("--config", str(config)) as server:
        credentials = operator.write_credentials(tmp_path / "router.creds")
        await connects(link_by(server.url, credentials=credentials))
        foreign = other.write_credentials(tmp_path / "other.creds")
        await fails(link_by(server.url, credentials=foreign), "authorization")


async def test_a_token_is_needed_where_the_server_wants_one() -> None:
    async with nats_server("--auth", "secret") as server:
        await connects(link_by(server.url, token="secret"))  # noqa: S106  a test's
        await fails(link_by(server.url, token="wrong"), "authorization")  # noqa: S106  likewise
