"""The three-node cluster of deploy/nats on free ports, and a network that can be cut."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from kvrouter.demo.nats_server import NatsServer
from kvrouter.demo.processes import free_port

DEPLOYED = Path(__file__).parent.parent.parent / "deploy" / "nats"
ROUTER = {"user": "router", "password": "router-secret"}
RELAY = {"user": "relay", "password": "relay-secret"}


def node(folder: Path, number: int, cluster_ports: list[int]) -> NatsServer:
    """Node `number` of a cluster with these ports."""
    port = free_port()
    environment = {
        "NODE_NAME": f"node-{number}",
        "HOST": "127.0.0.1",
        "CLIENT_PORT": str(port),
        "CLUSTER_PORT": str(cluster_ports[number]),
        "MONITOR": f"127.0.0.1:{free_port()}",
        "ROUTER_PASSWORD": ROUTER["password"],
        "RELAY_PASSWORD": RELAY["password"],
        "CLUSTER_PASSWORD": "route-secret",
    }
    for at, cluster_port in enumerate(cluster_ports, 1):
        environment[f"ROUTE_{at}"] = f"nats://route:route-secret@127.0.0.1:{cluster_port}"
    config = ("--config", str(folder / "node.conf"))
    return NatsServer(*config, port=port, environment=environment)


@asynccontextmanager
async def cluster(folder: Path = DEPLOYED, nodes: int = 3) -> AsyncIterator[list[NatsServer]]:
    """Nodes with the configuration in `folder`, while the block runs."""
    ports = [free_port() for _ in range(3)]
    servers = [node(folder, number, ports) for number in range(nodes)]
    async with AsyncExitStack() as exits:
        for server in servers:
            await server.start()
            exits.push_async_callback(server.stop)
        yield servers


class Wire:
    """A TCP connection to a server that can be cut: nothing passes, and nobody is told."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen; gives the URL to use in place of the server's."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    async def stop(self) -> None:
        self._open.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._open.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self._to_port)
            with contextlib.closing(back):
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, back))
                    group.create_task(self._pump(there, writer))
        except* OSError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        writer.close()
