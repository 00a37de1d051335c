"""Steps of one short prompt, recorded and eager: from the call to the token, as for a lone request."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.models.shape import LayerShape, ModelShape, Rotation
from diptych.engine.sampling import SampleRow, SamplingParams
from lab.gpu.ceilings import READ
from lab.gpu.model_step import tiny
from lab.gpu.random_model import LLAMA_3_8B, matrix_elements, random_weights
from lab.gpu.section import Context, Figure, device_of, figure

SECTION = "short prompts"
SMOLLM2_135M = replace(
    LLAMA_3_8B, vocab_size=49_152, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64,
    intermediate_size=1536, layers=(LayerShape(),) * 30, rotations=(Rotation(100_000.0, 64),),
    tied_embeddings=True,
)  # fmt: skip
_TOKENS = (16, 64, 128, 256, 512)
_BLOCK = 16
_LEAST_OF_READ = {"Llama-3-8B": 1 / 2.1}
"""Share of a step's bytes over the read rate that a prompt of 128 tokens has to reach."""
_AT_MOST_MS = {"SmolLM2-135M": 10.0}


def short_prompts(context: Context) -> Iterator[Figure]:
    """Yield the times by length; those of 128 tokens beside their targets, where the read rate is known."""
    device = device_of(context)
    for name, shape in (("SmolLM2-135M", SMOLLM2_135M), ("Llama-3-8B", LLAMA_3_8B)):
        context.say(f"{name}: making weights, recording prompt steps")
        yield from _times(context, name, tiny(shape) if context.dry else shape, device)
        if not context.dry:
            torch.cuda.empty_cache()


def _times(context: Context, name: str, shape: ModelShape, device: torch.device) -> Iterator[Figure]:
    dtype = torch.bfloat16
    backend = TritonBackend(shape, random_weights(shape, device, dtype), device)
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, _BLOCK, dtype)
    lengths = context.pick(_TOKENS, _TOKENS, (16,))
    memory = KVMemory.on_device(layout, layout.blocks_for(2 * max(lengths)), device)
    before = _free(device)
    started = time.monotonic()
    count = backend.record_prompts(layout, max(lengths))
    yield figure(
        SECTION, f"{name}: {count} recorded steps", time.monotonic() - started, "s",
        note=f"{(before - _free(device)) / 2**20:.0f} MiB",
    )  # fmt: skip
    recorded, graphs = backend._prompts, {True: backend._prompts, False: None}
    assert recorded is not None
    for tokens in lengths:
        for prefix in (0, tokens):
            step = SequenceStep(
                memory, range(memory.num_blocks), prefix, [n % shape.vocab_size for n in range(tokens)], True
            )
            row = SampleRow(SamplingParams(temperature=0.0), (), ())
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for number in range(context.pick(23, 11, 4)):
                for replayed, found in seconds.items():
                    backend._prompts = graphs[replayed]
                    begin = time.perf_counter()
                    backend.forward_and_sample([step], [row], None)
                    if number > 2:
                        found.append(time.perf_counter() - begin)
            backend._prompts = recorded
            yield _figure(
                context, name, shape, tokens, prefix, {k: statistics.median(v) for k, v in seconds.items()}
            )


def _figure(
    context: Context, name: str, shape: ModelShape, tokens: int, prefix: int, medians: dict[bool, float]
) -> Figure:
    after = f" after {prefix} cached" if prefix else ""
    note = f"eager {medians[False] * 1e3:.2f} ms"
    title = f"{name}, {tokens} tokens{after}"
    measured = tokens == 128 and not prefix
    if measured and READ in context.measured and name in _LEAST_OF_READ:
        least = matrix_elements(shape) * 2 / context.measured[READ]
        return figure(
            SECTION, title, medians[True] * 1e3, "ms", against="bytes of weights over the read rate",
            ratio=least / medians[True], at_least=_LEAST_OF_READ[name], note=note,
        )  # fmt: skip
    bound = _AT_MOST_MS.get(name) if measured else None
    return figure(SECTION, title, medians[True] * 1e3, "ms", at_most=bound, note=note)


def _free(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])
