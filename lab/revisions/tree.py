"""Revision of this repository, unpacked and built in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diptych.bench.cpu_time import family_of
from diptych.runtime.python_module import TREE_VARIABLE
from lab.peers.servers import Server

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "revisions"
_BUILT = ".built"
_PYTHON_MODULE = "diptych/runtime/python_module.py"
_NATIVE_STEP = "_step.so"
_PRINT_ORIGINS = """
import importlib.util, sys
for name in sys.argv[1:]:
    print(name, *importlib.util.find_spec(name).submodule_search_locations)
"""


class NoSuchRevision(Exception):
    """A name that git does not resolve to a commit."""


class WrongTree(RuntimeError):
    """A package or library that would be, or was, loaded from outside the revision's own folder."""


@dataclass(frozen=True)
class Tree:
    """Files of a revision: `name` as the user gave it, `commit` the hash that it stands for."""

    name: str
    commit: str
    path: Path

    def server(self, dtype: str) -> Server:
        """Return `diptych up` of this revision, with its own native step. Raises WrongTree unless its
        packages would come from its folder.
        """
        self._check_packages()
        return Server(
            name=self.commit,
            family="diptych",
            precision=dtype,
            arguments=(
                *("env", "-C", str(self.path), *self._python, *self._command, "up", "--dtype", dtype),
                *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
            ),
            environment=self._environment,
            start_timeout_s=180.0,
        )

    def check_processes(self, pid: int) -> None:
        """Raise WrongTree if a process of the family of `pid` has mapped another tree's native step."""
        for member in family_of(pid):
            for line in _mapped_files(member):
                if line.endswith(_NATIVE_STEP) and not Path(line).is_relative_to(self.path.resolve()):
                    raise WrongTree(f"{self.name}: process {member} computes with {line}")

    def _check_packages(self) -> None:
        environment = {**os.environ, **self._environment}
        probe = () if self._takes_tree else ("-c", _PRINT_ORIGINS, *_packages(self.path))
        done = subprocess.run(
            [*self._python, *probe],
            env=environment,
            cwd=self.path,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise WrongTree(f"{self.name}: {done.stderr.strip()}")
        for line in done.stdout.splitlines():
            name, *folders = line.split(" ", 1)
            if [Path(folder).resolve() for folder in folders] != [self.path.resolve() / name]:
                raise WrongTree(f"{self.name}: {name} comes from {' '.join(folders) or 'nowhere'}")

    @property
    def _takes_tree(self) -> bool:
        """A revision from before `DIPTYCH_TREE` is found through PYTHONPATH."""
        script = self.path / _PYTHON_MODULE
        return script.exists() and TREE_VARIABLE in script.read_text()

    @property
    def _python(self) -> tuple[str, ...]:
        return (sys.executable, "-P", *((str(self.path / _PYTHON_MODULE),) if self._takes_tree else ()))

    @property
    def _command(self) -> tuple[str, ...]:
        if self._takes_tree:
            return ("diptych",)
        return ("-m", "diptych" if (self.path / "diptych/__main__.py").exists() else "launcher")

    @property
    def _environment(self) -> Mapping[str, str]:
        return {TREE_VARIABLE if self._takes_tree else "PYTHONPATH": str(self.path)}


def unpacked(name: str) -> Tree:
    """Unpack a revision and build its native step, once. Raises NoSuchRevision, CalledProcessError."""
    command = ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        raise NoSuchRevision(f"git knows no revision {name!r}")
    commit = found.stdout.strip()[:12]
    path = FOLDER / commit
    if not (path / _BUILT).exists():
        _unpack(commit, path)
        build = ("build_ext", "--build-lib", ".", "--build-temp", "objects")
        subprocess.run([sys.executable, "setup.py", "--quiet", *build], cwd=path, check=True)
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


def _packages(path: Path) -> list[str]:
    """Return the names of the regular packages at the top of a revision from before `DIPTYCH_TREE`."""
    return sorted(init.parent.name for init in path.glob("*/__init__.py"))


def _mapped_files(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # the process has ended
        return set()
    return {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
