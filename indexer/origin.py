"""What an engine says besides tokens: LoRA name and extra keys -> our root and per-block extras.

An engine puts the LoRA name on every block and the cache salt on the first block only; both belong
to the namespace. All else (an image's identifier and offset, prompt embeddings) belongs to the one
block it stands on, and by the chain of hashes to all blocks behind it, so that no plain prompt
matches them.
"""

from typing import Any

from msgspec import msgpack

from events import BlocksStored
from indexer.hashing import namespace, root


def origin(event: BlocksStored) -> bytes:
    """The root of an event that starts at the first token."""
    salt = _salt(event) if event.extra_keys else None
    return root(namespace(lora=event.lora_name, salt=salt))


def extras(event: BlocksStored) -> list[bytes]:
    """What each block has beyond tokens and namespace; empty where no block has anything."""
    if event.extra_keys is None or not any(event.extra_keys):
        return []
    in_namespace = (event.lora_name, _salt(event) if event.parent is None else None)
    count = len(event.block_hashes)
    keys = [_others(entry, in_namespace) for entry in event.extra_keys[:count]]
    return [msgpack.encode(key) if key else b"" for key in keys] + [b""] * (count - len(keys))


def _salt(event: BlocksStored) -> str | None:
    """The last text on the first block that is not the LoRA name.

    Engines before 0.19 name an image by a bare text too, before the salt. Such a text taken for a
    salt still keeps plain prompts away, which is all that it has to do.
    """
    first = event.extra_keys[0] if event.extra_keys else None
    texts = [key for key in first or () if isinstance(key, str) and key != event.lora_name]
    return texts[-1] if texts else None


def _others(entry: list[Any] | None, in_namespace: tuple[str | None, ...]) -> list[Any]:
    return [key for key in entry or () if not (isinstance(key, str) and key in in_namespace)]
