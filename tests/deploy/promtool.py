"""The real promtool: the machine's own, or that of Debian's package, which is unpacked and not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.deploy.manifests import ROOT

KEPT = ROOT / "build" / "prometheus"


@cache
def promtool_path() -> Path | None:
    """Return promtool; None where neither is to be had."""
    own = shutil.which("promtool")
    if own is not None:
        return Path(own)
    tool = KEPT / "usr" / "bin" / "promtool"
    if not tool.exists() and not _fetch():
        return None
    return tool


def _fetch() -> bool:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return False
    with TemporaryDirectory(dir=_made(KEPT.parent)) as name:
        folder = Path(name)
        download = ["apt-get", "download", "-q", "prometheus"]
        for command in (download, ["apt-get", "update", "-q"], download):
            subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=300)
            packages = list(folder.glob("prometheus_*.deb"))
            if packages:
                break
        else:
            return False
        unpacked = folder / "unpacked"
        subprocess.run(["dpkg", "-x", str(packages[0]), str(unpacked)], check=True, timeout=120)
        if not KEPT.exists():
            os.replace(unpacked, KEPT)
    return True


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
