"""The hash rule is a contract: stored and exchanged hashes must mean the same in every release."""

import json
from pathlib import Path
from typing import Any

import pytest

from indexer import block_hashes, namespace
from indexer.hashing import RULE_VERSION, chain, root

VECTORS = json.loads((Path(__file__).parent.parent / "data/golden/hash_vectors.json").read_text())


def test_the_vectors_are_those_of_the_current_rule() -> None:
    assert VECTORS["rule_version"] == RULE_VERSION


@pytest.mark.parametrize("vector", VECTORS["plain"])
def test_plain_blocks_have_the_recorded_hashes(vector: dict[str, Any]) -> None:
    space = namespace(**vector["namespace"])
    assert space.hex() == vector["namespace_bytes"]
    found = block_hashes(vector["token_ids"], vector["block_size"], space)
    assert found.hex() == "".join(vector["hashes"])


@pytest.mark.parametrize("vector", VECTORS["with_extras"])
def test_blocks_with_extras_have_the_recorded_hashes(vector: dict[str, Any]) -> None:
    extras = [bytes.fromhex(extra) for extra in vector["extras"]]
    found = chain(root(b""), vector["token_ids"], vector["block_size"], extras)
    assert found.hex() == "".join(vector["hashes"])
