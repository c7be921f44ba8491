"""Sending a prompt's token ids to the engine, so that it need not tokenize again.

A completion's `prompt` is replaced by its ids. A chat keeps all it has and gets
`kv_transfer_params.prompt_token_ids`, which the engine takes in place of the rendered messages; it
still validates the request, and parses tools and reasoning as before.

Where the engine would answer differently, the text is sent: it echoes or rates the prompt's own
text, cuts it, or searches on from it.
"""

from array import array

import msgspec

from kvrouter.openai.body import Endpoint, RequestBody
from kvrouter.openai.rewrite import with_member, with_value

_IN_THE_WAY = (
    *("echo", "logprobs", "top_logprobs", "prompt_logprobs", "use_beam_search"),
    *("suffix", "truncate_prompt_tokens", "truncation_side", "prompt_embeds"),
    "kv_transfer_params",  # somebody else's
)


def may_send_ids(request: RequestBody) -> bool:
    """Whether the engine answers the same when it gets ids for this request."""
    for name in _IN_THE_WAY:
        value = request.get(name)
        if value is not None and value is not False:  # 0 log probabilities are wanted, too
            return False
    if request.endpoint is Endpoint.COMPLETIONS:
        return isinstance(request.prompt, str)
    # Beside a null the ids would be the second member of that name, and which counts is not said.
    return request.endpoint is Endpoint.CHAT and not request.raw("kv_transfer_params")


def with_prompt_ids(body: bytes, endpoint: Endpoint, ids: "array[int]") -> bytes:
    """The body with these ids as its prompt, every other byte as it came."""
    written = msgspec.json.encode(ids.tolist())
    if endpoint is Endpoint.COMPLETIONS:
        return with_value(body, "prompt", written)
    return with_member(body, "kv_transfer_params", b'{"prompt_token_ids":' + written + b"}")
