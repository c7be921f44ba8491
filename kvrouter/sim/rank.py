"""One data-parallel rank of a simulated engine: its core, its driver and its event publisher."""

import asyncio
import contextlib
import time

import zmq.asyncio

from events import Event, EventBatch, encode_batch
from events.zmq_publisher import ZmqPublisher
from kvrouter.sim.driver import Driver
from kvrouter.sim.engine import EngineCore
from kvrouter.sim.faults import Faults
from kvrouter.sim.settings import SimSettings

Ports = tuple[int | None, int | None]


class Rank:
    """Runs from `start` to `stop`; a restart of the engine makes a new one.

    `ports` (events, replay) may be 0 for any free one; afterwards it has the real ones. None means
    that there is no such socket.
    """

    def __init__(
        self,
        settings: SimSettings,
        number: int,
        ports: Ports,
        faults: Faults,
        context: zmq.asyncio.Context,
    ) -> None:
        self.number = number
        self.core = EngineCore(settings.core)
        self.driver = Driver(
            self.core, settings.timing, speed=settings.speed, faults=faults, publish=self._publish
        )
        self.ports: Ports = (None, None)
        self._publisher: _LossyPublisher | None = None
        if ports[0] is not None:
            self._publisher = _publisher(settings, ports, faults, context)
            self.ports = (_port(self._publisher.endpoint), _port(self._publisher.replay_endpoint))
        self._lora_ids = {name: i for i, name in enumerate(settings.loras, start=1)}
        self._task: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """What an engine's own balancer looks at: waiting requests count four times."""
        return self.core.running + 4 * self.core.waiting

    def start(self) -> None:
        """Start stepping and answering replay requests."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; running requests learn that the engine is dead."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.driver.run())
                if self._publisher is not None:
                    tasks.create_task(self._publisher.run())
        finally:
            self.driver.die()
            if self._publisher is not None:
                self._publisher.close()

    def _publish(self, events: list[Event]) -> None:
        if self._publisher is not None:
            batch = EventBatch(time.time(), events, self.number)
            self._publisher.publish(encode_batch(batch, lora_ids=self._lora_ids))


class _LossyPublisher(ZmqPublisher):
    """A publisher that loses batches on the way when told so; replays have them."""

    faults: Faults | None = None

    def _send(self, seqno: int, payload: bytes) -> None:
        if self.faults is not None and self.faults.drop_batches > 0:
            self.faults.drop_batches -= 1
        else:
            super()._send(seqno, payload)


def _publisher(
    settings: SimSettings, ports: Ports, faults: Faults, context: zmq.asyncio.Context
) -> _LossyPublisher:
    events, replay = ports
    publisher = _LossyPublisher(
        _address(events),
        replay_endpoint=None if replay is None else _address(replay),
        topic=settings.topic,
        buffer_steps=settings.buffer_steps,
        context=context,
    )
    publisher.faults = faults
    return publisher


def _address(port: int | None) -> str:
    """Return what to bind: a given port on all interfaces, as vLLM must, any free one on loopback.

    Publishers of this kind connect, instead of binding, to an address without a wildcard.
    """
    return f"tcp://*:{port}" if port else "tcp://127.0.0.1:*"


def _port(endpoint: str | None) -> int | None:
    return None if endpoint is None else int(endpoint.rpartition(":")[2])
