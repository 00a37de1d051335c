"""The whole service on one GPU, beside transformers' continuous batching in a process of its own memory.

The bundled model, because a service needs a tokenizer and a file: it is small, so that the figure is mostly
what lies around the model. The peer gets all prompts at once and no network; ours serves 64 clients by gRPC.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diptych.runtime.python_module import module_command
from diptych.runtime.settings import resolve_model
from lab.gpu.section import Context, Figure, Unmeasured, device_of, figure
from lab.peers.process import RunningServer, StartFailed
from lab.peers.servers import Server

SECTION = "service"
_AT_LEAST = 3.0
_BENCH_TIMEOUT_S = 180
_START_TIMEOUT_S = 240.0
"""Kernels are compiled and decode steps recorded."""
_UNPACED = ("--set", "decode.decode-pacing=1", "--set", "decode.decode-pacing-max=1")


@dataclass(frozen=True)
class Load:
    """Load of a service: clients at once, requests in all, tokens given and asked for in each."""

    clients: int
    requests: int
    given: int
    asked: int


def service(context: Context) -> Iterator[Figure]:
    """Tokens a second of 64 clients, against the peer's. Raises StartFailed with the end of the log."""
    device = device_of(context)
    load = context.pick(
        Load(64, 64 * 8, 128, 128), Load(64, 64 * 2, 128, 128), Load(clients=2, requests=2, given=9, asked=4)
    )
    context.say("transformers' continuous batching")
    peer = _peer_tokens_per_second(device, load)
    gc.collect()  # what its manager holds lies in cycles
    torch.cuda.empty_cache()
    yield figure(SECTION, "transformers, continuous batching", peer, "tokens/s")
    context.say("diptych up")
    with tempfile.TemporaryDirectory() as folder:
        found = _served(Path(folder), device, load)
        unpaced = _served(Path(folder), device, load, *_UNPACED)
    yield figure(
        SECTION,
        f"served at concurrency {load.clients}",
        float(found["output_throughput"]),
        "tokens/s",
        against="transformers' continuous batching",
        ratio=float(found["output_throughput"]) / peer,
        at_least=_AT_LEAST,
        note=f"bundled model in bf16, {load.given} tokens in, {load.asked} out",
    )
    for name, key, unit in (
        ("throughput", "output_throughput", "tokens/s"),
        ("time to the first token, median", "median_ttft_ms", "ms"),
        ("between tokens, median", "median_itl_ms", "ms"),
    ):
        yield figure(
            SECTION, name, float(found[key]), unit,
            against="decode steps that leave the card to no prompt",
            ratio=float(found[key]) / float(unpaced[key]),
        )  # fmt: skip


def _served(folder: Path, device: torch.device, load: Load, *options: str) -> dict[str, Any]:
    server = Server(
        name="diptych",
        family="diptych",
        precision="bf16",
        arguments=(
            *module_command("diptych"),
            *("up", "--device", device.type, "--dtype", "bf16"),
            *("--gpu-memory-utilization", "0.3"),
            *options,
            *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
        ),
        start_timeout_s=_START_TIMEOUT_S,
    )
    with RunningServer(server, folder) as running:
        # The peer is warmed up by a batch of the same size, too.
        bench(running.address, load, folder / "warm.json")
        return bench(running.address, load, folder / "load.json")


def bench(address: str, load: Load, output: Path, *options: str) -> dict[str, Any]:
    """Return the figures of one run of the load generator on Diptych at `address`; see `run_bench`."""
    return run_bench(("--address", address), load, output, *options)


def run_bench(at: Sequence[str], load: Load, output: Path, *options: str) -> dict[str, Any]:
    """Return the figures of one run of the load generator, which `at` tells the server.

    Raises StartFailed with what it wrote.
    """
    done = subprocess.run(
        [
            *module_command("diptych"),
            *("bench", *at),
            *("--max-concurrency", str(load.clients), "--num-prompts", str(load.requests), "--rounds", "1"),
            *("--random-input-len", str(load.given), "--random-output-len", str(load.asked)),
            *("--output-file", str(output)),
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=_BENCH_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise StartFailed(f"the load generator failed: {done.stderr[-600:]}")
    (found,) = json.loads(output.read_text())
    assert isinstance(found, dict)
    return found


def _peer_tokens_per_second(device: torch.device, load: Load) -> float:
    """transformers' `generate_batch` with answers of fixed length, its manager made, sized and its graphs
    captured by a first batch of the same size with other prompts. Raises Unmeasured where an answer is short.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # it looks for kernels to fetch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    path = resolve_model("bundled")
    model: Any = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        quantization_config=GgufConfig(dequantize=True),  # else it multiplies the file's blocks
    )
    model = model.to(device).eval()
    config = GenerationConfig(max_new_tokens=load.asked, do_sample=False, eos_token_id=-1, pad_token_id=0)
    chooser = random.Random(3)

    def batch() -> tuple[float, int]:
        """Seconds, and tokens that came."""
        vocab = int(model.config.vocab_size)
        prompts = [[chooser.randrange(100, vocab) for _ in range(load.given)] for _ in range(load.requests)]
        started = time.perf_counter()
        answers = model.generate_batch(prompts, generation_config=config, persistent_manager=True)
        seconds = time.perf_counter() - started
        return seconds, sum(len(answer.generated_tokens) for answer in answers.values())

    batch()
    seconds, tokens = batch()
    model.destroy_cached_continuous_batching_manager()
    if tokens != load.requests * load.asked:
        raise Unmeasured(f"transformers gave {tokens} tokens of {load.requests * load.asked}")
    return tokens / seconds
