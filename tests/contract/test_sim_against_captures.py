"""The simulated engine's core does what a recorded vLLM did: same events, same cached tokens.

The recorded requests are given to the core with their recorded outputs; block hashes are compared
as names (the simulator's values are its own). Left out, because the recording lacks what a core
would need:

- `s_swa`: a hybrid model; the simulator has one full-attention group.
- `w2_concurrent`: eight clients at once; the step in which each request arrived is not on record.
- `q_scaleout`: the server's flags are not on record.
- `r_hwm_replay`, `t_connect_2` (but its last request): the requests are not on record.
- `z_death`, `i_replay`: only up to the last request on record, `l_chatforms*` up to
  `/v1/responses`, whose token ids are not on record; `e_reset` from its first reset on.
- `legacy_*`: re-encoded from captures that are compared already.
"""

import pytest
from support.captures import load
from support.sim_replay import Replay, compare, lives, settings_of

COMPARED_BATCHES = {
    "a_single": 12,
    "a_single_bs16": 15,
    "b_repeat": 15,
    "c2_chat_roundtrip": 17,
    "c_chat": 9,
    "d2_dup": 14,
    "d_evict": 11,
    "d_evict_bs16": 15,
    "e_reset": 33,
    "f_salt": 6,
    "g_lora": 7,
    "h_restart": 7,
    "i_replay": 30,
    "j_dp": 11,
    "k_hash_sha256_cbor_int0": 2,
    "k_hash_sha256_cbor_int1": 2,
    "k_hash_sha256_int0": 2,
    "k_hash_sha256_int1_seed0": 2,
    "k_hash_xxhash_cbor_int1_seed0": 2,
    "l_chatforms": 7,
    "l_chatforms_parts_template": 6,
    "m_batch": 10,
    "p_chunked": 17,
    "t_connect": 2,
    "v_report_full": 7,
    "y_pretokenized": 2,
    "z_death": 1,
}


@pytest.mark.parametrize("name", COMPARED_BATCHES)
def test_the_core_makes_the_recorded_batches_and_finds_the_recorded_cached_tokens(
    name: str,
) -> None:
    """Tests, demo and benches stand on the simulator, so it must be honest."""
    capture = load(name)
    batches = 0
    for life in lives(capture):
        replay = Replay(settings_of(capture), life)
        assert compare(life.recorded, replay.run.batches) == ""
        for request, cached in replay.cached:
            assert request.cached_tokens in (cached, None), request.tag
        batches += len(life.recorded)
    assert batches == COMPARED_BATCHES[name]
