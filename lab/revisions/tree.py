"""A revision's files, unpacked and built in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from lab.peers.servers import Server

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "revisions"
_BUILT = ".built"


class NoSuchRevision(Exception):
    """git does not know it; the message says what it was."""


@dataclass(frozen=True)
class Tree:
    """``name`` is as the user gave it, ``commit`` what it stands for."""

    name: str
    commit: str
    path: Path

    def server(self, dtype: str) -> Server:
        """`diptych up` of this revision, with its own native step."""
        return Server(
            name=self.commit,
            family="diptych",
            precision=dtype,
            arguments=(
                *("env", "-C", str(self.path), sys.executable, "-m", "diptych", "up", "--dtype", dtype),
                *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
            ),
            environment={"PYTHONPATH": str(self.path)},  # before what is installed
            start_timeout_s=180.0,
        )


def unpacked(name: str) -> Tree:
    """Unpack the files of a revision and build its native step. Raises NoSuchRevision, CalledProcessError."""
    command = ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        raise NoSuchRevision(f"git knows no revision {name!r}")
    commit = found.stdout.strip()[:12]
    path = FOLDER / commit
    if not (path / _BUILT).exists():
        _unpack(commit, path)
        command = [
            sys.executable,
            "setup.py",
            "--quiet",
            "build_ext",
            "--build-lib",
            ".",
            "--build-temp",
            "objects",
        ]
        subprocess.run(command, cwd=path, check=True)
        (path / _BUILT).touch()
    return Tree(name, commit, path)


def _unpack(commit: str, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    command = ["git", "archive", commit]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as archive,
        tarfile.open(fileobj=archive.stdout, mode="r|") as files,
    ):
        files.extractall(path, filter="data")
    if archive.returncode:
        raise subprocess.CalledProcessError(archive.returncode, command)
