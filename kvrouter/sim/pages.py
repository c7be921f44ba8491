"""What a simulated engine says about itself, in vLLM's words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrouter.sim.rank import Rank
from kvrouter.sim.settings import SimSettings

VERSION = "0.32.0+kvrouter.sim"


def models(settings: SimSettings, created: int) -> dict[str, Any]:
    """Return `/v1/models`: the base model, whose root is the tokenizer's folder, and adapters."""
    limit = settings.core.max_model_len
    base = _model(settings.model, _root(settings), None, limit, created)
    adapters = [_model(name, name, settings.model, None, created) for name in settings.loras]
    return {"object": "list", "data": [base, *adapters]}


def _root(settings: SimSettings) -> str:
    """Return where the model comes from; a folder by its full path, for readers elsewhere."""
    if settings.tokenizer is None:
        return settings.model
    folder = Path(settings.tokenizer)
    return str(folder.resolve()) if folder.is_dir() else settings.tokenizer


def _model(
    name: str, root: str, parent: str | None, limit: int | None, created: int
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": limit,
        "permission": [],
    }


def event_sources(settings: SimSettings, ranks: Sequence[Rank]) -> dict[str, Any]:
    """Return `/kv_event_sources`: where each rank publishes."""
    return {str(rank.number): _source(settings, rank) for rank in ranks}


def _source(settings: SimSettings, rank: Rank) -> dict[str, Any]:
    events, replay = rank.ports
    return {
        "enable_kv_cache_events": events is not None,
        "publisher": "null" if events is None else "zmq",
        "endpoint": f"tcp://*:{events or 5557}",
        "replay_endpoint": None if replay is None else f"tcp://*:{replay}",
        "buffer_steps": settings.buffer_steps,
        "hwm": 100_000,
        "max_queue_size": 100_000,
        "topic": settings.topic,
    }


def metrics(settings: SimSettings, ranks: Sequence[Rank]) -> str:
    """Return `/metrics` in Prometheus' text form."""
    lines: list[str] = []
    for name, kind in _METRICS.items():
        lines += [f"# HELP vllm:{name} Simulated.", f"# TYPE vllm:{name} {kind}"]
        for rank in ranks:
            value = _values(rank)[name]
            lines.append(f"vllm:{name}{{{_labels(settings, rank)}}} {float(value)}")
    lines += ["# HELP vllm:cache_config_info Simulated.", "# TYPE vllm:cache_config_info gauge"]
    lines += [f"vllm:cache_config_info{{{_cache_labels(settings, rank)}}} 1.0" for rank in ranks]
    return "\n".join(lines) + "\n"


_METRICS = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "num_preemptions_total": "counter",
    "request_success_total": "counter",
}


def _values(rank: Rank) -> dict[str, float]:
    core, counters = rank.core, rank.core.counters
    return {
        "num_requests_running": core.running,
        "num_requests_waiting": core.waiting,
        "kv_cache_usage_perc": core.usage,
        "prefix_cache_queries_total": counters.queried_tokens,
        "prefix_cache_hits_total": counters.hit_tokens,
        "prompt_tokens_total": counters.prompt_tokens,
        "generation_tokens_total": counters.output_tokens,
        "num_preemptions_total": counters.preempted,
        "request_success_total": counters.finished,
    }


def _labels(settings: SimSettings, rank: Rank) -> str:
    return f'engine="{rank.number}",model_name="{_escaped(settings.model)}"'


def _cache_labels(settings: SimSettings, rank: Rank) -> str:
    core = settings.core
    return (
        f'block_size="{core.block_size}",enable_prefix_caching="True",engine="{rank.number}",'
        f'num_gpu_blocks="{core.num_blocks}",prefix_caching_hash_algo="sha256",'
        f'sliding_window="None"'
    )


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
