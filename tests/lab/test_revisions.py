"""Two revisions beside each other: what is unpacked, whose CPU time counts, and what the table says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diptych.bench.cpu_time import family_of
from lab.closed_turn import Size
from lab.peers.process import RunningServer
from lab.revisions import tree
from lab.revisions.measure import Turn, by_turns
from lab.revisions.report import markdown
from lab.revisions.tree import NoSuchRevision, Tree, WrongTree, unpacked

SETUP = "import pathlib; pathlib.Path('step').write_text(pathlib.Path('source').read_text())"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits, whose `setup.py` makes a file of another one."""
    root = tmp_path / "repository"
    root.mkdir()
    monkeypatch.setattr(tree, "ROOT", root)
    monkeypatch.setattr(tree, "FOLDER", tmp_path / "trees")

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)

    git("init")
    (root / "setup.py").write_text(SETUP)
    for text in ("old", "new"):
        (root / "source").write_text(text)
        git("add", ".")
        git("commit", "-m", text)
    return root


def test_each_revision_has_its_own_files_and_is_built_once(repository: Path) -> None:
    before, after = unpacked("HEAD^"), unpacked("HEAD")
    assert [(one.path / "step").read_text() for one in (before, after)] == ["old", "new"]
    (after.path / "step").write_text("kept")
    assert (unpacked("HEAD").path / "step").read_text() == "kept"
    assert (repository / "source").read_text() == "new"


def test_a_build_that_failed_is_tried_again(repository: Path) -> None:
    (repository / "setup.py").write_text("raise SystemExit(1)")
    subprocess.run(["git", "add", "."], cwd=repository, check=True)
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "broken"]
    subprocess.run(commit, cwd=repository, check=True)
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            unpacked("HEAD")


@pytest.mark.usefixtures("repository")
def test_a_revision_that_is_none_is_named() -> None:
    with pytest.raises(NoSuchRevision, match="HEAD~9"):
        unpacked("HEAD~9")


def test_a_family_is_all_descendants() -> None:
    script = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    with subprocess.Popen([sys.executable, "-c", script]) as child:
        try:
            while len(family := family_of(child.pid)) < 2:
                time.sleep(0.01)
            assert child.pid in family
            assert os.getpid() not in family
        finally:
            for pid in reversed(family_of(child.pid)):
                os.kill(pid, 9)


def test_the_ratio_is_taken_within_a_round() -> None:
    trees = [Tree(name, commit, Path()) for name, commit in (("old", "aaa"), ("new", "bbb"))]
    rounds = [[Turn(100, 2, 0.0), Turn(99, 2.1, 0.5)], [Turn(10, 2, 0.1), Turn(11, 2, 0.1)]]
    table = markdown(trees, [*rounds, rounds[0]], "here")
    assert "| old (aaa) | 100.0 (10.0–100.0) | 2.000 (2.000–2.000) |" in table
    assert "0.990 (0.990–1.100) | 1.050 (1.000–1.050)" in table
    assert "10.0% of the cores' time stolen" in table


def _write_package(tree: Path, name: str) -> None:
    (tree / name).mkdir(parents=True)
    (tree / name / "__init__.py").touch()


def test_a_revision_of_today_starts_from_its_own_tree() -> None:
    server = Tree("this", "this", tree.ROOT).server("auto")
    assert server.environment == {"DIPTYCH_TREE": str(tree.ROOT)}
    assert str(tree.ROOT / "diptych/runtime/python_module.py") in server.arguments


@pytest.mark.parametrize("module", ["launcher", "diptych"])
def test_a_revision_from_before_the_tree_variable_starts_by_pythonpath(module: str, tmp_path: Path) -> None:
    for name in ("gateway", "diptych", "launcher"):
        _write_package(tmp_path, name)
    (tmp_path / module / "__main__.py").touch()
    server = Tree("old", "old", tmp_path).server("auto")
    assert server.environment == {"PYTHONPATH": str(tmp_path)}
    at = server.arguments.index("-m")
    assert server.arguments[at : at + 3] == ("-m", module, "up")


def test_a_tree_whose_packages_come_from_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "diptych/runtime").mkdir(parents=True)
    script = "print('diptych /elsewhere/diptych')  # DIPTYCH_TREE"
    (tmp_path / "diptych/runtime/python_module.py").write_text(script)
    with pytest.raises(WrongTree, match="diptych comes from /elsewhere/diptych"):
        Tree("bad", "bad", tmp_path).server("auto")


def test_a_process_with_another_trees_native_step_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "other" / "_step.so"
    library.parent.mkdir()
    library.write_bytes(bytes(4096))
    script = f"import mmap; f = open({str(library)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); print(); input()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        Tree("same", "same", tmp_path).check_processes(child.pid)
        with pytest.raises(WrongTree, match=r"computes with .*other/_step\.so"):
            Tree("new", "new", tmp_path / "new").check_processes(child.pid)
        child.communicate(b"\n")


@pytest.mark.full
def test_a_revision_beside_itself(tmp_path: Path) -> None:
    server = Tree("this", "this", tree.ROOT).server("auto")
    told: list[int] = []
    with RunningServer(server, tmp_path) as running:
        rounds = by_turns([running, running], Size(2, 1, 16, 8), 2, told.append)
    assert told == [1, 2]
    assert all(turn.tokens_per_s > 0 and turn.cpu_ms_per_token > 0 for turns in rounds for turn in turns)
