"""Environments that make creates, and the index that it takes torch from."""

import fnmatch
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HALFWAY = """#!/bin/sh
mkdir -p "$3/bin" && touch "$3/bin/python"
echo "ensurepip is not available" >&2
exit 1
"""


def test_venv_that_failed_halfway_is_removed(tmp_path: Path) -> None:
    python, venv = tmp_path / "python3", tmp_path / "venv"
    python.write_text(HALFWAY)
    python.chmod(0o755)
    make = ["make", f"PYTHON={python}", f"VENV={venv}", f"{venv}/bin/python"]
    for _ in range(2):
        done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        assert "ensurepip is not available" in done.stderr
        assert not venv.exists()


def test_folder_that_was_there_before_stays(tmp_path: Path) -> None:
    python, venv = tmp_path / "python3", tmp_path / "mine"
    python.write_text(HALFWAY)
    python.chmod(0o755)
    (venv / "bin").mkdir(parents=True)
    (venv / "precious").touch()
    make = ["make", f"PYTHON={python}", f"VENV={venv}", f"{venv}/bin/python"]
    assert subprocess.run(make, cwd=ROOT, capture_output=True, timeout=60).returncode != 0
    assert (venv / "precious").exists()
    assert not (venv / "bin" / "python").exists()


@pytest.mark.parametrize("ignore", [".dockerignore", ".gitignore"])
def test_ignore_files_cover_every_venv(ignore: str) -> None:
    venvs = set(re.findall(r"^\w*VENV \??:?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    patterns = [line.rstrip("/") for line in (ROOT / ignore).read_text().splitlines()]
    assert len(venvs) == 3
    assert not [venv for venv in venvs if not any(fnmatch.fnmatch(venv, pattern) for pattern in patterns)]


def test_quick_suite_has_tests_of_every_package() -> None:
    variable = re.search(r"^QUICK := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert variable is not None
    chosen = variable[1].replace("\\\n", " ").split()
    assert [path for path in chosen if not (ROOT / path).exists()] == []
    generated = {"v1", "worker", "kserve"}
    packages = ["gateway", "prefill_worker", "decode_worker", "kvtransfer", "kernels"]
    packages += [
        f"diptych/{folder.parent.name}"
        for folder in (ROOT / "diptych").glob("*/__init__.py")
        if folder.parent.name not in generated
    ]
    assert len(packages) >= 11
    assert [
        name for name in packages if not any(f"{path}/".startswith(f"tests/{name}/") for path in chosen)
    ] == []


def make_torch(tmp_path: Path, *variables: str) -> tuple[list[str], str]:
    """Run `make torch` with a Python that records what pip is asked for; returns the words and stderr."""
    python, log = tmp_path / "venv" / "bin" / "python", tmp_path / "log"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\necho "$@" > {log}\n')
    python.chmod(0o755)
    make = ["make", "--silent", f"VENV={tmp_path / 'venv'}", *variables, "torch"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    words = log.read_text().split()
    return words[words.index("install") + 1 :], done.stderr


@pytest.fixture
def cpu_index(tmp_path: Path) -> Iterator[str]:
    """An index that answers."""
    folder = tmp_path / "index"
    (folder / "torch").mkdir(parents=True)
    server = HTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_machine_without_a_driver_takes_torch_from_the_cpu_index(tmp_path: Path, cpu_index: str) -> None:
    words, _ = make_torch(tmp_path, "NVIDIA=", f"CPU_INDEX={cpu_index}")
    assert words[-2:] == ["--extra-index-url", cpu_index]
    assert any(re.fullmatch(r"torch==[\d.]+", word) for word in words)


def test_silent_cpu_index_is_named_and_the_ordinary_one_taken(tmp_path: Path) -> None:
    words, told = make_torch(tmp_path, "NVIDIA=", "CPU_INDEX=http://127.0.0.1:1")
    assert "--extra-index-url" not in words
    assert "http://127.0.0.1:1 does not answer: torch comes from the ordinary index" in told


def test_machine_with_a_driver_takes_torch_from_the_ordinary_index(tmp_path: Path, cpu_index: str) -> None:
    words, told = make_torch(tmp_path, "NVIDIA=yes", f"CPU_INDEX={cpu_index}")
    assert "--extra-index-url" not in words
    assert told == ""


def test_torch_spec_overrides_the_choice(tmp_path: Path, cpu_index: str) -> None:
    spec = "torch==2.12.0 --index-url http://127.0.0.1:1/simple"
    words, told = make_torch(tmp_path, "NVIDIA=", f"CPU_INDEX={cpu_index}", f"TORCH_SPEC={spec}")
    assert words[-3:] == spec.split()
    assert told == ""


def test_targets_of_the_help_and_folders_of_the_quick_tests_exist() -> None:
    text = (ROOT / "Makefile").read_text()
    told = set(re.findall(r"\bmake ([a-z-]+) ", text.partition("SHELL :=")[0]))
    assert told <= set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    [quick] = re.findall(r"^QUICK := ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert [path for path in quick.replace("\\", "").split() if not (ROOT / path).exists()] == []
