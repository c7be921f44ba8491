"""vLLM's wire format, event by event."""

from array import array
from typing import Any

import pytest
from msgspec import msgpack

from events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
    GroupKind,
    MalformedBatch,
    SkipCause,
    Tier,
    decode_batch,
    encode_batch,
)

STORED_MAP: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
}
STORED_ARRAY: list[Any] = ["BlockStored", [1, 2], None, [5, 6, 7, 8], 2]
STORED = BlocksStored(block_hashes=[1, 2], token_ids=array("I", [5, 6, 7, 8]), block_size=2)
REMOVED_MAP: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": [2]}
REMOVED = BlocksRemoved(block_hashes=[2])
CLEARED_MAP: dict[str, Any] = {"type": "AllBlocksCleared"}


def payload(*events: object, ts: object = 1.5, rest: tuple[object, ...] = (0,)) -> bytes:
    return msgpack.encode([ts, events, *rest])


def decoded(*events: object) -> list[Event]:
    batch = decode_batch(payload(*events))
    assert batch.skipped == {}
    return batch.events


def stored(**fields: object) -> BlocksStored:
    (event,) = decoded(STORED_MAP | fields)
    assert isinstance(event, BlocksStored)
    return event


class TestShapes:
    def test_a_map_needs_only_the_fields_that_every_release_sends(self) -> None:
        """E2: the engine omits what has its default value."""
        assert decoded(STORED_MAP, REMOVED_MAP, CLEARED_MAP) == [STORED, REMOVED, BlocksCleared()]

    def test_an_array_may_end_after_the_fields_of_the_oldest_release(self) -> None:
        """E1: 0.9 has neither medium nor LoRA name nor groups."""
        assert decoded(STORED_ARRAY, ["BlockRemoved", [2]], ["AllBlocksCleared"]) == [
            STORED,
            REMOVED,
            BlocksCleared(),
        ]

    def test_maps_and_arrays_mix_in_one_batch(self) -> None:
        """E1: a relay may merge the streams of two releases."""
        assert decoded(STORED_ARRAY, REMOVED_MAP, STORED_MAP) == [STORED, REMOVED, STORED]

    def test_unknown_extra_fields_are_ignored(self) -> None:
        """E2: the next release adds a field, anywhere in the map or at the end of the array."""
        today = [None, "GPU", None, None, 0, "full_attention", None]
        longer = [*STORED_ARRAY, *today, "new", {"a": [1]}]
        assert decoded(STORED_MAP | {"new": {"a": [1]}}) == [STORED]
        assert decoded(longer) == [STORED]

    @pytest.mark.parametrize(
        ("rest", "rank"), [((), None), ((None,), None), ((3,), 3), ((3, 4), 3)]
    )
    def test_the_dp_rank_may_be_absent(self, rest: tuple[object, ...], rank: int | None) -> None:
        assert decode_batch(payload(REMOVED_MAP, rest=rest)).dp_rank == rank

    @pytest.mark.parametrize("rank", [-1, "1", 1.0, True, [0]])
    def test_a_senseless_dp_rank_counts_as_absent(self, rank: object) -> None:
        batch = decode_batch(payload(REMOVED_MAP, rest=(rank,)))
        assert (batch.dp_rank, batch.events) == (None, [REMOVED])


class TestBadEvents:
    @pytest.mark.parametrize(
        ("bad", "cause"),
        [
            ({"type": "BlockMoved", "block_hashes": [1]}, SkipCause.UNKNOWN_TYPE),
            (["BlockMoved", [1]], SkipCause.UNKNOWN_TYPE),
            ({"block_hashes": [1]}, SkipCause.UNKNOWN_TYPE),
            ({"type": 7}, SkipCause.UNKNOWN_TYPE),
            ([], SkipCause.UNKNOWN_TYPE),
            (None, SkipCause.UNKNOWN_TYPE),
            ({"type": "BlockStored", "block_hashes": [1]}, SkipCause.MISSING_FIELD),
            (["BlockStored", [1], None, [5, 6]], SkipCause.MISSING_FIELD),
            ({"type": "BlockRemoved"}, SkipCause.MISSING_FIELD),
            ({"type": "BlockRemoved", "block_hashes": 1}, SkipCause.BAD_FIELD),
            ({"type": "BlockRemoved", "block_hashes": ["a"]}, SkipCause.BAD_FIELD),
            ({"type": "BlockRemoved", "block_hashes": [1.5]}, SkipCause.BAD_FIELD),
            (REMOVED_MAP | {"medium": "TAPE"}, SkipCause.BAD_FIELD),
            (STORED_MAP | {"token_ids": [5, -6]}, SkipCause.BAD_FIELD),
            (STORED_MAP | {"token_ids": [2**32]}, SkipCause.BAD_FIELD),
            (STORED_MAP | {"block_size": -1}, SkipCause.BAD_FIELD),
            (STORED_MAP | {"extra_keys": ["salt"]}, SkipCause.BAD_FIELD),
        ],
    )
    def test_a_bad_event_is_counted_and_its_neighbours_are_kept(
        self, bad: object, cause: SkipCause
    ) -> None:
        """E2: one event that we cannot read must not cost the batch."""
        batch = decode_batch(payload(STORED_MAP, bad, REMOVED_MAP))
        assert batch.events == [STORED, REMOVED]
        assert batch.skipped == {cause: 1}

    def test_each_cause_is_counted_by_itself(self) -> None:
        unknown, missing = {"type": "New"}, {"type": "BlockRemoved"}
        batch = decode_batch(payload(unknown, unknown, missing))
        assert batch.events == []
        assert batch.skipped == {SkipCause.UNKNOWN_TYPE: 2, SkipCause.MISSING_FIELD: 1}

    @pytest.mark.parametrize(
        "noise",
        [
            b"",
            b"\x93",
            b"\xc1",
            b"\xff" * 64,
            b"\x91" * 100_000,
            b"\xdd\xff\xff\xff\xff",
            bytes(range(256)) * 4096,
            msgpack.encode(7),
            msgpack.encode([]),
            msgpack.encode([1.0]),
            msgpack.encode(["now", [], 0]),
            msgpack.encode([1.0, {}, 0]),
            msgpack.encode([1.0, [], 0]) + b"\x00",
            msgpack.encode({"ts": 1.0, "events": []}),
        ],
        ids=lambda noise: f"{noise[:12].hex()}({len(noise)})",
    )
    def test_what_is_no_batch_raises(self, noise: bytes) -> None:
        """E3: an empty payload, a truncated one, another protocol, 1 MB of noise."""
        with pytest.raises(MalformedBatch):
            decode_batch(noise)

    def test_a_broken_string_in_one_event_spares_the_others(self) -> None:
        good = payload(REMOVED_MAP, REMOVED_MAP | {"medium": "CPU"})
        batch = decode_batch(good.replace(b"CPU", b"\xff\xfe\xff"))
        assert (batch.events, batch.skipped) == ([REMOVED], {SkipCause.BAD_FIELD: 1})


class TestHashes:
    @pytest.mark.parametrize("value", [0, -1, 2**63, 2**64 - 1, -(2**63), b"\x00" * 32, b"x" * 16])
    @pytest.mark.parametrize("array", [False, True])
    def test_store_parent_and_remove_meet_on_one_name(
        self, value: int | bytes, array: bool
    ) -> None:
        """E4: signed hashes of 0.9, unsigned ones since 0.10.2, whole digests as bytes."""
        if array:
            wire: list[Any] = [["BlockStored", [value], value, [1], 1], ["BlockRemoved", [value]]]
        else:
            wire = [
                STORED_MAP | {"block_hashes": [value], "parent_block_hash": value},
                {"type": "BlockRemoved", "block_hashes": [value]},
            ]
        first, second = decoded(*wire)
        assert isinstance(first, BlocksStored)
        assert isinstance(second, BlocksRemoved)
        assert first.block_hashes == second.block_hashes == [first.parent]
        assert isinstance(first.parent, bytes) or 0 <= (first.parent or 0) < 2**64

    def test_signed_and_unsigned_hashes_mix(self) -> None:
        (event,) = decoded({"type": "BlockRemoved", "block_hashes": [-1, 1, b"ab", 2**64 - 2]})
        assert event == BlocksRemoved(block_hashes=[2**64 - 1, 1, b"ab", 2**64 - 2])


class TestTiersAndGroups:
    @pytest.mark.parametrize(
        ("medium", "tier"),
        [
            (None, Tier.GPU),
            ("GPU", Tier.GPU),
            ("CPU", Tier.CPU),
            ("cpu", Tier.CPU),
            ("STORAGE", Tier.DISK),
        ],
    )
    def test_the_medium_is_the_tier(self, medium: str | None, tier: Tier) -> None:
        """E18: a removal from the CPU tier must not look like one from the GPU."""
        (event,) = decoded(REMOVED_MAP | {"medium": medium})
        assert event == BlocksRemoved(block_hashes=[2], tier=tier)

    def test_an_offload_placeholder_is_kept_as_it_is(self) -> None:
        """E18: an offloading connector names blocks without tokens."""
        event = stored(token_ids=[], block_size=0, medium="CPU")
        assert event == BlocksStored(block_hashes=[1, 2], tier=Tier.CPU)

    @pytest.mark.parametrize(
        ("kind", "window", "group", "expected"),
        [
            ("full_attention", None, 3, GroupKind.FULL),
            ("full_attention", 128, 0, GroupKind.FULL),
            ("mla_attention", None, 0, GroupKind.FULL),
            ("sink_full_attention", None, 0, GroupKind.FULL),
            ("sliding_window", 128, 1, GroupKind.SLIDING),
            ("sliding_window_mla", 128, 1, GroupKind.SLIDING),
            ("sliding_window", None, 1, GroupKind.OPAQUE),
            ("mamba", None, 1, GroupKind.OPAQUE),
            ("chunked_local_attention", None, 1, GroupKind.OPAQUE),
            ("cross_attention", None, 1, GroupKind.OPAQUE),
            ("something_new", None, 0, GroupKind.OPAQUE),
            (None, None, None, GroupKind.FULL),
            (None, None, 0, GroupKind.FULL),
            (None, None, 2, GroupKind.OPAQUE),
        ],
    )
    def test_the_spec_kind_says_what_a_group_means(
        self, kind: str | None, window: int | None, group: int | None, expected: GroupKind
    ) -> None:
        """E15: hybrid models; releases before 0.22 don't name the kind at all."""
        event = stored(
            kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window, group_idx=group
        )
        assert (event.group_kind, event.group) == (expected, group or 0)


class TestLora:
    def test_the_name_is_taken_where_there_is_one(self) -> None:
        assert stored(lora_id=3, lora_name="sql").lora_name == "sql"

    def test_a_bare_number_never_looks_like_the_base_model(self) -> None:
        """I7: before 0.14 a LoRA's blocks carry its number alone."""
        assert stored(lora_id=3).lora_name == "#lora_id=3"

    def test_the_base_model_has_no_name(self) -> None:
        assert stored(lora_id=None, lora_name=None).lora_name is None


class TestEncoding:
    def test_a_batch_comes_back_as_it_was(self) -> None:
        batch = EventBatch(
            12.5,
            [
                BlocksStored(
                    block_hashes=[7, b"x" * 32],
                    parent=2**64 - 1,
                    token_ids=array("I", [1, 2]),
                    block_size=1,
                    tier=Tier.DISK,
                    lora_name="sql",
                    extra_keys=[["sql", "salt"], None],
                    group=2,
                    group_kind=GroupKind.SLIDING,
                    sliding_window=64,
                ),
                BlocksRemoved(block_hashes=[7], tier=Tier.CPU, group=2),
                BlocksCleared(),
            ],
            dp_rank=1,
        )
        assert decode_batch(encode_batch(batch)) == batch
        assert decode_batch(encode_batch(batch, shape="array")) == batch

    def test_an_opaque_group_stays_opaque(self) -> None:
        event = BlocksStored(block_hashes=[1], group=1, group_kind=GroupKind.OPAQUE)
        batch = EventBatch(1.0, [event])
        assert decode_batch(encode_batch(batch)) == batch
