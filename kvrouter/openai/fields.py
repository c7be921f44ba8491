"""The fields of a request body that are read, as `msgspec` decodes them.

In a module of its own, which is not compiled: `msgspec.Struct` needs the class as Python makes it.
"""

from operator import attrgetter
from typing import Any, cast

import msgspec
from msgspec import Raw

NOTHING = Raw()


class Fields(msgspec.Struct, gc=False):
    """The fields that are read, each as the bytes it came in; `NOTHING` where absent."""

    add_generation_prompt: Raw = NOTHING
    add_special_tokens: Raw = NOTHING
    cache_salt: Raw = NOTHING
    chat_template: Raw = NOTHING
    chat_template_kwargs: Raw = NOTHING
    continue_final_message: Raw = NOTHING
    documents: Raw = NOTHING
    echo: Raw = NOTHING
    input: Raw = NOTHING
    instructions: Raw = NOTHING
    kv_transfer_params: Raw = NOTHING
    logprobs: Raw = NOTHING
    max_completion_tokens: Raw = NOTHING
    max_output_tokens: Raw = NOTHING
    max_tokens: Raw = NOTHING
    messages: Raw = NOTHING
    model: Any = NOTHING  # small, and always asked for
    n: Raw = NOTHING
    output_config: Raw = NOTHING
    previous_response_id: Raw = NOTHING
    prompt: Raw = NOTHING
    prompt_embeds: Raw = NOTHING
    prompt_logprobs: Raw = NOTHING
    reasoning: Raw = NOTHING
    reasoning_effort: Raw = NOTHING
    session_id: Raw = NOTHING
    stream: Raw = NOTHING
    stream_options: Raw = NOTHING
    suffix: Raw = NOTHING
    system: Raw = NOTHING
    thinking: Raw = NOTHING
    tool_choice: Raw = NOTHING
    tools: Raw = NOTHING
    top_logprobs: Raw = NOTHING
    truncate_prompt_tokens: Raw = NOTHING
    truncation: Raw = NOTHING
    truncation_side: Raw = NOTHING
    use_beam_search: Raw = NOTHING
    vllm_xargs: Raw = NOTHING


DecodedFields = cast(
    "type[Fields]",
    msgspec.defstruct(
        "DecodedFields",
        [(name, Any, NOTHING) for name in Fields.__struct_fields__],
        bases=(Fields,),
        gc=False,
    ),
)
"""The same, each as its value."""

SCAN = msgspec.json.Decoder(Fields)
READ = msgspec.json.Decoder(DecodedFields)

beside_messages = attrgetter(
    *("add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs"),
    *("continue_final_message", "documents", "kv_transfer_params", "reasoning_effort"),
    *("tool_choice", "tools", "truncate_prompt_tokens"),
)
"""What of an OpenAI chat, besides its messages, its prompt may depend on."""
NOTHING_BESIDE = beside_messages(Fields())
