"""Construction of several processes: their sockets, their folder, their keeper."""

import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from kvrouter.config import Config, ServerConfig
from kvrouter.http.sockets import opened, port_of
from kvrouter.processes.child import Child, start
from kvrouter.processes.joint_admin import JointAdmin, joint_admin_listening
from kvrouter.processes.seat import Seat
from kvrouter.processes.supervisor import Supervisor
from kvrouter.tls import ServerTls, admin_tls


@dataclass(frozen=True)
class Processes:
    """What is listened on, and who keeps the processes."""

    supervisor: Supervisor
    port: int
    admin_port: int
    admin_tls: ServerTls | None


@asynccontextmanager
async def processes(config: Config, arguments: Sequence[str]) -> AsyncIterator[Processes]:
    """Several routers that `kvrouter ARGUMENTS` starts; they begin with `supervisor.run`.

    Raises OSError when an address cannot be bound, and ConfigError when the files for TLS of the
    second port are not right.
    """
    to_admins = admin_tls(config.server)
    with contextlib.ExitStack() as exits:
        listeners = exits.enter_context(_listeners(config.server))
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="kvrouter-")))
        alive, keeper = os.pipe()
        exits.callback(os.close, alive)
        exits.callback(os.close, keeper)
        serial = count()

        async def start_one(number: int) -> Child:
            seat = Seat(
                number=number,
                listeners=[each.fileno() for each in listeners[number]],
                alive=alive,
                admin_path=str(folder / f"{next(serial)}.admin"),
                bus=str(folder / "bus"),
            )
            return await start(arguments, seat)

        admin = JointAdmin()
        supervisor = admin.supervisor = Supervisor(
            start_one,
            config.server.processes,
            shutdown_s=config.timeouts.shutdown_s,
            started=admin.started,
        )
        async with joint_admin_listening(admin, config.server, to_admins) as admin_port:
            yield Processes(supervisor, port_of(listeners[0]), admin_port, to_admins)


@contextlib.contextmanager
def _listeners(server: ServerConfig) -> Iterator[list[list[socket.socket]]]:
    """The sockets of each process: own ones of one port, and one common one at a path."""
    with contextlib.ExitStack() as exits:
        first = exits.enter_context(opened(server, shared=True))
        at_path = [each for each in first if each.family == socket.AF_UNIX]
        others = msgspec.structs.replace(server, port=port_of(first), unix_socket=None)
        yield [
            first,
            *(
                [*exits.enter_context(opened(others, shared=True)), *at_path]
                for _ in range(1, server.processes)
            ),
        ]
