import socket
import sys
from pathlib import Path

import pytest

from diptych.cli import doctor


def test_a_machine_that_runs_this_suite_has_all_that_is_essential(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run_doctor([0]) == 0
    said = capsys.readouterr().out
    assert "missing" not in said
    for name in ("Python", "torch", "Valkey", "bundled model", "pidfd", "kernels package"):
        assert name in said


def test_a_missing_package_is_missing() -> None:
    assert doctor.package("diptych-has-no-such-dependency").state == "missing"


def test_a_taken_port_is_worth_a_note() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert doctor.free_port(port).state == "note"
    assert doctor.free_port(port).state == "ok"


def test_a_regular_package_named_kernels_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
        monkeypatch.delitem(sys.modules, name)
    assert doctor.kernels_package().state == "missing"
