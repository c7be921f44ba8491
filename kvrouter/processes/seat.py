"""What a process of several gets from the one that started it."""

import socket
from typing import Self

import msgspec

from kvrouter.config import Config, ConfigError


class Seat(msgspec.Struct, frozen=True):
    """One process's place."""

    number: int
    listeners: list[int]
    """Descriptors of the listening sockets for clients."""
    alive: int
    """A descriptor that is at its end when the keeper is gone."""
    admin_path: str
    """The unix socket of its own second port."""
    bus: str
    """The directory of the bus between the processes."""

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what `encode` wrote. Raises ConfigError."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--seat is not for users: {error}") from error

    def encode(self) -> str:
        """For the command line of the process."""
        return msgspec.json.encode(self).decode()

    def sockets(self) -> list[socket.socket]:
        """The listening sockets for clients."""
        return [socket.socket(fileno=each) for each in self.listeners]

    def configured(self, config: Config) -> Config:
        """The configuration with what differs between the processes."""
        replicas = config.replicas
        name = None if replicas.name is None else f"{replicas.name}-{self.number}"
        bus = replicas.local_bus or self.bus
        changed = msgspec.structs.replace(replicas, name=name, local_bus=bus)
        return msgspec.structs.replace(config, replicas=changed)
