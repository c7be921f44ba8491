"""Files that NATS needs: one clear line before anything starts."""

from pathlib import Path

import nkeys  # type: ignore[import-untyped]  # it has no types
import pytest
from support.nats_identities import Identity, Operator

from kvrouter.cli import main
from kvrouter.config import ConfigError, NatsConfig
from kvrouter.nats_files import check_nats_files


@pytest.mark.parametrize("field", ["credentials", "nkey_seed", "tls_ca", "tls_cert"])
def test_a_file_that_is_missing_or_something_else_is_named(field: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    nats = NatsConfig(servers=["nats://h:1"], **{field: str(path)})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"^nats\.{field}: {path}.*No such file"):
        check_nats_files(nats)
    path.write_bytes(b"SUAnot\n\xff")
    with pytest.raises(ConfigError, match=rf"^nats\.{field}: {path}"):
        check_nats_files(nats)
    path.write_text("SUAnot")
    with pytest.raises(ConfigError, match=rf"^nats\.{field}: {path}"):
        check_nats_files(nats)


def test_right_files_are_right(tmp_path: Path) -> None:
    seed = Identity(nkeys.PREFIX_BYTE_USER).write_seed(tmp_path / "router.nk")
    check_nats_files(NatsConfig(nkey_seed=seed))
    check_nats_files(NatsConfig(credentials=Operator().write_credentials(tmp_path / "r.creds")))
    check_nats_files(NatsConfig())


@pytest.mark.parametrize("command", [["check"], ["serve", "--config"], ["relay", "--config"]])
def test_each_command_refuses_before_it_starts(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "router.toml"
    config.write_text(
        '[[workers]]\nurl = "http://gpu1:8000"\n'
        '[nats]\nservers = ["nats://h:1"]\nnkey_seed = "/no/such.nk"\n'
    )
    assert main([*command, str(config)]) == 2
    assert "nats.nkey_seed: /no/such.nk: No such file" in capsys.readouterr().err
