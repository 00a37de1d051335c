"""The runner of the drivers, with drivers that end badly."""

from pathlib import Path

import pytest

from tests.clients.__main__ import run_client
from tests.clients.environments import InstalledClient
from tests.clients.results import FAILED, OK
from tests.clients.systems import Systems

NOWHERE = Systems(*["http://127.0.0.1:9"] * 3, "127.0.0.1:9")
REPORT = 'print(\'{"path": "plain", "result": "ok", "remark": ""}\', flush=True)\n'


@pytest.mark.parametrize(
    ("last_line", "ending"),
    [
        ("raise SystemExit(3)", "the driver ended with status 3"),
        ("import time; time.sleep(100)", "over the time limit of 5 s"),
    ],
)
def test_paths_that_a_driver_did_not_reach_are_failed(tmp_path: Path, last_line: str, ending: str) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(REPORT + last_line)
    found = run_client(InstalledClient("bad", str(driver), ("pytest",)), NOWHERE, 5)
    assert (found.results[0].path, found.results[0].result) == ("plain", OK)
    assert {(one.result, one.remark) for one in found.results[1:]} == {(FAILED, ending)}
