"""Write the images' requirement files: packages by version and hash, within pyproject.toml's bounds.

    pip install uv && python deploy/requirements/lock.py

torch is in none: each image takes its own build of it, by exact version. What torch needs is locked.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = HERE.parents[1] / "pyproject.toml"
FILES = {"gateway": ("gateway",), "cpu": ("gateway", "server")}
"""Names of the files, and the extras that they hold."""
NEEDED_BY_TORCH = ("filelock>=3.10,<4", "fsspec>=2025.3", "networkx>=3.2,<4", "sympy>=1.13.3,<2")


def requirements_of(name: str) -> list[str]:
    """Return what a file is made from: the project's own dependencies and those of its extras."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *(one for extra in FILES[name] for one in extras[extra])]
    if "server" in FILES[name]:
        listed += NEEDED_BY_TORCH
    return [one for one in listed if not one.startswith(("diptych[", "torch>"))]


def lock(name: str) -> None:
    """Write a file. Raises CalledProcessError where nothing fits the bounds."""
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "-", "--universal", "--python-version", "3.11"),
        *("--generate-hashes", "--upgrade", "--no-header", "--no-annotate", "--quiet"),
        *("--output-file", str(HERE / f"{name}.txt")),
    ]
    subprocess.run(command, input="\n".join(requirements_of(name)), text=True, check=True)


if __name__ == "__main__":
    for file in FILES:
        lock(file)
