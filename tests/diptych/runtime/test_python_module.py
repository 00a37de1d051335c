"""Programs are started with our code, whatever the current directory holds."""

import subprocess
import sys
from pathlib import Path

import pytest

from diptych.runtime.python_module import module_command

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("module", ["diptych.runtime.python_module", "gateway.limits"])
def test_what_the_current_directory_holds_is_not_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / module.partition(".")[0]
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('somebody else')")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    assert subprocess.run(module_command(module), timeout=60, check=False).returncode == 0


def test_a_working_tree_runs_itself_in_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert module_command("gateway") == (sys.executable, "-m", "gateway")
