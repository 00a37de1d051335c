"""Every server of the comparison: how it is started, and what is measured on it.

The peers have the best settings that were found (README.md has the table and the measurements that chose
them); Diptych has what a user gets who names a --dtype and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from diptych.runtime.python_module import module_command
from lab.peers.places import Places

Family = Literal["diptych", "llama.cpp", "vllm"]

MODEL_NAME = "model"
CONTEXT = 2048  # tokens a sequence may have; the longest one here has about 1,300


@dataclass(frozen=True)
class Server:
    """`arguments` may hold {port}, {spare_port} and {ready_file}, which are known when it starts.

    `parks`: too slow to start for every round; it is stopped by SIGSTOP while others are measured. `streams`:
    the interference load is run on it. `extra_body` goes into every HTTP request.
    """

    name: str
    family: Family
    precision: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    parks: bool = False
    streams: bool = False
    start_timeout_s: float = 60.0

    def command(self, port: int, spare_port: int, ready_file: Path) -> list[str]:
        known = {"{port}": str(port), "{spare_port}": str(spare_port), "{ready_file}": str(ready_file)}
        return [known.get(argument, argument) for argument in self.arguments]


def diptych(dtype: str, model: str) -> Server:
    """Describe Diptych as a user starts it."""
    return Server(
        name=f"diptych-{dtype}",
        family="diptych",
        precision=dtype,
        arguments=(
            *module_command("diptych"),
            *("up", "--dtype", dtype, "--model", model),
            *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
        ),
        streams=True,
    )


def llama_cpp(kind: str, gguf: Path, places: Places, threads: int) -> Server:
    """llama.cpp's server on a GGUF file of type `kind`."""
    return Server(
        name=f"llama.cpp-{kind}",
        family="llama.cpp",
        precision=kind,
        arguments=(
            *(str(places.llama_binaries / "llama-server"), "--model", str(gguf), "--alias", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", "{port}"),
            *("--threads", str(threads), "--threads-batch", str(threads)),
            *("--parallel", str(LLAMA_SLOTS), "--ctx-size", str(LLAMA_SLOTS * LLAMA_SLOT_TOKENS)),
            *LLAMA_SETTINGS,
        ),
        extra_body=LLAMA_BODY,
    )


def vllm(kind: str, folder: Path, places: Places, cores: Sequence[int], tcmalloc: Path | None) -> Server:
    """vLLM's CPU build on a Hugging Face folder."""
    preloads = [str(path) for path in (tcmalloc, places.vllm / "lib" / "libiomp5.so") if path is not None]
    return Server(
        name=f"vllm-{kind}",
        family="vllm",
        precision=kind,
        arguments=(
            *(str(places.vllm / "bin" / "vllm"), "serve", str(folder), "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", "{port}", "--max-model-len", str(CONTEXT)),
            *VLLM_SETTINGS,
        ),
        environment={
            "LD_PRELOAD": ":".join(preloads),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CACHE_ROOT": str(places.vllm_cache),
            **VLLM_ENVIRONMENT,
        },
        parks=True,
        streams=True,
        start_timeout_s=600.0,
    )


LLAMA_SLOTS = 8  # more clients wait; their tokens a second are no fewer, see README.md
LLAMA_SLOT_TOKENS = 1024
LLAMA_SETTINGS = (
    *("--batch-size", "2048", "--ubatch-size", "512", "--flash-attn", "on"),
    *("--cache-ram", "0"),  # no copies of finished prompts: nothing here is asked twice
    *("--no-ui", "--log-disable"),
)
LLAMA_BODY: Mapping[str, Any] = {"cache_prompt": False}

VLLM_SETTINGS = (
    *("--dtype", "bfloat16", "--max-num-seqs", "32"),
    "--no-enable-prefix-caching",
    *("--uvicorn-log-level", "warning"),
)
VLLM_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "86400",  # its clock goes on while it is parked
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
