"""The router before real engines: `kvrouter serve`, and what its second port says.

The names of the second port's fields stand in this module alone.
"""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from support.logged_process import LoggedProcess

EXPLAIN = {"x-kvrouter-explain": "1"}
WORKER_HEADER = "x-kvrouter-worker"
PREDICTED_HEADER = "x-kvrouter-predicted-cached-tokens"
PROOF_METRICS = "kvrouter_proof_"
ROUTER_READY_TIMEOUT_S = 60.0
SEND_IDS = os.environ.get("KVROUTER_TEST_SEND_IDS") == "1"
"""Whether the routers of all these tests send token ids on to the engines."""


class RouterProcess(LoggedProcess):
    """One router; ready as soon as it can route to a worker."""

    def __init__(
        self,
        workers: Sequence[str],
        *,
        port: int,
        admin_port: int,
        log: Path,
        send_ids: bool = SEND_IDS,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        named = [part for url in workers for part in ("--worker", url)]
        ports = ["--port", str(port), "--admin-port", str(admin_port)]
        if send_ids:
            config = log.with_suffix(".toml")
            config.write_text('[tokenizer]\nsend_ids = ["tiny"]\n')
            ports += ["--config", str(config)]
        super().__init__(
            "router",
            [str(Path(sys.executable).with_name("kvrouter")), "serve", *named, *ports],
            ready_url=f"{self.admin_url}/ready",
            log=log,
        )


@dataclass(frozen=True)
class RankView:
    """What the router knows of a worker's only rank."""

    worker_state: str
    stream_state: str
    view: str
    last_seqno: int
    blocks: int


class Admin:
    """A client of the router's second port."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def ranks(self) -> dict[str, RankView]:
        """By worker name."""
        async with self._http.get(f"{self._url}/workers") as response:
            response.raise_for_status()
            answer = await response.json()
        return {worker["name"]: _rank_view(worker) for worker in answer["workers"]}

    async def explain(self, path: str, body: dict[str, Any]) -> tuple[str, dict[str, int]]:
        """The winner for this body, and the predicted cached tokens by worker; sends nothing."""
        async with self._http.post(
            f"{self._url}/explain", params={"path": path}, json=body
        ) as response:
            response.raise_for_status()
            answer = await response.json()
        predicted = {each["worker"]: _predicted_tokens(each) for each in answer["candidates"]}
        return answer["winner"]["worker"], predicted

    async def prompts_sent_as_ids(self) -> int:
        """So far."""
        async with self._http.get(f"{self._url}/metrics") as response:
            response.raise_for_status()
            text = await response.text()
        samples = (
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "kvrouter_prompts_sent_as_ids_total"
        )
        return int(next(samples).value)

    async def proof(self) -> Counter[str]:
        """The counters of predictions against reports, over all workers, from /metrics."""
        async with self._http.get(f"{self._url}/metrics") as response:
            response.raise_for_status()
            text = await response.text()
        counted: Counter[str] = Counter()
        for family in text_string_to_metric_families(text):
            if family.name.startswith(PROOF_METRICS):
                values = (s.value for s in family.samples if s.name.endswith("_total"))
                counted[family.name.removeprefix(PROOF_METRICS)] = int(sum(values))
        return counted


def _rank_view(worker: dict[str, Any]) -> RankView:
    (rank,) = worker["ranks"]
    last_seqno = rank["events"]["last_seqno"]
    return RankView(
        worker_state=worker["state"],
        stream_state=rank["events"]["stream"],
        view=rank["view"],
        last_seqno=-1 if last_seqno is None else last_seqno,
        blocks=rank["blocks"],
    )


def _predicted_tokens(candidate: dict[str, Any]) -> int:
    blocks = candidate["overlap_blocks"]["gpu"] + candidate["predicted_blocks"]
    return int(blocks * candidate["block_size"])
