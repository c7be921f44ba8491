"""Which paths the front door has."""

import pytest

from kvrouter.openai.body import Endpoint
from kvrouter.openai.paths import Handling, PathTable


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_the_four_prompt_paths_are_routed_by_prefix(endpoint: Endpoint) -> None:
    found = PathTable().find("POST", endpoint.value)
    assert found is not None
    assert (found.handling, found.endpoint) == (Handling.BY_PREFIX, endpoint)


@pytest.mark.parametrize(
    "path",
    [
        "/reset_prefix_cache",
        "/sleep",
        "/wake_up",
        "/pause",
        "/collective_rpc",
        "/server_info",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/inference/v1/abort_requests",
        "/metrics",
        "/kv_event_sources",
        "/load",
        "/docs",
        "/openapi.json",
        "//v1/chat/completions",
        "/v1/chat/completions/",
        "/v1/chat/completions/../../sleep",
        "/V1/chat/completions",
        "/",
        "",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_dev_and_admin_routes_are_not_reachable(method: str, path: str) -> None:
    """F16: anybody with an API key could otherwise put the engines to sleep."""
    assert PathTable().find(method, path) is None


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT"])
def test_other_methods_do_not_exist(method: str) -> None:
    assert PathTable().find(method, "/v1/chat/completions") is None


def test_a_path_knows_its_methods() -> None:
    table = PathTable(["/sleep"])
    assert table.methods("/v1/chat/completions") == table.methods("/sleep") == ("POST",)
    assert table.methods("/v1/models") == ("GET", "HEAD")
    assert table.methods("/v1/responses/resp_1") == ("GET",)
    assert table.methods("/wake_up") == ()


def test_stored_responses_go_to_their_maker() -> None:
    table = PathTable()
    got = table.find("GET", "/v1/responses/resp_1")
    cancelled = table.find("POST", "/v1/responses/resp_1/cancel")
    assert got is not None
    assert cancelled is not None
    assert got.response_id == cancelled.response_id == "resp_1"
    assert table.find("GET", "/v1/responses/resp_1/cancel") is None
    assert table.find("GET", "/v1/responses/a/b") is None


def test_the_configuration_can_allow_more_paths() -> None:
    found = PathTable(["/v1/realtime"]).find("POST", "/v1/realtime")
    assert found is not None
    assert found.handling is Handling.BY_LOAD


def test_labels_are_a_closed_set() -> None:
    """F15: a scanner asks for ten thousand paths."""
    table = PathTable()
    labels = {table.label(f"/v1/x{i}") for i in range(10_000)}
    labels |= {table.label(f"/v1/responses/resp_{i}") for i in range(1000)}
    assert labels == {"other", "/v1/responses/{id}"}
