"""Faults of the process that computes both phases on one GPU, with 64 streams: time to the next token.

Two faults: SIGKILL while streams are decoded, and a kernel of a prompt's step that loses the CUDA context.
The supervisor starts the process again, and every stream goes on. Answers are held against those without a
fault; the batch-invariant step makes them comparable, since streams come back in other batches.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch

from diptych.client import AsyncClient
from diptych.runtime.python_module import module_command
from lab.gpu.llama_folder import write_llama_folder
from lab.gpu.model_step import tiny
from lab.gpu.random_model import LLAMA_3_8B
from lab.gpu.section import Context, Figure, device_of, figure
from lab.peers.process import RunningServer
from lab.peers.servers import Server

SECTION = "faults"
_TOKENS = 49_152
"""Tokens of the tokenizer."""
_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Fault:
    """A failpoint (diptych/runtime/failpoints.py) and what it does there."""

    name: str
    failpoint: str
    action: str
    after: int
    """Passes before."""


@dataclass
class Stream:
    """Tokens of one answer, and when they came."""

    token_ids: list[int] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    error: str = ""


def faults(context: Context) -> Iterator[Figure]:
    """Yield, for each fault, the time to the next token and the answers that differ. Raises StartFailed."""
    device = device_of(context)
    streams, given, asked = context.pick((64, 256, 192), (64, 256, 192), (3, 20, 24))
    steps, prompt_steps = context.pick((40, 4), (40, 4), (8, 0))
    chooser = random.Random(11)
    # Prompts of its own for each fault: a process that has started again has none of them in its cache.
    prompts = [
        [[chooser.randrange(100, 40_000) for _ in range(given)] for _ in range(streams)] for _ in range(2)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        points = folder / "failpoints"
        points.mkdir()
        context.say("writing the model")
        shape = replace(tiny(LLAMA_3_8B), vocab_size=_TOKENS) if context.dry else LLAMA_3_8B
        dtype = torch.float32 if context.dry else torch.bfloat16
        model = write_llama_folder(folder / "model", shape, device, dtype)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        with RunningServer(_server(model, device, points), folder) as running:
            yield figure(SECTION, "ready after", running.start_s, "s")
            expected = [asyncio.run(_answers(running.address, own, asked)) for own in prompts]
            chosen = (
                Fault("SIGKILL while decoding", "decode.step", "crash", steps),
                Fault("CUDA fault in a prefill kernel", "prefill.device_fault", "fail", prompt_steps),
            )
            for fault, own, right in zip(chosen, prompts, expected, strict=True):
                context.say(fault.name)
                yield from _of_fault(fault, running.address, points, own, asked, right)


def _of_fault(
    fault: Fault, address: str, points: Path, prompts: Sequence[list[int]], asked: int,
    expected: Sequence[Stream],
) -> Iterator[Figure]:  # fmt: skip
    """Yield the figures of one fault."""
    (points / fault.failpoint).write_text(f"{fault.action} {fault.after}")
    got = asyncio.run(_answers(address, prompts, asked))
    taken = list(points.glob(f"{fault.failpoint}.*"))
    if not taken:
        raise RuntimeError(f"{fault.name}: no process came to {fault.failpoint}")
    hit_at = taken[0].stat().st_ctime  # it is renamed when it is taken
    taken[0].unlink()
    waits = [wait for stream in got if (wait := longest_wait_s(stream, hit_at)) is not None]
    others = sum(mine.token_ids != right.token_ids for mine, right in zip(got, expected, strict=True))
    errors = sorted({stream.error for stream in got if stream.error})
    yield figure(
        SECTION, f"{fault.name}: answers that failed or have other tokens", float(others), "answers",
        at_most=0, note=f"of {len(got)} streams; {'; '.join(errors)[:300]}",
    )  # fmt: skip
    if waits:
        yield figure(
            SECTION, f"{fault.name}: to the next token, median", statistics.median(waits), "s",
            note=f"last of {len(waits)} streams after {max(waits):.2f} s",
        )  # fmt: skip


def longest_wait_s(stream: Stream, hit_at: float) -> float | None:
    """Return the seconds from the fault to the end of the longest pause after it; None where none came.

    What the process had sent before still arrives after the fault.
    """
    after = [hit_at, *(at for at in stream.came if at > hit_at)]
    if len(after) == 1:
        return None
    _, end = max((later - sooner, later) for sooner, later in pairwise(after))
    return end - hit_at


async def _answers(address: str, prompts: Sequence[list[int]], asked: int) -> list[Stream]:
    async with AsyncClient(address, retries=0) as client:
        return list(await asyncio.gather(*(_read(client, prompt, asked) for prompt in prompts)))


async def _read(client: AsyncClient, prompt: list[int], asked: int) -> Stream:
    found = Stream()
    stream = client.stream(prompt, timeout_s=_TIMEOUT_S, temperature=0.0, max_tokens=asked, ignore_eos=True)
    try:
        async with aclosing(stream):
            async for chunk in stream:
                found.token_ids += chunk.token_ids
                found.came.append(time.time())
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"
    return found


def _server(model: Path, device: torch.device, points: Path) -> Server:
    """Describe a system of one process for both phases, whose failpoints lie in the folder `points`."""
    on_device = ("--dtype", "bf16", "--batch-invariant") if device.type == "cuda" else ("--dtype", "fp32")
    return Server(
        name="diptych-faults",
        family="diptych",
        precision="bf16",
        arguments=(
            *module_command("diptych"),
            *("up", "--model", str(model), "--device", device.type, *on_device, "--gpu-sharing", "turns"),
            *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
        ),
        environment={
            "DIPTYCH_FAILPOINTS_DIR": str(points),
            "DIPTYCH_WORKER_WAIT_TIMEOUT": str(_TIMEOUT_S),
            "DIPTYCH_LOCAL_PREFILL": "never",
        },
        start_timeout_s=240.0,
    )
