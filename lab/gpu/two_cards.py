"""Steps of an 8B model by two ranks on a card each, beside one process on one card.

The two ranks are processes of their own (two_cards_rank.py) and exchange as a worker's do: recorded decode
steps hold their exchanges. What a worker's rank 0 sends before a step, over a pipe, is not in these times.
Degree 2 is to halve what a step reads; an exchange costs it some microseconds, twice a layer.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import torch

from diptych.engine.parallel.gloo_communicator import LOOPBACK
from diptych.runtime.python_module import module_command
from kvtransfer.transports.process_group import listen_for_store
from lab.gpu.model_step import DRY, WHOLE, decode_seconds, make, prefill_seconds, spread, tiny
from lab.gpu.random_model import LLAMA_3_8B, random_weights
from lab.gpu.section import Context, Figure, Unmeasured, device_of, figure

SECTION = "two cards"
RANKS = 2
RANK_MODULE = "lab.gpu.two_cards_rank"
_RANKS_S = 480.0
"""Seconds that the two ranks have: one that waits for the other would wait for ever."""


def two_cards(context: Context) -> Iterator[Figure]:
    """Yield decode steps and prompts at degree 2 against degree 1, and the exchange within recorded steps."""
    device = device_of(context)
    if not context.dry and (count := torch.cuda.device_count()) < RANKS:
        raise Unmeasured(f"two CUDA devices are needed, one for each rank, and there is {count}")
    sizes = context.pick(WHOLE, WHOLE, DRY)
    shape = tiny(LLAMA_3_8B) if context.dry else LLAMA_3_8B
    context.say("one process on one card")
    bench = make("one card", shape, sizes, random_weights(shape, device, torch.bfloat16), device)
    whole = {batch: statistics.median(decode_seconds(context, bench, batch)[0]) for batch in sizes.batches}
    whole_prompt = statistics.median(prefill_seconds(context, bench))
    del bench
    if device.type == "cuda":
        torch.cuda.empty_cache()
    context.say("two ranks on a card each")
    found = _measure_ranks(context)
    for batch in sizes.batches:
        seconds = found["decode"][str(batch)]
        exchange = found["exchange"][str(batch)]
        median = statistics.median(seconds)
        yield figure(
            SECTION,
            f"decode step of two ranks, batch {batch}, context {sizes.context}",
            median * 1e3,
            "ms",
            against="the step of one process on one card",
            ratio=whole[batch] / median,
            note=f"{spread(seconds)}; exchanges are {2 * shape.num_layers * exchange / median:.0%} of it",
        )
        yield figure(
            SECTION,
            f"{found['way']}: an exchange of {batch} rows within a recorded step",
            exchange * 1e6,
            "us",
            note=f"{batch * shape.hidden_size * 2} bytes of each rank",
        )
    seconds = found["prefill"]
    median = statistics.median(seconds)
    yield figure(
        SECTION,
        f"prefill of two ranks, {sizes.prompt} tokens in chunks of {sizes.chunk}",
        sizes.prompt / median,
        "tokens/s",
        against="one process on one card",
        ratio=whole_prompt / median,
        note=spread(seconds),
    )


def _measure_ranks(context: Context) -> dict[str, Any]:
    """Return what rank 0 of two measured, in seconds. Raises Unmeasured where one of them failed."""
    listener, port = listen_for_store(LOOPBACK)
    kind = "dry" if context.dry else "quick" if context.quick else "whole"
    processes = []
    with listener:
        for rank in range(RANKS):
            own = (listener.fileno(),) if rank == 0 else ()
            command = [*module_command(RANK_MODULE), kind, str(rank), str(port), *map(str, own)]
            processes.append(subprocess.Popen(command, pass_fds=own, stdout=subprocess.PIPE, text=True))
    try:
        return _result_of(processes)
    finally:
        for process in processes:
            with process:
                process.kill()


def _result_of(processes: list[subprocess.Popen[str]]) -> dict[str, Any]:
    end = time.monotonic() + _RANKS_S
    while (states := [process.poll() for process in processes]) != [0] * RANKS:
        if failed := [rank for rank, state in enumerate(states) if state]:
            raise Unmeasured(f"rank {failed[0]} ended with status {states[failed[0]]}, see stderr")
        if time.monotonic() > end:
            raise Unmeasured(f"two ranks did not end within {_RANKS_S:.0f} s")
        time.sleep(0.05)
    out = processes[0].stdout
    assert out is not None
    found: dict[str, Any] = json.loads(out.read().splitlines()[-1])
    return found
