import json
from pathlib import Path

from launcher.ready_file import ReadyFile
from launcher.stack import SharedSecrets
from launcher.supervisor import Running

SHARED = SharedSecrets("redis://127.0.0.1:1/0", "5ec2e7")
GATEWAY = Running("gateway", "gateway", 3, {"grpc_port": 7, "http_port": 8, "worker_id": "g"}, 0)


def test_tells_ports_and_pids_by_role_to_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    down = Running("decode-0", "decode", None, None, 1)

    ReadyFile(path).write(SHARED, [Running("valkey", "valkey", 2, {"port": 6}, 0), GATEWAY, down])

    said = json.loads(path.read_text())
    assert said["valkey"] == {"name": "valkey", "pid": 2, "restarts": 0, "port": 6}
    assert said["gateway"]["grpc_port"] == 7
    assert said["decode"] == [{"name": "decode-0", "pid": None, "restarts": 1}]
    assert said["prefill"] == []
    assert said["secret"] == "5ec2e7"
    assert path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [path]


def test_is_gone_after_remove_and_does_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    file = ReadyFile(path)
    file.write(SHARED, [GATEWAY])
    file.remove()
    file.write(SHARED, [GATEWAY])
    assert list(tmp_path.iterdir()) == []
