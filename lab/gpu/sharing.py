"""Prefill and decode on one GPU at the same time, in one process over one copy of the weights.

A thread replays decode steps while another computes chunks of prompts, each on a stream of its own: streams
of unequal priority, or green contexts that give each phase multiprocessors of its own (CUDA driver API).
Beside them stand each phase alone, and what taking turns would make of the two. The load is that of 1,024
tokens in, 128 out.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.cuda_graph import CudaGraphCapture
from diptych.engine.batch import SequenceStep
from diptych.engine.card_streams import NoPartition, partition_streams, priority_streams
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.models.shape import ModelShape
from diptych.engine.sampling import SampleRow, SamplingParams
from lab.gpu.model_step import tiny
from lab.gpu.random_model import LLAMA_3_8B, random_weights
from lab.gpu.section import Context, Figure, Unmeasured, device_of, figure

SECTION = "sharing"
_BLOCK = 16
_WHOLE, _DRY = (1024, 128, 2048), (16, 8, 16)
"""Tokens of a prompt, of an answer, and of a prefill step."""
_DECODE_SMS = (8, 16, 24, 32, 48)


@dataclass
class Phases:
    """Two backends over the same weights and one memory, whose first blocks are those of the decode rows."""

    shape: ModelShape
    decode: TritonBackend
    prefill: TritonBackend
    memory: KVMemory
    batch: int
    prompt: int
    output: int
    chunk: int
    step_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0

    @property
    def blocks_a_row(self) -> int:
        return -(-(self.prompt + self.output) // _BLOCK)

    def record(self, stream: torch.cuda.Stream | None) -> None:
        """Record the decode steps on `stream`: a graph keeps the priority and context of its capture."""
        capture = None if stream is None else CudaGraphCapture(self.memory.data.device, stream)
        self.decode.plan_decode(self.batch, _BLOCK, capture)
        self.decode.prepare_decode(self.memory)

    def decode_until(self, end: threading.Event) -> None:
        """Launch steps one ahead, as a decode worker does; keep the time from token to token in `step_s`."""
        tables = [range(self.blocks_a_row * row, self.blocks_a_row * (row + 1)) for row in range(self.batch)]
        rows = [SampleRow(SamplingParams(temperature=0.0), (), ()) for _ in range(self.batch)]
        before, number, last = None, 0, time.perf_counter()
        while not end.is_set():
            start = self.prompt + number % (self.output - 1)
            steps = [
                SequenceStep(self.memory, table, start, [7], True, follows=row if before else None)
                for row, table in enumerate(tables)
            ]
            launched = self.decode.launch(steps, rows, None)
            assert launched is not None
            if before is not None:
                before.collect()
                now = time.perf_counter()
                self.step_s.append(now - last)
                last = now
            before, number = launched, number + 1
        if before is not None:
            before.collect()

    def prefill_until(self, end: threading.Event) -> None:
        """Compute chunks that hold whole prompts, one after the other."""
        first = self.blocks_a_row * self.batch
        per_prompt = self.prompt // _BLOCK
        tokens = [one % self.shape.vocab_size for one in range(self.prompt)]
        prompts = max(self.chunk // self.prompt, 1)
        steps = [
            SequenceStep(
                self.memory, range(first + per_prompt * n, first + per_prompt * (n + 1)), 0, tokens, True
            )
            for n in range(prompts)
        ]
        while not end.is_set():
            self.prefill.forward(steps, None)
            self.prompt_tokens += prompts * self.prompt


def sharing(context: Context) -> Iterator[Figure]:
    """Yield the rates of both phases alone and together, by way of sharing."""
    device = device_of(context)
    for batch in context.pick((24, 64), (64,), (2,)):
        phases = _make(context, device, batch)
        alone = {
            name: _run(context, phases, None, None, only=name)[index]
            for index, name in enumerate(("decode", "prefill"))
        }
        turns = 1 / (phases.prompt / alone["prefill"] + phases.output / alone["decode"])
        yield figure(
            SECTION, f"batch {batch}: by turns", turns * phases.output, "tokens/s",
            note=f"decode alone {alone['decode']:.0f}, prefill alone {alone['prefill']:.0f} tokens/s",
        )  # fmt: skip
        if context.dry:
            continue
        both = priority_streams(device)
        priorities = (both.decode, both.prefill)
        phases.record(priorities[0])
        yield _together(context, phases, "streams of unequal priority", priorities, turns)
        for decode_sms in _DECODE_SMS:
            name = f"green contexts, {decode_sms} multiprocessors for decode"
            try:
                parts = partition_streams(device, decode_sms)
            except NoPartition as error:
                raise Unmeasured(str(error)) from error
            streams = (parts.decode, parts.prefill)
            phases.record(streams[0])
            yield _together(context, phases, name, streams, turns)
        del phases
        torch.cuda.empty_cache()


def _make(context: Context, device: torch.device, batch: int) -> Phases:
    shape = tiny(LLAMA_3_8B) if context.dry else LLAMA_3_8B
    prompt, output, chunk = _DRY if context.dry else _WHOLE
    context.say(f"batch {batch}: making weights, recording decode steps")
    decode = TritonBackend(shape, random_weights(shape, device, torch.bfloat16), device)
    prefill = copy.copy(decode)  # the same packed weights; buffers and recordings are each one's own
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, _BLOCK, torch.bfloat16)
    blocks = batch * -(-(prompt + output) // _BLOCK) + chunk // _BLOCK
    memory = KVMemory.on_device(layout, blocks, device)
    memory.data.normal_()
    phases = Phases(shape, decode, prefill, memory, batch, prompt, output, chunk)
    phases.record(None)
    return phases


def _together(
    context: Context,
    phases: Phases,
    name: str,
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
    turns: float,
) -> Figure:
    _, prefill_alone = _run(context, phases, *streams, only="prefill")
    decode_alone, _ = _run(context, phases, *streams, only="decode")
    decode, prefill = _run(context, phases, *streams)
    requests = min(decode / phases.output, prefill / phases.prompt)
    steps = sorted(phases.step_s)
    p50, p99 = statistics.median(steps) * 1e3, steps[int(len(steps) * 0.99)] * 1e3
    return figure(
        SECTION, f"batch {phases.batch}: {name}", requests * phases.output, "tokens/s",
        against="taking turns", ratio=requests / turns,
        note=f"decode {decode:.0f} tokens/s, step p50 {p50:.2f}, p99 {p99:.2f} ms; "
        f"prefill {prefill:.0f} tokens/s; alone there {decode_alone:.0f} and {prefill_alone:.0f}",
    )  # fmt: skip


def _run(
    context: Context,
    phases: Phases,
    decode_stream: torch.cuda.Stream | None,
    prefill_stream: torch.cuda.Stream | None,
    only: str | None = None,
) -> tuple[float, float]:
    """Return the tokens a second of decode and of prefill over some seconds of both, or of one alone."""
    end, errors = threading.Event(), list[BaseException]()

    def work(phase: str, stream: torch.cuda.Stream | None) -> None:
        try:
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                (phases.decode_until if phase == "decode" else phases.prefill_until)(end)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(phase, stream))
        for phase, stream in (("decode", decode_stream), ("prefill", prefill_stream))
        if only in (None, phase)
    ]
    for thread in threads:
        thread.start()
    time.sleep(context.pick(2.0, 1.0, 0.0))  # warm
    phases.step_s.clear()
    begun, tokens = time.perf_counter(), phases.prompt_tokens
    time.sleep(context.pick(6.0, 3.0, 0.5))
    steps, computed = len(phases.step_s), phases.prompt_tokens - tokens
    seconds = time.perf_counter() - begun
    end.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    context.synchronize()
    return max(steps, 1) * phases.batch / seconds, max(computed, 1) / seconds
