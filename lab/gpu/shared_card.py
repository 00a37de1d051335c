"""The whole service of an 8B shape on one GPU, prefill and decode sharing it in each way: `--gpu-sharing`.

Random weights in a folder, `diptych up` with one worker of each role, closed loops of clients: 1,024 tokens
in, 128 out. `off` is a process a worker; the other ways host both in one.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diptych.runtime.python_module import module_command
from lab.gpu.llama_folder import write_llama_folder
from lab.gpu.model_step import tiny
from lab.gpu.random_model import LLAMA_3_8B
from lab.gpu.section import Context, Figure, device_of, figure
from lab.gpu.service import Load, bench
from lab.peers.process import RunningServer, StartFailed
from lab.peers.servers import Server

SECTION = "shared card"
OFF = "off"
WAYS = (OFF, "turns", "streams", "partition", "partition:48")
_NO_WARMUPS = ("--num-warmups", "0", "--no-progress")
_START_TIMEOUT_S = 150.0
_TOKENS = 49_152
"""Tokens of the tokenizer."""


def shared_card(context: Context) -> Iterator[Figure]:
    """Yield throughput, TTFT and ITL of each way at each load. Raises StartFailed where `off` fails."""
    device = device_of(context)
    ways = context.pick(WAYS, WAYS[:4], WAYS[:2])
    loads = context.pick(
        (Load(1, 6, 1024, 128), Load(16, 96, 1024, 128), Load(64, 320, 1024, 128)),
        (Load(1, 3, 1024, 128), Load(16, 48, 1024, 128), Load(64, 192, 1024, 128)),
        (Load(2, 2, 24, 8),),
    )
    warm = replace(loads[-1], requests=loads[-1].clients)
    shape = replace(tiny(LLAMA_3_8B), vocab_size=_TOKENS) if context.dry else LLAMA_3_8B
    base: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context.say("writing the model")
        dtype = torch.float32 if context.dry else torch.bfloat16
        model = write_llama_folder(folder / "model", shape, device, dtype)
        torch.cuda.empty_cache()
        for way in ways:
            server = _server(way, model, device)
            try:
                with RunningServer(server, folder) as running:
                    bench(running.address, warm, folder / "warm.json", *_NO_WARMUPS)
                    for load in loads:
                        found = bench(running.address, load, folder / "load.json", *_NO_WARMUPS)
                        yield _figure(way, load, found, base)
                yield figure(
                    SECTION, f"{way}: ready after", running.start_s, "s", note=_shared(folder, server.name)
                )
            except (StartFailed, subprocess.SubprocessError) as error:
                if way == OFF:
                    raise
                yield figure(SECTION, f"{way}: failed", 0.0, "tokens/s", note=str(error)[-1500:])


def _figure(way: str, load: Load, found: dict[str, Any], base: dict[int, float]) -> Figure:
    rate = float(found["output_throughput"])
    if way == OFF:
        base[load.clients] = rate
    times = ", ".join(
        f"{name} {found[f'median_{key}_ms']:.1f}/{found[f'p99_{key}_ms']:.1f}"
        for name, key in (("TTFT", "ttft"), ("ITL", "itl"))
        if found.get(f"median_{key}_ms") is not None
    )
    return figure(
        SECTION,
        f"{way}: {load.clients} clients",
        rate,
        "tokens/s",
        against="two processes",
        ratio=rate / base[load.clients] if load.clients in base else None,
        note=f"p50/p99 in ms: {times}; {found['completed']} answers, {found['failed']} failed",
    )


def _server(way: str, model: Path, device: torch.device) -> Server:
    on_device = ("--dtype", "bf16") if device.type == "cuda" else ("--dtype", "fp32")
    return Server(
        name=f"diptych-{way.replace(':', '-')}",
        family="diptych",
        precision="bf16",
        arguments=(
            *module_command("diptych"),
            *("up", "--model", str(model), "--device", device.type, *on_device, "--gpu-sharing", way),
            *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
        ),
        start_timeout_s=_START_TIMEOUT_S,
    )


def _shared(folder: Path, name: str) -> str:
    """Return what the log says of the sharing, and errors of the workers."""
    lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()
    wanted = ("computes both phases", "KV pool", " E pair", " E prefill", " E decode", "ended:")
    return " | ".join(line[-220:] for line in lines if any(word in line for word in wanted))[:1500]
