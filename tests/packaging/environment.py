"""Empty environments for the built wheel, which see exactly the packages that its metadata asks for.

The wheel is installed by pip without dependencies. The distributions that it requires, and those that these
require, are linked from the environment of the tests: nothing is downloaded, torch is not copied, and a
package that pyproject.toml forgot is missing as it would be for a user.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True)
class Environment:
    """A virtual environment in `folder`, without pip."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Environment:
        venv.create(folder, symlinks=True)
        return cls(folder)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        [found] = self.folder.glob("lib/python*/site-packages")
        return found

    def install(self, *wheels: Path) -> None:
        """Install wheels without their dependencies. Raises CalledProcessError."""
        command = [
            *PIP,
            "--python",
            str(self.python),
            "install",
            "--no-deps",
            "--no-index",
            *map(str, wheels),
        ]
        subprocess.run(command, env=clean_variables(), check=True)

    def link_dependencies(self, name: str, extra: str = "") -> int:
        """Link what the wheel of `name` requires with `extra`; return the size of all in bytes."""
        [metadata] = self.site_packages.glob(f"{name}-*.dist-info")
        root = PathDistribution(metadata)
        return sum(map(self.link, _closure(root, _required(root, {extra})))) + _size_of(root)

    def link_with_dependencies(self, *names: str) -> None:
        """Link distributions of this environment and what they require."""
        for name in _closure(None, map(Requirement, names)):
            self.link(name)

    def link(self, name: str) -> int:
        """Link one distribution of this environment; return its size in bytes."""
        found = distribution(name)
        for file in _files(found):
            link = self.site_packages / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(found.locate_file(file))
        return _size_of(found)

    def run(
        self, *arguments: str, folder: Path, timeout_s: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of this environment in `folder`, without what the variables of the tests say."""
        command = [str(self.folder / "bin" / arguments[0]), *arguments[1:]]
        environment = {**clean_variables(), **variables}
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def evaluate(self, code: str, folder: Path, **variables: str) -> object:
        """Run `code` and return the JSON that it prints. Raises AssertionError with what it wrote instead."""
        done = self.run("python", "-P", "-c", code, folder=folder, **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def clean_variables() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "DIPTYCH_", "TRITON_"))
    }


def _closure(root: Distribution | None, requirements: Iterable[Requirement]) -> list[str]:
    """Return the names of all distributions that `requirements` lead to, without `root`, whose they are."""
    found: dict[str, set[str]] = {}
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), {"", *requirement.extras}
        if root is not None and name == canonicalize_name(root.name):
            waiting += _required(root, requirement.extras)
        elif name not in found or not extras <= found[name]:
            installed = distribution(name)
            assert requirement.specifier.contains(installed.version, prereleases=True), requirement
            found.setdefault(name, set()).update(extras)
            waiting += _required(installed, extras)
    return sorted(found)


def _required(installed: Distribution, extras: Iterable[str]) -> Iterator[Requirement]:
    """Yield the requirements that hold on this machine: those of no extra, and those of `extras`."""
    for text in installed.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": one}) for one in ("", *extras)
        ):
            yield requirement


def _files(installed: Distribution) -> list[str]:
    """Return the files below site-packages, without scripts and compiled Python."""
    names = [str(file) for file in installed.files or ()]
    return [name for name in names if not name.startswith("..") and not name.endswith(".pyc")]


def _size_of(installed: Distribution) -> int:
    paths = [Path(str(installed.locate_file(name))) for name in _files(installed)]
    return sum(path.stat().st_size for path in paths if path.exists())
