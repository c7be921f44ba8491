"""The publisher against what was recorded of a real engine's sockets."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from support import captures
from support.streams import FaultyPublisher, running

from events.zmq_publisher import ZmqPublisher, rank_endpoint

END = b"\xff" * 8


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def ask(context: zmq.asyncio.Context, endpoint: str, *request: bytes) -> list[list[bytes]]:
    """The replies to one request, up to the end marker or until none comes for 0.3 s."""
    replies: list[list[bytes]] = []
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        await dealer.send_multipart(request)
        while await dealer.poll(300):
            replies.append(await dealer.recv_multipart())
            if replies[-1][-2] == END:
                break
    return replies


@pytest.fixture
async def replaying(context: zmq.asyncio.Context, tmp_path: Path) -> AsyncIterator[ZmqPublisher]:
    """A publisher with the history of the recorded engine: 30 batches, of which it keeps 16."""
    recorded = [event for event in captures.load("i_replay").events if event.seqno < 30]
    publisher = ZmqPublisher(
        f"ipc://{tmp_path}/e",
        replay_endpoint=f"ipc://{tmp_path}/r",
        topic=recorded[0].topic.decode(),
        buffer_steps=16,
        context=context,
    )
    for event in recorded:
        assert publisher.publish(event.payload) == event.seqno
    async with running(publisher):
        yield publisher
    publisher.close()


RECORDED = captures.load("i_replay").replays
WITH_30 = [replay for replay in RECORDED if replay.tag not in {"", "while events flow"}]


@pytest.mark.parametrize("replay", WITH_30, ids=lambda replay: replay.tag)
async def test_each_recorded_replay_request_gets_the_recorded_replies(
    context: zmq.asyncio.Context, replaying: ZmqPublisher, replay: captures.RecordedReplay
) -> None:
    """E9: older than the buffer, beyond the newest, malformed: what a real engine answered."""
    assert replaying.replay_endpoint is not None
    assert await ask(context, replaying.replay_endpoint, *replay.request) == replay.replies


async def test_replies_may_leave_the_topic_out(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    """E7: engines before 0.26."""
    publisher = ZmqPublisher(
        f"ipc://{tmp_path}/e",
        replay_endpoint=f"ipc://{tmp_path}/r",
        topic="t",
        replay_topic=False,
        context=context,
    )
    publisher.publish(b"x")
    async with running(publisher):
        replies = await ask(context, f"ipc://{tmp_path}/r", b"", b"\x00" * 8)
    publisher.close()
    assert replies == [[b"", b"\x00" * 8, b"x"], [b"", END, b""]]


async def test_messages_are_topic_seqno_payload(context: zmq.asyncio.Context) -> None:
    publisher = FaultyPublisher("tcp://127.0.0.1:*", topic="kv-events", context=context)
    assert not publisher.endpoint.endswith("*")
    with context.socket(zmq.XSUB) as sub:
        sub.connect(publisher.endpoint)
        await sub.send(b"\x01kv")
        frames: list[bytes] = []
        while not frames:
            seqno = publisher.publish(b"body")
            if await sub.poll(10):
                frames = await sub.recv_multipart()
    publisher.close()
    assert frames[0] == b"kv-events"
    assert int.from_bytes(frames[1], "big") <= seqno
    assert len(frames[1]) == 8
    assert frames[2:] == [b"body"]


def test_a_port_in_use_is_an_error_that_leaks_no_socket(context: zmq.asyncio.Context) -> None:
    """E17: the events port of rank 1 is the replay port of rank 0."""
    with context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(zmq.ZMQError, match="in use"):
            ZmqPublisher(
                "tcp://127.0.0.1:*", replay_endpoint=f"tcp://127.0.0.1:{port}", context=context
            )
    context.term()


@pytest.mark.parametrize(
    ("endpoint", "dp_rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("inproc://events", 2, "inproc://events_dp2"),
        ("ipc:///tmp/events", 0, "ipc:///tmp/events"),
    ],
)
def test_ranks_count_up_from_the_port(endpoint: str, dp_rank: int, expected: str) -> None:
    """E17"""
    assert rank_endpoint(endpoint, dp_rank) == expected


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/events", "tcp://*:*", "tcp://host"])
def test_some_endpoints_cannot_be_shared_by_ranks(endpoint: str) -> None:
    with pytest.raises(ValueError, match="dp rank 1"):
        rank_endpoint(endpoint, 1)
