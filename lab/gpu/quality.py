"""Text on the card beside references: KL of FP8 and 4-bit steps, and greedy text beside transformers in fp32.

The first is held against the step's own dequantised weights in float32, by torch on the same device: what is
seen is rounding of inputs, sums and activations, not that of weights. Text is the Python reference.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diptych.client import AsyncClient
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Weights
from diptych.engine.weights.checkpoint import read_checkpoint
from diptych.runtime.python_module import module_command
from diptych.runtime.settings import resolve_model
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from kernels import packed_matrix, scaled_matrix
from kernels.packed_matrix import pack
from kernels.scaled_matrix import FP8, INT8
from lab.gpu.fp8_attention import attention_steps
from lab.gpu.section import Context, Figure, device_of, figure
from lab.peers.process import RunningServer
from lab.peers.servers import Server
from lab.quality.matrices import with_matrices
from lab.quality.text import python_reference, windows

SECTION, TEXT = "divergence", "greedy text"
_MOST_KL = 0.002
_FEW_ROWS = 16
_BLOCK = 16
_FEW_TOKENS = 99
Backend = TorchBackend | TritonBackend


def divergence(context: Context) -> Iterator[Figure]:
    """Yield the mean KL of the bundled model's logits in each format from those of the same numbers."""
    device = device_of(context)
    path = resolve_model("bundled")
    found = read_checkpoint(path, "fp32")
    shape, weights = found.shape, found.weights
    count, length = context.pick((8, 512), (4, 512), (1, 6))
    pieces = windows(Tokenizer.load(path).encode(python_reference().content), count, length)
    if context.dry:  # a layer and a few tokens are enough for the interpreter
        shape = replace(shape, layers=shape.layers[:1], vocab_size=_FEW_TOKENS)
        weights = replace(weights, layers=weights.layers[:1], embed=weights.embed[:_FEW_TOKENS].clone())
        pieces = [[token % _FEW_TOKENS for token in piece] for piece in pieces]
    for name, rounded, plain in _FORMATS:
        context.say(name)
        quantised = with_matrices(weights, rounded)
        step = TritonBackend(shape, _as_bf16(quantised), device)
        meaning = TorchBackend(shape, _on(with_matrices(quantised, plain), device))
        total = sum(_mean_kl(meaning, step, shape, device, piece) for piece in pieces)
        if name == "FP8":
            yield _decoded_figure(context, meaning, step, shape, device, pieces)
        yield figure(
            SECTION, f"mean KL of {name}", total / len(pieces), "nats", at_most=_MOST_KL,
            note=f"{count} windows of {length} tokens, activations and KV in bf16",
        )  # fmt: skip
    yield from _attention_figure(context, shape, weights, pieces)


def _decoded_figure(
    context: Context,
    meaning: Backend,
    step: Backend,
    shape: ModelShape,
    device: torch.device,
    pieces: Sequence[Sequence[int]],
) -> Figure:
    """Return the mean KL of FP8 in what is decoded, few rows a step, behind the first half of each piece."""
    half = len(pieces[0]) // 2
    total = sum(_mean_kl(meaning, step, shape, device, piece, prompt=half) for piece in pieces)
    return figure(
        SECTION, f"mean KL of FP8 in steps of {_FEW_ROWS} rows", total / len(pieces), "nats",
        at_most=_MOST_KL, note=f"{len(pieces)} windows, prompts of {half} tokens in FP8",
    )  # fmt: skip


def _attention_figure(
    context: Context, shape: ModelShape, weights: Weights, pieces: Sequence[Sequence[int]]
) -> Iterator[Figure]:
    """Yield the mean KL of attention with products of FP8 from 16 bits, both over keys and values in FP8."""
    from kernels.gpu.fp8_prefill import lacks_fp8

    context.say("attention in FP8")
    device = device_of(context)
    if (why := lacks_fp8(device, shape.head_dim)) is not None:
        context.say(why)
        return
    plain, eight = attention_steps(shape, _as_bf16(weights), device)
    total = sum(_mean_kl(plain, eight, shape, device, piece, (FP8, FP8)) for piece in pieces)
    yield figure(
        SECTION, "mean KL of attention with products of FP8", total / len(pieces), "nats",
        note=f"{len(pieces)} windows of {len(pieces[0])} tokens, activations in bf16",
    )  # fmt: skip


def _four_bits(matrix: torch.Tensor) -> Any:
    """Round to 16 levels of each group of 64."""
    groups = matrix.float().unflatten(1, (-1, 64))
    scales = (groups.abs().amax(-1) / 7.5).half()
    codes = (groups / scales.float().unsqueeze(-1) + 8).round().clamp(0, 15).to(torch.uint8).flatten(1)
    return pack("int4", codes, scales, 64, zero=8)


_FORMATS: tuple[tuple[str, Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], ...] = (
    ("FP8", lambda one: scaled_matrix.quantise(one, FP8), scaled_matrix.dequantise),
    ("int8", lambda one: scaled_matrix.quantise(one, INT8), scaled_matrix.dequantise),
    ("4 bits", _four_bits, packed_matrix.dequantise),
)
"""Formats, how a matrix `[rows, columns]` is rounded, and the numbers that it has then."""


def _as_bf16(weights: Weights) -> Weights:
    """Return the weights with all that is not quantised in bfloat16."""
    return _map(weights, lambda tensor: tensor.bfloat16())


def _on(weights: Weights, device: torch.device) -> Weights:
    return _map(weights, lambda tensor: tensor.to(device))


def _map(weights: Weights, change: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
    """Return the weights with every tensor of full numbers changed; a model without experts."""

    def of(part: Any) -> Any:
        return replace(
            part,
            **{name: change(value) for name, value in vars(part).items() if isinstance(value, torch.Tensor)},
        )

    changed: Weights = replace(of(weights), layers=tuple(map(of, weights.layers)))
    return changed


def _mean_kl(
    meaning: Backend,
    step: Backend,
    shape: ModelShape,
    device: torch.device,
    token_ids: Sequence[int],
    kept: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.bfloat16),
    prompt: int = 0,
) -> float:
    """Return the mean KL of `step` from `meaning`, whose keys and values are `kept` in such numbers, behind a
    `prompt` of so many tokens.
    """
    logits = [
        _logits(backend, shape, dtype, device, token_ids, prompt).log_softmax(-1)
        for backend, dtype in zip((meaning, step), kept, strict=True)
    ]
    return float((logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean())


def _logits(
    backend: Backend,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    token_ids: Sequence[int],
    prompt: int,
) -> torch.Tensor:
    """Return float32 logits after each token, `[tokens, vocab]`; behind a `prompt`, if there is one, of those
    that follow, few a step.
    """
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, _BLOCK, dtype)
    blocks = layout.blocks_for(len(token_ids))
    memory = KVMemory.on_device(layout, blocks, device)
    cuts = [0, *range(prompt, len(token_ids), _FEW_ROWS)] if prompt else [0]
    found = []
    for begin, end in zip(cuts, [*cuts[1:], len(token_ids)], strict=True):
        step = SequenceStep(
            memory, range(blocks), begin, list(token_ids[begin:end]), True, trailing=end - begin
        )
        found.append(backend.forward([step], None).float())
    return torch.cat(found[1:] if prompt else found)


def greedy_text(context: Context) -> Iterator[Figure]:
    """Yield the prompts whose text from the service in fp32 is not transformers'."""
    device = device_of(context)
    count, asked = context.pick((30, 64), (30, 32), (2, 3))
    ids = Tokenizer.load(resolve_model("bundled")).encode(python_reference().content)
    # Lengths about the borders of blocks and chunks, up to a thousand tokens.
    prompts = [list(ids[211 * n : 211 * n + 1 + (37 * n * n) % 1000]) for n in range(count)]
    context.say("transformers")
    expected = _transformers(prompts, asked, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    context.say("diptych up")
    with tempfile.TemporaryDirectory() as folder, RunningServer(_server(device), Path(folder)) as running:
        got = asyncio.run(_served(running.address, prompts, asked))
    others = sum(mine != right for mine, right in zip(got, expected, strict=True))
    yield figure(
        TEXT, "prompts whose text is not transformers'", float(others), "prompts", at_most=0,
        note=f"of {count}, {asked} tokens each, bundled model in fp32, eight at a time",
    )  # fmt: skip


def _transformers(prompts: Sequence[list[int]], asked: int, device: torch.device) -> list[list[int]]:
    from transformers import AutoModelForCausalLM, GgufConfig

    path = resolve_model("bundled")
    model: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    model = model.to(device).eval()
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt], device=device)
            answer = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked, min_new_tokens=asked,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
            found.append(answer[0, len(prompt) :].tolist())
    del model
    gc.collect()
    return found


async def _served(address: str, prompts: Sequence[list[int]], asked: int) -> list[list[int]]:
    gate = asyncio.Semaphore(8)
    async with AsyncClient(address) as client:

        async def one(prompt: list[int]) -> list[int]:
            async with gate:
                options = {"temperature": 0.0, "max_tokens": asked, "min_tokens": asked}
                answer = await client.generate(prompt, timeout_s=120.0, **options)  # type: ignore[arg-type]
                return list(answer.first.token_ids)

        return list(await asyncio.gather(*map(one, prompts)))


def _server(device: torch.device) -> Server:
    return Server(
        name="diptych-fp32",
        family="diptych",
        precision="fp32",
        arguments=(
            *module_command("diptych"),
            *("up", "--device", device.type, "--dtype", "fp32", "--gpu-memory-utilization", "0.3"),
            *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
        ),
        start_timeout_s=240.0,
    )
