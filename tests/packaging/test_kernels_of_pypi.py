"""PyPI's `kernels` beside our namespace package of that name, installed before it and after it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.packaging.environment import PIP, Environment

THEIRS = "kernels>=0.10,<1"
PROBE = """
import json
from transformers.utils.import_utils import is_kernels_available
probed = [is_kernels_available(), is_kernels_available(MIN_VERSION="0.10", MAX_VERSION="1")]
import {modules}
print(json.dumps(probed))
"""
OURS = "kernels.cpu.library as ours; assert ours.instruction_sets(ours.FP32)"
OF_BOTH = f"kernels; kernels.get_kernel; import {OURS}"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pypi")
    subprocess.run([*PIP, "download", "--no-deps", "--dest", str(folder), THEIRS], check=True)
    [wheel] = folder.glob("kernels-*.whl")
    return wheel


def probe(folder: Path, wheels: list[Path], modules: str) -> object:
    """Install `wheels` in this order, import `modules`, and return the answers of transformers' probe."""
    environment = Environment.create(folder / "environment")
    for wheel in wheels:
        environment.install(wheel)
    environment.link_with_dependencies("transformers")
    return environment.evaluate(PROBE.format(modules=modules), folder)


def test_our_kernels_alone_do_not_mislead_the_probe(wheel: Path, tmp_path: Path) -> None:
    assert probe(tmp_path, [wheel], OURS) == [False, False]


def test_their_kernels_are_probed_alike_with_and_without_ours(
    theirs: Path, wheel: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("alone", "before", "after")]
    for folder in folders:
        folder.mkdir()
    alone = probe(folders[0], [theirs], "kernels; kernels.get_kernel")
    assert probe(folders[1], [theirs, wheel], OF_BOTH) == alone
    assert probe(folders[2], [wheel, theirs], OF_BOTH) == alone
