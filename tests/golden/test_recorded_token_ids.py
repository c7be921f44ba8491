"""Token ids of recorded requests are those that the real engine used.

The captures hold, for many requests, what the engine itself said about the prompt: its
`/tokenize`, `prompt_token_ids` in the response, the answers of its render endpoints, and the
number of prompt tokens in each usage.
"""

import json
from collections import Counter
from functools import cache
from typing import Any

import pytest
from support import captures
from support.captures import RecordedRequest

from kvrouter.openai.body import Endpoint, parse_body
from kvrouter.prompt import Fidelity, Prompt
from kvrouter.tokenize import ModelTokenizer

DATA = captures.FOLDER.parent
KINDS = {path: Endpoint(path) for path in map(str, Endpoint)}
KINDS |= {f"{path}/render": kind for path, kind in KINDS.items()}
# How many lists of ids, and how many counts of tokens, each capture lets us compare.
COMPARED = {
    "a_single": (12, 12),
    "a_single_bs16": (12, 12),
    "b_repeat": (22, 19),
    "c2_chat_roundtrip": (8, 5),
    "c_chat": (8, 5),
    "d2_dup": (10, 11),
    "d_evict": (16, 17),
    "d_evict_bs16": (16, 17),
    "e_reset": (4, 4),
    "f_salt": (9, 9),
    "g_lora": (10, 10),
    "h_restart": (5, 5),
    "i_replay": (30, 30),
    "j_dp": (16, 16),
    "k_hash_sha256_cbor_int0": (3, 3),
    "k_hash_sha256_cbor_int1": (3, 3),
    "k_hash_sha256_int0": (3, 3),
    "k_hash_sha256_int1_seed0": (3, 3),
    "k_hash_xxhash_cbor_int1_seed0": (3, 3),
    "l_chatforms": (18, 11),
    "l_chatforms_parts_template": (18, 11),
    "m_batch": (10, 9),
    "p_chunked": (6, 7),
    "q_scaleout": (4, 1),
    "r_hwm_replay": (0, 0),
    "s_swa": (15, 16),
    "t_connect": (2, 2),
    "t_connect_2": (1, 1),
    "v_report_full": (6, 7),
    "w2_concurrent": (362, 363),
    "y_pretokenized": (9, 5),
    "z_death": (1, 1),
}


@cache
def tokenizer(*, parts: bool = False) -> ModelTokenizer:
    template = DATA / "tinymodel" / "chat_template_parts.jinja" if parts else None
    return ModelTokenizer.load(str(DATA / "tinymodel"), chat_template=template)


def ours(name: str, request: RecordedRequest) -> Prompt:
    body = parse_body(KINDS[request.path], json.dumps(request.body).encode())
    return tokenizer(parts=name == "l_chatforms_parts_template").prompt(body)


def asked(name: str) -> list[RecordedRequest]:
    return [r for r in captures.load(name).requests if r.path in KINDS and r.body]


def recorded_ids(request: RecordedRequest) -> list[list[int]]:
    """What the engine said about the (first) prompt: ids from up to three places."""
    found = [request.prompt_ids, *rendered_ids(request.response)]
    replaced = (request.body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if not replaced:
        found.append(request.tokenize_ids)
    return [ids for ids in found if ids]


def rendered_ids(response: Any) -> list[list[int]]:
    answers = response if isinstance(response, list) else [response]
    return [answer["token_ids"] for answer in answers if answer and "token_ids" in answer]


def counted_tokens(request: RecordedRequest) -> int | None:
    """Prompt tokens by the usage; Anthropic's excludes the cached ones."""
    usage = request.usage or {}
    if "cache_read_input_tokens" in usage:
        return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
    count = usage.get("prompt_tokens", usage.get("input_tokens"))
    return None if count is None else int(count)


def has_several_prompts(request: RecordedRequest) -> bool:
    prompt = request.body.get("prompt")
    return isinstance(prompt, list) and not isinstance(prompt[0], int)


@pytest.mark.parametrize("name", COMPARED)
def test_ids_equal_the_engines(name: str) -> None:
    """T1, T3, T5: every form of chat and completion that was recorded."""
    checked: Counter[str] = Counter()
    for request in asked(name):
        prompt = ours(name, request)
        for ids in recorded_ids(request):
            assert list(prompt.token_ids) == ids, request.tag
            checked["ids"] += 1
        if (count := counted_tokens(request)) is not None:
            assert prompt.prompt_tokens == count, request.tag
            checked["counts"] += 1
            assert prompt.fidelity is (
                Fidelity.APPROXIMATE if has_several_prompts(request) else Fidelity.EXACT
            )
    assert (checked["ids"], checked["counts"]) == COMPARED[name]


def test_every_capture_is_compared() -> None:
    recorded = [name for name in captures.names() if not name.startswith("legacy_")]
    assert sorted(COMPARED) == recorded
