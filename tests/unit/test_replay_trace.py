"""Traces, as files and made up."""

import gzip
from pathlib import Path
from random import Random

import pytest

from kvrouter.replay import Trace, TraceError, TraceRequest, pooled_bound, read_trace
from kvrouter.replay.synthetic import GENERATORS, synthetic_trace

LINES = """\
{"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 9, 4]}
{"timestamp": 0, "input_length": 600, "output_length": 0, "hash_ids": [0, 8], "more": 1}
"""


@pytest.mark.parametrize("compressed", [False, True])
def test_a_trace_is_read_in_the_order_of_arrival(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "trace"
    data = LINES.encode()
    path.write_bytes(gzip.compress(data) if compressed else data)
    trace = read_trace(path)
    assert [request.at_s for request in trace.requests] == [0.0, 1.5]
    assert [request.output_tokens for request in trace.requests] == [1, 7]
    first, second = trace.prompt(0), trace.prompt(1)
    assert (len(first), len(second)) == (600, 1100)
    assert first[:512] == second[:512]
    assert not set(first[512:]) & set(second[512:])


def test_a_prompt_longer_than_its_chunks_ends_with_tokens_of_its_own() -> None:
    trace = Trace("t", [TraceRequest(0.0, 70, 1, (5,)), TraceRequest(0.0, 70, 1, (5,))], 64)
    assert trace.prompt(0)[:64] == trace.prompt(1)[:64]
    assert not set(trace.prompt(0)[64:]) & set(trace.prompt(1)[64:])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no requests"),
        (LINES.encode() + b"{}\n", "line 3"),
        (b'{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "line 1"),
        (b'{"timestamp": 0, "input_length": 9, "output_length": -1, "hash_ids": []}', "line 1"),
        (b'{"timestamp": 1e99, "input_length": 9, "output_length": 1, "hash_ids": []}', "line 1"),
        (
            b'{"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [0]}',
            "chunk-tok",
        ),
        (
            b'{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0, 1]}',
            "1: 2 hash",
        ),
        (b"\x1f\x8bbroken", "cannot be read"),
        pytest.param(gzip.compress(LINES.encode())[:-9], "cannot be read", id="gzip cut off"),
        pytest.param(
            gzip.compress(LINES.encode())[:12] + b"\xff\xff\xff\xff",
            "cannot be read",
            id="bad gzip",
        ),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


@pytest.mark.parametrize("hash_ids", ["[]", "[7, 8]", "[7, 8, 9]"])
def test_the_end_of_a_prompt_may_have_an_id_or_not(tmp_path: Path, hash_ids: str) -> None:
    path = tmp_path / "trace"
    line = '{"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": %s}'
    path.write_text(line % hash_ids)
    assert len(read_trace(path).prompt(0)) == 1100


def test_a_byte_order_mark_is_no_part_of_the_trace(tmp_path: Path) -> None:
    """Some editors and exports put one in front."""
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbf" + LINES.encode())
    assert len(read_trace(path)) == 2


def test_a_request_that_no_worker_can_hold_is_told_before_anything_runs() -> None:
    trace = Trace("t", [TraceRequest(0.0, 10**12, 10, (1,))])
    with pytest.raises(TraceError, match="1000000000000 prompt and 10 output tokens"):
        trace.check_lengths(1_048_576)
    trace.check_lengths(10**12 + 10)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_without_reuse_nothing_is_shared() -> None:
    requests = [TraceRequest(0.0, 128, 1, (1, 2)), TraceRequest(1.0, 128, 1, (1, 2))]
    trace = Trace("t", requests, 64)
    assert pooled_bound(trace, total_blocks=100, block_size=16) == pytest.approx(112 / 256)
    assert pooled_bound(trace.without_reuse(), total_blocks=100, block_size=16) == 0.0


def test_one_big_cache_forgets_what_does_not_fit() -> None:
    requests = [TraceRequest(float(at), 64, 1, (chunk,)) for at, chunk in enumerate([1, 2, 3, 1])]
    trace = Trace("t", requests, 64)
    assert pooled_bound(trace, total_blocks=12, block_size=16) == pytest.approx(48 / 256)
    assert pooled_bound(trace, total_blocks=8, block_size=16) == 0.0


@pytest.mark.parametrize("kind", GENERATORS)
def test_synthetic_traces_have_the_length_and_rate_asked_for(kind: str) -> None:
    trace = synthetic_trace(kind, requests=1500, rate=20.0, rng=Random(1))
    assert len(trace) == 1500
    duration_s = trace.requests[-1].at_s
    assert 0.5 < 1500 / duration_s / 20.0 < 2.0
    again = synthetic_trace(kind, requests=1500, rate=20.0, rng=Random(1))
    assert again.requests == trace.requests


@pytest.mark.parametrize("kind", GENERATORS)
def test_only_unique_prompts_share_nothing(kind: str) -> None:
    trace = synthetic_trace(kind, requests=200, rate=20.0, rng=Random(1))
    bound = pooled_bound(trace, total_blocks=100_000, block_size=64)
    assert bound == 0.0 if kind == "unique" else bound > 0.2


def test_an_unknown_kind_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'x'.*chat, rag"):
        synthetic_trace("x", requests=1, rate=1.0, rng=Random(1))
