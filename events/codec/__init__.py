"""Payload bytes <-> `EventBatch`, one module for each engine's wire format."""

from events.codec.vllm import MalformedBatch, decode_batch, encode_batch

__all__ = ["MalformedBatch", "decode_batch", "encode_batch"]
