"""Units of systemd: read by systemd itself, and they start the programs of this installation."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cli.app import app
from diptych.cli.stack import MODULES
from diptych.cli.units_command import unit_name, unit_text


def test_units_of_all_roles_are_valid_and_run_their_program(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["units", str(tmp_path), "--user", "root"])
    assert made.exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {unit_name(role) for role in MODULES}
    for role in MODULES:
        text = (tmp_path / unit_name(role)).read_text()
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read_string(text)
        command = shlex.split(unit["Service"]["ExecStart"])
        shown = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, check=False)
        assert shown.returncode == 0, shown.stderr
        assert "--redis-url" in shown.stdout
        assert "EnvironmentFile=/etc/diptych/diptych.env" in text


def test_systemd_finds_no_fault_but_one_that_is_there(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze")

    def faults(text: str) -> str:
        (tmp_path / "diptych-gateway.service").write_text(text)
        command = [analyze, "verify", str(tmp_path / "diptych-gateway.service")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return "\n".join(line for line in done.stderr.splitlines() if "diptych-gateway.service" in line)

    text = unit_text("gateway", Path("/etc/diptych/diptych.env"), "root")
    assert faults(text) == ""
    assert faults(text.replace("KillMode=mixed", "KillMod=mixed")) != ""


def test_an_unknown_role_is_refused(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["units", str(tmp_path), "--role", "compute"])
    assert refused.exit_code == 2
    assert not list(tmp_path.iterdir())
