"""Programs are started from our files, whatever the current directory and PYTHONPATH hold."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.runtime.python_module import (
    PACKAGES,
    explain_import_failure,
    find_packages_here,
    module_arguments,
    module_command,
    tree_root,
)

ROOT = Path(__file__).parents[3]
ORIGINS = module_command("")[:-1]
"""The command that prints the folder of each package."""

GENERIC_NAMES = ("worker", "engine", "runtime", "gateway", "kernels", "launcher", "benchmarks")


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    """A folder whose modules are called as ours are, or once were, and that cannot be imported."""
    for name in (*GENERIC_NAMES, *PACKAGES):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the user')")
    return tmp_path


def run(command: tuple[str, ...], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("module", ["diptych.runtime.env", "gateway.limits", "kernels.byte_codes"])
def test_module_command_ignores_the_current_directory_and_pythonpath(module: str, user_folder: Path) -> None:
    done = run(module_command(module), user_folder, PYTHONPATH=str(user_folder))
    assert (done.returncode, done.stderr) == (0, "")


def test_packages_come_from_the_running_tree(user_folder: Path) -> None:
    done = run(ORIGINS, user_folder, PYTHONPATH=str(user_folder))
    assert done.stdout.splitlines() == [f"{name} {ROOT / name}" for name in PACKAGES]


def test_another_folders_namespace_package_is_not_merged_into_kernels(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    done = run(ORIGINS, tmp_path, PYTHONPATH=str(tmp_path))
    assert f"kernels {ROOT / 'kernels'}" in done.stdout.splitlines()


@pytest.fixture
def other_tree(tmp_path: Path) -> Path:
    """A tree with one program of ours, which prints its file."""
    tree = tmp_path / "tree"
    for name in ("diptych", "gateway"):
        (tree / name).mkdir(parents=True)
        (tree / name / "__init__.py").touch()
        (tree / name / "__main__.py").write_text("print(__file__)")
    return tree


def test_an_explicit_tree_comes_first(
    other_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_TREE", str(other_tree))
    assert tree_root() == other_tree
    done = run(module_command("gateway"), tmp_path, PYTHONPATH=str(ROOT))
    assert done.stdout.split() == [str(other_tree / "gateway" / "__main__.py")]


def test_the_command_is_replaced_by_that_of_the_explicit_tree(other_tree: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-P", "-m", "diptych")
    done = run(command, tmp_path, PYTHONPATH=str(ROOT), DIPTYCH_TREE=str(other_tree))
    assert done.stdout.split() == [str(other_tree / "diptych" / "__main__.py")]


def test_an_explicit_tree_is_never_completed_from_elsewhere(
    other_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_TREE", str(other_tree))
    done = run(module_command("decode_worker"), tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode != 0
    assert f"DIPTYCH_TREE={other_tree} has no package decode_worker" in done.stderr


def test_a_folder_that_is_no_tree_is_refused(tmp_path: Path) -> None:
    done = run(module_command("gateway"), tmp_path, DIPTYCH_TREE=str(tmp_path))
    assert (done.returncode, done.stderr) == (2, f"diptych: DIPTYCH_TREE={tmp_path} holds no diptych\n")


def test_a_shadowed_dependency_is_named(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").touch()
    done = run(module_command("gateway"), tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"diptych: {tmp_path}/pydantic.py shadows the package 'pydantic'")
    assert done.stderr.count("\n") == 1


def test_a_missing_dependency_names_its_extra() -> None:
    missing = ModuleNotFoundError("", name="no_such_package.part")
    assert str(explain_import_failure(missing)).endswith("pip install 'diptych[server]'")
    assert explain_import_failure(ModuleNotFoundError("", name="gateway.no_such_module")) is None
    assert explain_import_failure(ImportError("cannot import name", name="json")) is None


def test_arguments_follow_the_module() -> None:
    assert module_arguments((*module_command("gateway"), "--grpc-port", "0")) == ("--grpc-port", "0")
    assert module_command("gateway")[:2] == (sys.executable, "-P")


def test_one_finder_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = len(sys.meta_path)
    find_packages_here()
    find_packages_here("lab")
    assert len(sys.meta_path) == before + 1
