"""Gateway settings that are refused before the start."""

import pytest

from gateway.config import GatewaySettings
from gateway.ports import port_clash


@pytest.mark.parametrize(
    ("grpc_port", "http_port", "admin_port", "named"),
    [
        (7000, 7000, None, "--grpc-port and --http-port are both 7000"),
        (7000, 7001, None, "--http-port and the admin port"),
        (7000, 8000, 7000, "--grpc-port and --admin-port are both 7000"),
        (7000, 8000, 8000, "--http-port and --admin-port are both 8000"),
    ],
)
def test_settings_refuse_one_port_for_two_listeners(
    grpc_port: int, http_port: int, admin_port: int | None, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [f"--grpc-port={grpc_port}", f"--http-port={http_port}"]
    argv += [f"--admin-port={admin_port}"] if admin_port is not None else []
    with pytest.raises(SystemExit) as exit_info:
        GatewaySettings.from_argv(argv)
    assert exit_info.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"diptych gateway: {named}")


@pytest.mark.parametrize("ports", [(0, 0, None), (0, 0, 0), (7000, 8000, None), (65535, 0, None)])
def test_port_zero_never_clashes(ports: tuple[int, int, int | None]) -> None:
    assert port_clash(*ports) is None
