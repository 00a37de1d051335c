"""The whole service on one GPU, beside transformers' continuous batching in a process of its own memory.

The bundled model, because a service needs a tokenizer and a file: it is small, so that the figure is mostly
what lies around the model. The peer gets all prompts at once and no network; ours serves 64 clients by gRPC.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.section import Context, Figure, figure, require_cuda
from benchmarks.peers.process import RunningServer
from benchmarks.peers.servers import Server
from runtime.settings import resolve_model

SECTION = "service"
_CLIENTS = 64
_INPUT, _OUTPUT = 128, 128
_AT_LEAST = 3.0
_BENCH_TIMEOUT_S = 180


def service(context: Context) -> Iterator[Figure]:
    """Tokens a second of 64 clients, against the peer's. Raises StartFailed with the end of the log."""
    device = require_cuda(context.device)
    requests = _CLIENTS * (2 if context.quick else 8)
    context.say("transformers' continuous batching")
    peer = _peer_tokens_per_second(device, requests)
    torch.cuda.empty_cache()
    yield figure(SECTION, "transformers, continuous batching", peer, "tokens/s")
    context.say("diptych up")
    with tempfile.TemporaryDirectory() as folder:
        found = _served(Path(folder), requests)
    yield figure(
        SECTION,
        f"served at concurrency {_CLIENTS}",
        float(found["output_throughput"]),
        "tokens/s",
        against="transformers' continuous batching",
        ratio=float(found["output_throughput"]) / peer,
        at_least=_AT_LEAST,
        note=f"bundled model in bf16, {_INPUT} tokens in, {_OUTPUT} out, {found['failed']} failed",
    )
    yield figure(SECTION, "time to the first token, median", float(found["median_ttft_ms"]), "ms")
    yield figure(SECTION, "between tokens, median", float(found["median_itl_ms"]), "ms")


def _served(folder: Path, requests: int) -> dict[str, Any]:
    server = Server(
        name="diptych",
        family="diptych",
        precision="bf16",
        arguments=(
            *(sys.executable, "-m", "launcher", "up", "--device", "cuda", "--dtype", "bf16"),
            *("--gpu-memory-utilization", "0.3"),
            *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
        ),
    )
    output = folder / "load.json"
    with RunningServer(server, folder) as running:
        subprocess.run(
            [
                *(sys.executable, "-m", "launcher", "bench", "--address", running.address),
                *("--max-concurrency", str(_CLIENTS), "--num-prompts", str(requests), "--rounds", "1"),
                *("--random-input-len", str(_INPUT), "--random-output-len", str(_OUTPUT)),
                *("--output-file", str(output)),
            ],
            check=True,
            capture_output=True,
            timeout=_BENCH_TIMEOUT_S,
        )
    (found,) = json.loads(output.read_text())
    assert isinstance(found, dict)
    return found


def _peer_tokens_per_second(device: torch.device, requests: int) -> float:
    """transformers' `generate_batch` with answers of fixed length, after a small batch that warms it up."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    path = resolve_model("bundled")
    model: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.to(device).eval()
    config = GenerationConfig(max_new_tokens=_OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0)
    chooser = random.Random(3)
    prompts = [
        [chooser.randrange(100, int(model.config.vocab_size)) for _ in range(_INPUT)] for _ in range(requests)
    ]
    model.generate_batch(prompts[:4], generation_config=config)
    torch.cuda.synchronize()
    started = time.perf_counter()
    answers = model.generate_batch(prompts, generation_config=config)
    seconds = time.perf_counter() - started
    return sum(len(answer.generated_tokens) for answer in answers.values()) / seconds
