"""A real `vllm serve` on the CPU with the tiny model, as a user would start it."""

import json
import random
import socket
from pathlib import Path
from typing import NamedTuple

from support.logged_process import LoggedProcess
from support.vllm_environment import ROOT

MODELS = ROOT / "tests" / "data"
BLOCK_SIZE = 32  # the smallest that the CPU attention of vLLM takes
BLOCKS = 64
USABLE_BLOCKS = BLOCKS - 1  # vLLM keeps block 0 as its null block
MAX_MODEL_LEN = 1024
TOPIC = "kv-events"
ENGINE_READY_TIMEOUT_S = 600.0

QUIET_AND_SMALL = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


class EnginePorts(NamedTuple):
    """Where one engine listens: HTTP, the PUB of its events, the ROUTER of their replay."""

    http: int
    events: int
    replay: int


class VllmServer(LoggedProcess):
    """One engine, `name`d in logs; `lora` adds the adapter `lora-a`."""

    def __init__(
        self, name: str, vllm: Path, *, ports: EnginePorts, log: Path, lora: bool = True
    ) -> None:
        self.ports = ports
        self.url = f"http://127.0.0.1:{ports.http}"
        super().__init__(
            name,
            [str(vllm), "serve", str(MODELS / "tinymodel"), *_options(ports), *_lora(lora)],
            ready_url=f"{self.url}/health",
            log=log,
            environment=QUIET_AND_SMALL,
        )

    @property
    def events_endpoint(self) -> str:
        """Where to subscribe."""
        return f"tcp://127.0.0.1:{self.ports.events}"

    @property
    def replay_endpoint(self) -> str:
        """Where to ask for missed batches."""
        return f"tcp://127.0.0.1:{self.ports.replay}"


def _options(ports: EnginePorts) -> list[str]:
    options = {
        "served-model-name": "tiny",
        "host": "127.0.0.1",
        "port": ports.http,
        "dtype": "bfloat16",
        "max-model-len": MAX_MODEL_LEN,
        "max-num-seqs": 8,
        "block-size": BLOCK_SIZE,
        "num-gpu-blocks-override": BLOCKS,
        "uvicorn-log-level": "warning",  # probes of /health would fill the log
        "kv-events-config": json.dumps(_events_config(ports)),
    }
    named = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [*named, "--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"]


def _events_config(ports: EnginePorts) -> dict[str, object]:
    # The PUB binds only where the endpoint has a `*`; the replay socket always binds.
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.events}",
        "replay_endpoint": f"tcp://127.0.0.1:{ports.replay}",
        "topic": TOPIC,
    }


def _lora(wanted: bool) -> list[str]:
    adapter = f"lora-a={MODELS / 'tinylora'}"
    return ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", adapter] if wanted else []


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now.

    Below the range that systems take for outgoing connections, so that an engine which is killed
    finds its port free when it comes back.
    """
    chosen: set[int] = set()
    while len(chosen) < count:
        port = random.randint(15_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue  # in use: try another
        chosen.add(port)
    return list(chosen)
