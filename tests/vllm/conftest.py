"""Two real engines for the whole session, their logs beside a failure, a summary at the end."""

import time
from collections.abc import Generator, Iterator

import pytest
import zmq
from support import vllm_environment
from support.logged_process import LoggedProcess
from support.vllm_probe import EngineProbe
from support.vllm_server import ENGINE_READY_TIMEOUT_S, EnginePorts, VllmServer, free_ports
from support.vllm_tally import Tally

TALLY = pytest.StashKey[Tally]()
PROCESSES = pytest.StashKey[list[LoggedProcess]]()
STARTED_S = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Tally()
    config.stash[PROCESSES] = []
    config.stash[STARTED_S] = time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the processes printed last, if the test failed."""
    report = yield
    if report.failed:
        for process in item.config.stash[PROCESSES]:
            report.sections.append((f"log of {process.name}", process.log_tail()))
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    tally = config.stash[TALLY]
    if not tally.scenarios:
        return
    terminalreporter.section("predicted against reported cached tokens")
    for line in tally.lines():
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"wall time {time.monotonic() - config.stash[STARTED_S]:.0f} s")


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    return pytestconfig.stash[TALLY]


@pytest.fixture(scope="session")
def processes(pytestconfig: pytest.Config) -> list[LoggedProcess]:
    """Whoever starts a process adds it, so that its log is shown beside a failure."""
    return pytestconfig.stash[PROCESSES]


@pytest.fixture(scope="session")
def engines(
    tmp_path_factory: pytest.TempPathFactory, processes: list[LoggedProcess]
) -> Iterator[list[VllmServer]]:
    """Two engines with the tiny model and the adapter `lora-a`, ready."""
    vllm = vllm_environment.ensure()
    logs = tmp_path_factory.mktemp("vllm")
    ports = free_ports(6)
    servers = [
        VllmServer(name, vllm, ports=EnginePorts(*numbers), log=logs / f"{name}.log")
        for name, numbers in (("engine-1", ports[:3]), ("engine-2", ports[3:]))
    ]
    processes.extend(servers)
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready(ENGINE_READY_TIMEOUT_S)
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="session")
def probe_context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def probes(
    engines: list[VllmServer], probe_context: "zmq.Context[zmq.Socket[bytes]]"
) -> Iterator[list[EngineProbe]]:
    """One for each engine, in the same order; with nothing fetched yet."""
    first, second = engines
    with (
        EngineProbe(first.replay_endpoint, probe_context) as one,
        EngineProbe(second.replay_endpoint, probe_context) as two,
    ):
        yield [one, two]
