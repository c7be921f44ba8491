"""Beside an engine: its KV events onto NATS, numbered, hashed, and with a memory."""
