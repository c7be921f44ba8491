"""The life of a worker."""

import itertools

import pytest

from kvrouter.config import BreakerConfig, WorkerConfig
from kvrouter.workers import ServedModel, Worker, WorkerEvent, WorkerFacts, WorkerState

J, R, U, D = (
    WorkerState.JOINING,
    WorkerState.READY,
    WorkerState.UNREACHABLE,
    WorkerState.DRAINING,
)
TABLE = {
    WorkerEvent.JOINED: {J: R, R: R, U: U, D: D},
    WorkerEvent.PROBES_FAILED: {J: U, R: U, U: U, D: D},
    WorkerEvent.PROBE_OK: {J: J, R: R, U: J, D: D},
    WorkerEvent.DRAIN: {J: D, R: D, U: D, D: D},
    WorkerEvent.RESUME: {J: J, R: R, U: U, D: J},
}


def new_worker() -> Worker:
    return Worker(WorkerConfig(url="http://gpu1:8000/"), BreakerConfig())


@pytest.mark.parametrize(
    ("event", "state"), list(itertools.product(WorkerEvent, WorkerState)), ids=str
)
def test_every_event_in_every_state(event: WorkerEvent, state: WorkerState) -> None:
    worker = new_worker()
    worker.state = state
    changed = worker.happened(event)
    assert worker.state is TABLE[event][state]
    assert changed == (worker.state is not state)


def test_a_worker_is_named_by_host_and_port_unless_it_has_a_name() -> None:
    assert new_worker().name == "gpu1:8000"
    named = Worker(WorkerConfig(url="http://gpu1:8000", name="left"), BreakerConfig())
    assert named.name == "left"


def test_adapters_belong_to_the_base_model_and_keep_their_own_name() -> None:
    facts = WorkerFacts(
        models=(ServedModel("base"), ServedModel("alias"), ServedModel("lora-a", parent="base"))
    )
    assert facts.base_model == "base"
    assert facts.lora_of("lora-a") == "lora-a"
    assert facts.lora_of("alias") is None


def test_each_dp_rank_can_be_routed_to() -> None:
    """E17: an engine with two data-parallel ranks behind one address."""
    worker = new_worker()
    worker.facts = WorkerFacts(events={1: None, 0: None})
    assert worker.ranks == (("gpu1:8000", 0), ("gpu1:8000", 1))
