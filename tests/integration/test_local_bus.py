"""The bus between the processes of one host, on real sockets."""

import asyncio
from pathlib import Path

import pytest
from support.loops import on_uvloop
from support.streams import eventually

from events.local_bus import MAX_UNSENT_BYTES, LocalBus


class Part:
    """A process's part of the bus, and what it heard."""

    def __init__(self, directory: Path, name: str) -> None:
        self.bus = LocalBus(directory, name, look_s=0.05)
        self.heard: list[bytes] = []
        self.task = asyncio.create_task(self.bus.run(self.heard.append))

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def parts(tmp_path: Path) -> list[Part]:
    return [Part(tmp_path / "bus", name) for name in ("a", "b", "c")]


async def meet(*parts: Part) -> None:
    """Wait until each speaks to all others."""
    names = sorted(part.bus.name for part in parts)
    await eventually(
        lambda: all(sorted([*part.bus.others(), part.bus.name]) == names for part in parts)
    )


async def stop(*parts: Part) -> None:
    for part in parts:
        await part.stop()


async def test_what_is_published_is_heard_by_all_others(parts: list[Part]) -> None:
    await meet(*parts)
    for number in range(100):
        parts[0].bus.publish(b"%d" % number)
    expected = [b"%d" % number for number in range(100)]
    await eventually(lambda: parts[1].heard == expected and parts[2].heard == expected)
    assert parts[0].heard == []
    await stop(*parts)


async def test_what_is_sent_to_one_is_heard_by_that_one(parts: list[Part]) -> None:
    await meet(*parts)
    large = bytes(3_000_000)
    parts[0].bus.send("b", large)
    parts[0].bus.send("nobody", b"lost")
    parts[0].bus.publish(b"end")
    await eventually(lambda: parts[1].heard == [large, b"end"] and parts[2].heard == [b"end"])
    await stop(*parts)


async def test_a_process_that_ends_disturbs_no_other_and_may_come_back(
    parts: list[Part], tmp_path: Path
) -> None:
    """A process of `--processes N` dies and is started again."""
    await meet(*parts)
    await parts[0].stop()
    await meet(*parts[1:])
    parts[1].bus.publish(b"one")
    await eventually(lambda: parts[2].heard == [b"one"])
    again = Part(tmp_path / "bus", "a")
    await meet(again, *parts[1:])
    parts[2].bus.publish(b"two")
    await eventually(lambda: again.heard == [b"two"] and parts[1].heard == [b"two"])
    await stop(again, *parts[1:])
    assert list((tmp_path / "bus").iterdir()) == []


async def test_the_socket_of_a_dead_process_is_removed(parts: list[Part], tmp_path: Path) -> None:
    """It was killed and could not tidy up."""
    await meet(*parts)
    dead = tmp_path / "bus" / "dead.sock"
    server = await asyncio.start_unix_server(lambda *_: None, dead)
    server.close()
    if not dead.exists():  # since Python 3.13 a server takes its file along
        import socket  # noqa: PLC0415  only there

        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(dead))
    await eventually(lambda: not dead.exists())
    await stop(*parts)


async def test_what_is_no_socket_of_a_process_disturbs_none(
    parts: list[Part], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory has been used for something else, too."""
    await meet(*parts)
    (tmp_path / "bus" / "a-file.sock").write_text("")
    (tmp_path / "bus" / "folder.sock").mkdir()
    (tmp_path / "bus" / "loop.sock").symlink_to("loop.sock")
    late = Part(tmp_path / "bus", "late")
    await meet(*parts, late)
    await asyncio.sleep(0.5)
    assert not late.task.done()
    await meet(*parts, late)
    await stop(*parts, late)
    assert (tmp_path / "bus" / "a-file.sock").exists()
    assert len(caplog.records) <= 4


async def test_a_process_that_does_not_read_is_dropped_not_waited_for(tmp_path: Path) -> None:
    speaker = Part(tmp_path, "speaker")
    deaf = tmp_path / "deaf.sock"
    connected = asyncio.Event()

    async def never_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        connected.set()
        await closing.wait()
        writer.close()

    closing = asyncio.Event()
    server = await asyncio.start_unix_server(never_read, deaf, limit=1024)
    await connected.wait()
    await eventually(lambda: speaker.bus.others() == ["deaf"])
    piece = bytes(2**20)
    for _ in range(2 * MAX_UNSENT_BYTES // len(piece)):
        speaker.bus.publish(piece)
    assert speaker.bus.dropped > 0
    closing.set()
    server.close()
    await speaker.stop()


async def test_noise_on_a_socket_ends_that_connection_only(
    parts: list[Part], tmp_path: Path
) -> None:
    await meet(*parts)
    reader, writer = await asyncio.open_unix_connection(tmp_path / "bus" / "a.sock")
    writer.write(b"\xff" * 100)
    assert await reader.read() == b""
    writer.close()
    parts[1].bus.publish(b"still here")
    await eventually(lambda: parts[0].heard == [b"still here"])
    await stop(*parts)


def test_it_works_on_the_loop_that_routers_run_on(tmp_path: Path) -> None:
    async def test() -> None:
        a, b = Part(tmp_path / "bus", "a"), Part(tmp_path / "bus", "b")
        await meet(a, b)
        a.bus.publish(b"hello")
        await eventually(lambda: b.heard == [b"hello"])
        await stop(a, b)

    on_uvloop(test())
