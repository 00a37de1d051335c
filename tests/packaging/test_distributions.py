"""Contents and tags of the wheel and the sdist."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from diptych import __version__
from diptych.runtime.python_module import PACKAGES

ROOT = Path(__file__).parents[2]
NATIVE_STEP = "kernels/cpu/_step.so"


def names_in(archive: Path) -> set[str]:
    return set(zipfile.ZipFile(archive).namelist())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the tag is that of x86_64")
def test_wheel_carries_the_native_step_for_every_python(wheel: Path) -> None:
    assert re.fullmatch(rf"diptych-{__version__}-py3-none-manylinux_2_\d+_x86_64\.whl", wheel.name)
    assert NATIVE_STEP in names_in(wheel)


def test_wheel_holds_packages_of_ours_only(wheel: Path) -> None:
    info = f"diptych-{__version__}.dist-info"
    assert {name.partition("/")[0] for name in names_in(wheel)} == {*PACKAGES, info}
    listed = zipfile.ZipFile(wheel).read(f"{info}/top_level.txt").decode().split()
    assert sorted(listed) == sorted(PACKAGES)
    assert "kernels/__init__.py" not in names_in(wheel)
    assert not [name for name in names_in(wheel) if name.endswith((".cpp", ".h", ".pyc"))]


def test_sdist_holds_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = [
        *ROOT.glob("kernels/cpu/*.cpp"),
        *ROOT.glob("kernels/cpu/*.h"),
        *ROOT.glob("protos/**/*.proto"),
    ]
    wanted = {str(path.relative_to(ROOT)) for path in sources} | {"README.md", "LICENSE", "setup.py"}
    assert wanted <= names
    assert not {name.partition("/")[0] for name in names} & {"tests", "lab", "docs", "build"}
    assert not [name for name in names if name.endswith(".so")]


def test_wheel_without_a_compiler_is_for_all_platforms(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = tmp_path.glob("diptych-*")
    environment = {**os.environ, "CXX": "/no/such/compiler", "DIPTYCH_NATIVE_CACHE": ""}
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    built = tmp_path / f"diptych-{__version__}-py3-none-any.whl"
    assert NATIVE_STEP not in names_in(built)
