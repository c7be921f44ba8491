"""One connection to a real nats-server, and what becomes of it."""

import asyncio
import contextlib
import gc
import signal
from pathlib import Path

import pytest
from nats.aio.client import Client
from support.nats import connected, link_to, nats_server
from support.streams import eventually, running

from events.nats_link import MAX_LEARNED, LinkState, NatsLink, Received, _Client
from events.subjects import Subjects, escape, unescape
from kvrouter.demo.nats_server import NatsServer
from kvrouter.demo.processes import free_port


class Ear:
    """Remembers what a subscription brings."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.changes: list[bool] = []

    def __call__(self, message: Received) -> None:
        self.heard.append(message.payload)

    def changed(self, *, connected: bool) -> None:
        self.changes.append(connected)


async def test_what_is_published_is_heard_in_order() -> None:
    ear = Ear()
    async with nats_server() as server:
        speaker, listener = link_to(server.url), link_to(server.url)
        listener.subscribe("a.*", ear)
        async with connected(speaker, listener):
            for number in range(1000):
                assert speaker.publish("a.b", b"%d" % number)
            await eventually(lambda: len(ear.heard) == 1000)
    assert ear.heard == [b"%d" % number for number in range(1000)]


async def test_a_subscription_ends_when_it_is_told_to() -> None:
    ear, other = Ear(), Ear()
    async with nats_server() as server:
        link = link_to(server.url)
        async with connected(link):
            subscription = link.subscribe("a", ear)
            link.subscribe("a", other)
            link.publish("a", b"1")
            await eventually(lambda: ear.heard == [b"1"])
            link.unsubscribe(subscription)
            link.unsubscribe(subscription)
            link.publish("a", b"2")
            await eventually(lambda: other.heard == [b"1", b"2"])
            assert ear.heard == [b"1"]


async def test_a_server_that_is_not_there_yet_is_waited_for_and_blocks_nobody() -> None:
    """R3: NATS is down when the router starts."""
    ear = Ear()
    link = link_to(f"nats://127.0.0.1:{free_port()}")
    server = NatsServer(port=int(link._servers[0].rpartition(":")[2]))
    link.subscribe("a", ear)
    async with running(link):
        await eventually(lambda: link.stats.failed_connects > 1)
        assert not link.publish("a", b"lost")
        assert link.stats.unsent == 1
        assert link.problem.startswith(server.url)
        await eventually(lambda: "Errno" in link.problem)  # not only "no servers"
        await server.start()
        await eventually(lambda: link.is_connected)
        assert link.publish("a", b"heard")
        await eventually(lambda: ear.heard == [b"heard"])
    await server.stop()


async def test_subscriptions_stand_again_after_a_restart_of_the_server() -> None:
    """R3: NATS is restarted under load."""
    ear = Ear()
    async with nats_server() as server:
        link = link_to(server.url)
        link.subscribe("a", ear)
        link.watch(ear.changed)
        async with connected(link):
            await server.stop()
            await eventually(lambda: link.state is LinkState.LOST)
            await server.start()
            await eventually(lambda: link.is_connected)
            link.publish("a", b"again")
            await eventually(lambda: ear.heard == [b"again"])
    assert ear.changes == [True, False, True, False]


async def test_a_server_that_answers_no_pings_is_given_up() -> None:
    """The network between is cut without a word."""
    async with nats_server() as server:
        link = link_to(server.url, ping_s=0.1)
        async with connected(link):
            server.send_signal(signal.SIGSTOP)
            await eventually(lambda: link.state is LinkState.LOST)
            server.send_signal(signal.SIGCONT)
            await eventually(lambda: link.is_connected)


async def test_another_server_is_tried_when_one_is_gone() -> None:
    async with nats_server() as first, nats_server() as second:
        link = link_to(first.url, second.url)
        async with connected(link):
            used = first if link.server == first.url else second
            await used.stop()
            await eventually(lambda: link.is_connected and link.server != used.url)


async def test_the_other_servers_of_a_cluster_are_learned_and_know_us_too() -> None:
    """The URL's user and password are for all servers, also for those it does not name."""
    ports = [free_port(), free_port()]
    routes = ",".join(f"nats://127.0.0.1:{port}" for port in ports)
    cluster = [
        (
            *("--cluster_name", "c", "--cluster", f"nats://127.0.0.1:{port}", "--routes", routes),
            *("--user", "u", "--pass", "s@cret"),
        )
        for port in ports
    ]
    async with nats_server(*cluster[0]) as first, nats_server(*cluster[1]) as second:
        link = link_to(first.url.replace("//", "//u:s%40cret@"))
        async with running(link):
            await eventually(lambda: link.is_connected and len(link._servers) > 1)
            assert "cret" not in link.server
            await first.stop()
            await eventually(lambda: link.is_connected and link.server == second.url, within_s=20)


async def test_a_server_that_is_lost_while_much_waits_to_be_sent_is_noticed() -> None:
    """The library would fail over what waits before it tells of the loss, in a task of its own."""
    strays: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: strays.append(context))
    async with nats_server() as server:
        link = link_to(server.url, ping_s=30.0)
        async with connected(link):
            for _ in range(3):
                server.send_signal(signal.SIGSTOP)
                for _ in range(3000):
                    link.publish("a", b"x" * 5000)
                await eventually(lambda: len(link._todo) < 2500)
                await server.stop()
                await eventually(lambda: link.state is LinkState.LOST)
                await server.start()
                await eventually(lambda: link.is_connected)
    gc.collect()
    assert not strays


def addresses(count: int, start: int = 0) -> list[str]:
    return [f"10.0.0.{number}:4222" for number in range(start, start + count)]


async def test_servers_that_the_cluster_names_no_more_are_forgotten() -> None:
    """Its pods are replaced again and again, each at an address of its own."""
    async with nats_server() as server:
        link = link_to(server.url, "nats://127.0.0.1:9")
        async with connected(link):
            client = _Client(must_encrypt=False, learn=link._learn_servers)
            given, own = ["nats://127.0.0.1:9", server.url], server.url.rpartition("/")[2]

            def known(*named: str) -> list[str]:
                client.named = [*named]
                link._learn_servers(client)
                assert link._servers[-1] == link.server  # the others are tried first
                return sorted(set(link._servers) - set(given))

            assert set(given) <= set(link._servers)
            assert known(*addresses(2), own) == [f"nats://{each}" for each in addresses(2)]
            assert known(*addresses(2, start=1)) == [f"nats://{each}" for each in addresses(2, 1)]
            assert known(own, "127.0.0.1:9") == []
            assert len(known(*addresses(2, start=1), "127.0.0.1:9")) == 2
            assert len(known(own)) == len(known()) == 2  # it has lost them all; they may be back
            assert len(known(*addresses(200))) == MAX_LEARNED
            assert set(given) <= set(link._servers)


@pytest.mark.parametrize("right", [True, False])
async def test_a_password_is_needed_where_the_server_wants_one(right: bool) -> None:
    async with nats_server("--user", "u", "--pass", "secret") as server:
        link = link_to(server.url, user="u", password="secret" if right else "wrong")
        async with running(link):
            await eventually(lambda: link.is_connected if right else bool(link.problem))
            assert right or "Authorization" in link.problem
            assert "secret" not in link.problem


async def test_a_message_that_the_server_does_not_take_costs_itself_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A state of thousands of blocks where `max_payload` is lowered: it is asked for for ever."""
    config = tmp_path / "nats.conf"
    config.write_text("max_payload: 4KB")
    heard: list[int] = []
    async with nats_server("--config", str(config)) as server:
        link = link_to(server.url)
        async with connected(link):
            link.subscribe("a", lambda message: heard.append(len(message.payload)))
            for size in (1, 4096, 4097, 5000, 2):
                link.publish("a", bytes(size))
            await eventually(lambda: 2 in heard)
            assert (link.stats.connects, link.stats.unsent) == (1, 2)
    assert heard == [1, 4096, 2]
    assert sum("max_payload" in each.getMessage() for each in caplog.records) == 1


async def test_subjects_that_are_not_allowed_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(
        'authorization { users = [ { user: u, password: p, permissions: { publish: "ok" } } ] }'
    )
    async with nats_server("--config", str(config)) as server:
        link = link_to(server.url, user="u", password="p")  # noqa: S106  a test's
        async with connected(link):
            link.publish("ok", b"")
            link.publish("no", b"")
            await eventually(lambda: link.stats.refused == 1)
            for _ in range(100):
                link.publish("no", b"")
            await eventually(lambda: link.stats.refused == 101)
            assert link.is_connected
    assert 0 < sum("violation" in each.getMessage().lower() for each in caplog.records) < 10


@pytest.mark.parametrize("field", ["nkey_seed", "credentials"])
async def test_a_secret_that_is_gone_is_a_connection_that_fails(field: str, tmp_path: Path) -> None:
    """A secret that is being replaced is not there for a moment."""
    link = link_to("nats://127.0.0.1:1", **{field: str(tmp_path / "secret")})
    async with running(link):
        await eventually(lambda: link.stats.failed_connects > 1)
        assert "secret" in link.problem
        (tmp_path / "secret").write_text("SUAnot")
        before = link.stats.failed_connects
        await eventually(lambda: link.stats.failed_connects > before + 1)
    assert "seed" in link.problem.lower()  # it is none, or has none


def test_a_settings_error_is_an_error_at_start() -> None:
    with pytest.raises(FileNotFoundError):
        link_to("tls://localhost:1", tls_ca="/no/such/file")


@pytest.mark.parametrize(
    "name", ["gpu1:8000", "10.0.0.1:8000", "[::1]:80", "a b*>.~é", "plain-1_x"]
)
def test_any_name_is_one_token_of_a_subject(name: str) -> None:
    token = escape(name)
    assert unescape(token) == name
    assert not set(token) & set(". *>~")
    assert Subjects("p").worker(name).count(".") == 3


def test_two_deployments_share_no_subject() -> None:
    mine, theirs = Subjects("a"), Subjects("b")
    assert mine.all_bookings != theirs.all_bookings
    assert isinstance(link_to("nats://h:1"), NatsLink)


@pytest.mark.parametrize("swallows", ["connect", "flush"])
async def test_a_stop_that_the_library_swallows_ends_the_link(
    monkeypatch: pytest.MonkeyPatch, swallows: str
) -> None:
    """Its flush does so when it is cancelled at the wrong moment, and the link ran on for ever."""
    stopping = asyncio.Event()

    async def swallow(*_: object, **__: object) -> None:
        stopping.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    monkeypatch.setattr(Client, swallows, swallow)
    async with nats_server() as server:
        task = asyncio.create_task(link_to(server.url).run())
        await asyncio.wait_for(stopping.wait(), 10)
        task.cancel()
        await asyncio.wait({task}, timeout=10)
        assert task.cancelled()
