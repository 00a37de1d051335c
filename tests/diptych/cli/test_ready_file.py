import json
from pathlib import Path

import pytest

from diptych.cli.process_events import Event, Stale
from diptych.cli.ready_file import ReadyFile, why_unwritable
from diptych.cli.stack import SharedSecrets
from diptych.cli.supervisor import Running

SHARED = SharedSecrets("redis://127.0.0.1:1/0", "5ec2e7")
GATEWAY = Running("gateway", "gateway", 3, {"grpc_port": 7, "http_port": 8, "worker_id": "g"}, 0)


def unheard_of(path: Path) -> ReadyFile:
    def observe(event: Event) -> None:
        raise AssertionError(event)

    return ReadyFile(path, observe)


def test_ready_file_has_ports_and_pids_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    down = Running("decode-0", "decode", None, None, 1)

    unheard_of(path).write(SHARED, [Running("valkey", "valkey", 2, {"port": 6}, 0), GATEWAY, down])

    said = json.loads(path.read_text())
    assert said["valkey"] == {"name": "valkey", "pid": 2, "restarts": 0, "port": 6}
    assert said["gateway"]["grpc_port"] == 7
    assert said["decode"] == [{"name": "decode-0", "pid": None, "restarts": 1}]
    assert said["prefill"] == []
    assert said["secret"] == "5ec2e7"
    assert path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [path]


def test_ready_file_stays_removed(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    file = unheard_of(path)
    file.write(SHARED, [GATEWAY])
    file.remove()
    file.update(SHARED, [GATEWAY])
    assert list(tmp_path.iterdir()) == []


def test_ready_file_reports_a_folder_that_went_away(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    heard: list[Event] = []
    file = ReadyFile(folder / "ready.json", heard.append)
    file.write(SHARED, [GATEWAY])
    (folder / "ready.json").unlink()
    folder.rmdir()
    folder.write_text("a file is here now")
    file.update(SHARED, [GATEWAY])
    file.remove()
    assert heard == [Stale(f"{folder / 'ready.json'}", "Not a directory")] * 2
    with pytest.raises(OSError, match="Not a directory"):  # who waits for the first one is told otherwise
        file.write(SHARED, [GATEWAY])


def test_why_unwritable_names_the_reason(tmp_path: Path) -> None:
    assert why_unwritable(tmp_path) == "it is a folder"
    assert why_unwritable(tmp_path / "no" / "x") == f"there is no folder {tmp_path / 'no'}"
    assert why_unwritable(Path("/proc/x")) == "/proc takes no new file: No such file or directory"
    assert why_unwritable(tmp_path / "x") is None
    assert list(tmp_path.iterdir()) == []
