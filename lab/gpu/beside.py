"""The whole service of an 8B shape beside vLLM's, on one GPU: 1,024 tokens in, 128 out, greedy, closed loops.

In bf16, in FP8, in AWQ's 4 bits (vLLM by Marlin), and Qwen3-30B-A3B's experts with as many layers as the disk
has room for.

Both serve the same folder of random weights, one after the other, in rounds by turns; one load generator asks
both. A figure holds the median of the rounds beside the peer's. vLLM is an installation of its own: `--vllm`
names its command, or it is found on the PATH or where `python -m lab.peers` keeps it.

In a dry run Diptych's own OpenAI API stands in for the peer.
"""

from __future__ import annotations

import re
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from diptych.runtime.python_module import module_command
from lab.gpu.llama_folder import write_llama_folder
from lab.gpu.model_step import tiny
from lab.gpu.qwen_moe import QWEN3_30B_A3B, fewer_layers, tiny_moe, write_qwen_moe_folder
from lab.gpu.random_model import LLAMA_3_8B
from lab.gpu.section import Context, Figure, Unmeasured, device_of, figure
from lab.gpu.service import Load, run_bench
from lab.peers.process import RunningServer
from lab.peers.servers import MODEL_NAME, VLLM_ENVIRONMENT, Server

Kind = Literal["bf16", "fp8", "4 bits", "experts"]
OURS, PEER = "Diptych", "vLLM"
_START_TIMEOUT_S = 300.0
_TOKENS = 49_152
"""Tokens of the tokenizer."""
_QUIET = ("--num-warmups", "0", "--no-progress", "--token-ids", "100:40000")


@dataclass(frozen=True)
class Measure:
    """A figure of the load generator, and the least share of the peer's that ours is to reach."""

    name: str
    key: str
    unit: str
    faster_is_less: bool
    at_least: Mapping[Kind, Mapping[int, float]]
    """Bound on ours over the peer's, or on the peer's over ours where less is better, by clients."""


MEASURES = (
    Measure(
        "tokens/s", "output_throughput", "tokens/s", False,
        {"bf16": {1: 1.15, 16: 1.05, 64: 1.05}, "fp8": {16: 1.0, 64: 1.0}, "4 bits": {16: 1.0}},
    ),
    Measure("TTFT p50", "median_ttft_ms", "ms", True, {"bf16": {16: 2.0, 64: 2.0}}),
    Measure("TTFT p99", "p99_ttft_ms", "ms", True, {}),
    Measure("ITL p50", "median_itl_ms", "ms", True, {}),
    Measure("ITL p99", "p99_itl_ms", "ms", True, {"bf16": {16: 4.0, 64: 4.0}}),
)  # fmt: skip

Rounds = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]
"""Findings of the load generator in each round, by server and clients."""


def find_vllm(given: Path | None) -> Path | None:
    """Return the command `vllm` that was given, is on the PATH, or belongs to lab.peers' environment."""
    if given is not None:
        return given
    from lab.peers.places import DEFAULT_ROOT, Places

    kept = Places(DEFAULT_ROOT).vllm / "bin" / "vllm"
    found = shutil.which("vllm") or (str(kept) if kept.exists() else None)
    return None if found is None else Path(found)


def figures(kind: Kind, rounds: Rounds) -> Iterator[Figure]:
    """Yield the median of each measure beside the peer's; without the peer the bare figure."""
    for clients in sorted({clients for _, clients in rounds}):
        for measure in MEASURES:
            ours, theirs = (_values(rounds.get((name, clients), ()), measure.key) for name in (OURS, PEER))
            if not ours:
                continue
            mine, name = statistics.median(ours), f"{clients} clients, {measure.name}"
            note = f"rounds {', '.join(f'{value:.1f}' for value in ours)}"
            if not theirs:
                yield figure(section_of(kind), name, mine, measure.unit, note=note)
                continue
            peer = statistics.median(theirs)
            share = peer / mine if measure.faster_is_less else mine / peer
            yield figure(
                section_of(kind), name, mine, measure.unit, against=PEER, ratio=share,
                at_least=measure.at_least.get(kind, {}).get(clients),
                note=f"{note}; {PEER} {peer:.1f}: {', '.join(f'{value:.1f}' for value in theirs)}",
            )  # fmt: skip


def section_of(kind: Kind) -> str:
    """Return the name of the section of a kind of weights."""
    return "beside" if kind == "bf16" else f"beside {kind}"


def beside(context: Context, kind: Kind = "bf16") -> Iterator[Figure]:
    """Yield starts and, after each round, answers that failed; then every measure beside the peer's.

    Raises Unmeasured, behind our own figures, where there is no vLLM.
    """
    device = device_of(context)
    loads = context.pick(
        (Load(1, 6, 1024, 128), Load(16, 96, 1024, 128), Load(64, 320, 1024, 128)),
        (Load(1, 3, 1024, 128), Load(16, 48, 1024, 128), Load(64, 192, 1024, 128)),
        (Load(2, 2, 24, 8),),
    )
    if kind in ("4 bits", "experts"):
        loads = loads[:2]
    vllm = None if context.dry else find_vllm(context.vllm)
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = _write_model(context, kind, folder / "model", device)
        servers = {OURS: diptych_server(kind, model, device)}
        if context.dry:
            servers[PEER] = replace(diptych_server(kind, model, device), name="stand-in")
        elif vllm is not None:
            servers[PEER] = vllm_server(kind, model, vllm)
        for number in range(context.pick(2, 1, 1)):
            for who, server in servers.items():
                context.say(f"{who}, round {number + 1}")
                yield from _round(kind, who, server, folder, loads, found)
        if kind == "4 bits":
            yield from _memory(folder, model, servers[OURS].name)
    yield from figures(kind, found)
    if PEER not in servers:
        raise Unmeasured("no vLLM here: name its command with --vllm")


beside_fp8 = partial(beside, kind="fp8")
beside_4_bits = partial(beside, kind="4 bits")
beside_experts = partial(beside, kind="experts")


def _write_model(context: Context, kind: Kind, folder: Path, device: torch.device) -> Path:
    dtype = torch.float32 if context.dry else torch.bfloat16
    if kind == "experts":
        shape = replace(tiny_moe(), vocab_size=_TOKENS) if context.dry else QWEN3_30B_A3B
        shape = fewer_layers(shape, folder.parent)
        context.say(f"writing {shape.num_layers} layers of the model")
        path = write_qwen_moe_folder(folder, shape, device, dtype)
    else:
        context.say("writing the model")
        shape = replace(tiny(LLAMA_3_8B), vocab_size=_TOKENS) if context.dry else LLAMA_3_8B
        group = (16 if context.dry else 128) if kind == "4 bits" else None
        path = write_llama_folder(folder, shape, device, dtype, awq_group=group)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return path


def _memory(folder: Path, model: Path, name: str) -> Iterator[Figure]:
    """Yield the weights' memory in each process of the server `name`, as its log has it, over the files'."""
    files = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    for number, size in enumerate(weights_in_log((folder / f"{name}.log").read_text(errors="replace"))):
        yield figure(
            section_of("4 bits"), f"weights of process {number + 1} over the files'", size / files, "",
            at_most=1.1, note=f"{size / 2**30:.2f} GiB",
        )  # fmt: skip


def weights_in_log(log: str) -> list[int]:
    """Return the bytes of weights that each memory plan in a log names (diptych/engine/gpu_memory.py)."""
    return [int(size) << 20 for size in re.findall(r"memory of \S+ in MiB: .*?\bweights (\d+)", log)]


def _round(
    kind: Kind,
    who: str,
    server: Server,
    folder: Path,
    loads: Sequence[Load],
    found: dict[tuple[str, int], list[Mapping[str, Any]]],
) -> Iterator[Figure]:
    """Start a server, warm it up with the largest load's clients, and ask it each load."""
    with RunningServer(server, folder) as running:
        yield figure(section_of(kind), f"{who} is ready after", running.start_s, "s")
        port = running.port if server.family == "vllm" else running.http_port
        over_http = ("--base-url", f"http://127.0.0.1:{port}", "--backend", "openai")
        at: tuple[str, ...] = ("--address", running.address) if who == OURS else over_http
        warm = replace(loads[-1], requests=loads[-1].clients)
        run_bench(at, warm, folder / "warm.json", "--seed", "0", *_QUIET)
        for load in loads:
            # Prompts of a seed of their own: none lies in a server's prefix cache.
            one = run_bench(at, load, folder / "load.json", "--seed", str(load.clients), *_QUIET)
            found.setdefault((who, load.clients), []).append(one)
            if one.get("failed"):
                name = f"{who}, {load.clients} clients: answers that failed"
                yield figure(section_of(kind), name, float(one["failed"]), "answers", at_most=0)


def diptych_server(kind: Kind, model: Path, device: torch.device) -> Server:
    """Describe Diptych as a user starts it."""
    numbers: tuple[str, ...] = {
        "bf16": ("--dtype", "bf16"),
        "fp8": ("--quantization", "fp8"),
        "4 bits": (),
        "experts": ("--dtype", "bf16", "--gpu-sharing", "turns"),  # once in memory: twice does not fit
    }[kind]
    if device.type != "cuda":
        numbers = ("--dtype", "fp32")
    return Server(
        name=f"diptych-{kind.replace(' ', '-')}",
        family="diptych",
        precision=kind,
        arguments=(
            *module_command("diptych"),
            *("up", "--model", str(model), "--device", device.type, *numbers),
            *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
        ),
        start_timeout_s=_START_TIMEOUT_S,
    )


def vllm_server(kind: Kind, model: Path, command: Path) -> Server:
    """Describe vLLM with its defaults: compiled, CUDA graphs, its own choice of attention."""
    numbers = ("--quantization", "fp8") if kind == "fp8" else ()
    return Server(
        name=f"vllm-{kind.replace(' ', '-')}",
        family="vllm",
        precision=kind,
        arguments=(
            *(str(command), "serve", str(model), "--served-model-name", MODEL_NAME, "--dtype", "bfloat16"),
            *("--host", "127.0.0.1", "--port", "{port}", "--max-model-len", "8192", *numbers),
        ),
        environment={
            name: value for name, value in VLLM_ENVIRONMENT.items() if not name.startswith("VLLM_CPU")
        },
        start_timeout_s=_START_TIMEOUT_S,
    )


def _values(rounds: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(found[key]) for found in rounds if found.get(key) is not None]
