"""What is configured reaches the part that it is for."""

from pathlib import Path
from typing import Any

import pytest
from support.fleets import BASE, join
from support.prompts import prompt_of, unique_prompt

from events import BlocksStored, EventBatch, Tier, WorkerRank
from kvrouter.config import Config, ConfigError, parse_config
from kvrouter.fleet import Fleet
from kvrouter.load import Load, Outcome
from kvrouter.sharing import share
from kvrouter.wiring import new_fleet, source_settings
from kvrouter.workers import WorkerFacts


def configured(**tables: dict[str, Any]) -> Config:
    return parse_config({"workers": [{"url": "http://a:1"}], **tables})


def fleet_of(config: Config) -> tuple[Fleet, WorkerRank]:
    fleet = new_fleet(config, Load(), None)
    return fleet, join(fleet, "a")


def test_predictions_last_as_long_as_is_configured() -> None:
    fleet, rank = fleet_of(configured(prediction={"blind_ttl_s": 5.0}))
    scheduler = fleet.pools["m"].scheduler
    prompt = unique_prompt(1, 33)
    scheduler.place(prompt, [rank], 0.0).lease.settle(Outcome.OK, 0.0)
    assert scheduler.decide(prompt, [rank], 4.9).chosen.held_blocks > 0
    assert scheduler.decide(prompt, [rank], 5.1).chosen.held_blocks == 0


def test_a_directory_that_can_not_hold_the_local_bus_is_told_at_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for directory, problem in ((tmp_path / ("x" * 99), "too long"), (file, "exists")):
        config = configured(replicas={"local_bus": str(directory)})
        with pytest.raises(ConfigError, match=rf"replicas\.local_bus: .*(?i:{problem})"):
            share(config, Load(), None, "r")
    config = configured(replicas={"local_bus": str(tmp_path / "new" / "bus")})
    assert share(config, Load(), None, "r")


@pytest.mark.parametrize("credit", [0.0, 0.5, 1.0])
def test_blocks_in_host_memory_count_as_is_configured(credit: float) -> None:
    fleet, rank = fleet_of(configured(policy={"cpu_credit": credit, "disk_credit": 0.0}))
    event = BlocksStored(block_hashes=[1, 2], token_ids=list(range(8)), block_size=4, tier=Tier.GPU)
    offloaded = BlocksStored(
        block_hashes=[3, 4], parent=2, token_ids=list(range(8, 16)), block_size=4, tier=Tier.CPU
    )
    fleet.on_batch(rank, EventBatch(0.0, [event, offloaded]))
    chosen = fleet.pools["m"].scheduler.decide(prompt_of(range(17)), [rank], 0.0).chosen
    assert chosen.uncached_tokens == 17 - 8 - 8 * credit


@pytest.mark.parametrize(("ranks", "strict"), [(1, False), (2, True)])
def test_event_sources_are_as_patient_as_is_configured(ranks: int, strict: bool) -> None:
    """Ranks are told apart only where one engine has several: others may number across engines."""
    settings = configured(events={"silent_s": 7.0, "replay_timeout_s": 3.0, "replay_tries": 4})
    fleet, rank = fleet_of(settings)
    fleet.workers["a"].facts = WorkerFacts(models=BASE.models, events=dict.fromkeys(range(ranks)))
    for bind in (True, False):
        made = source_settings(settings, rank, fleet, bind=bind)
        assert made.bind is bind
        assert made.subscription.silent_after_s == 7.0
        assert made.subscription.replay_timeout_s == 3.0
        assert made.subscription.replay_tries == 4
        assert made.subscription.strict_dp_rank is strict
