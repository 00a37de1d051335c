"""The processes of workers that are groups, seen from outside."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diptych.client import Client
from diptych.engine.dtype import Precision, stored_dtype
from diptych.engine.generate import generate
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import Model
from diptych.engine.parallel.pipeline import ALONE
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.parallel_model import Dealing, load_native_parts, load_parts, open_parts, why_not_native
from diptych.engine.runner import Runner
from diptych.engine.sampling import SamplingParams
from tests.end_to_end.stack import Stack, running_stack

NO_LOCAL_PREFILL = (
    "--set",
    "decode.max-local-prefill-tokens=0",
    "--set",
    "decode.max-fallback-prefill-tokens=0",
)
Degrees = Mapping[str, int | bool | str]
"""Flags of one role, without their dashes."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def processes(stack: Stack, role: str, index: int = 0) -> list[int]:
    """Return the pids of a worker's ranks, rank 0 first; empty while it is down."""
    pid = stack.account[role][index].get("pid")
    if not pid:
        return []
    try:
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:  # it died just now
        return []
    started: list[int] = []
    for task in tasks:
        with contextlib.suppress(OSError):
            started += map(int, (task / "children").read_text().split())
    return [pid, *sorted(started)]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def alone(
    model: Path,
    parts: int,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    whole_experts: bool = False,
    all_to_all: bool = False,
    precision: Precision = "fp32",
    backend: str = "auto",
) -> list[list[int]]:
    """Return the greedy answers of one process that computes all parts itself, with a group's backend."""
    dealing = Dealing(parts, whole_experts=whole_experts, all_to_all=all_to_all)
    opened = open_parts(model, precision, dealing)
    if backend == "torch" or why_not_native(opened.shape, precision, dealing) is not None:
        loaded = load_parts(opened, ALONE, StopWord(), 1)
    else:
        loaded = load_native_parts(opened, precision, ALONE, -1, 1)
    made = Model(opened.shape, precision, stored_dtype(precision), loaded.backend, loaded.name)
    runner, memory = Runner(made, 1), KVMemory(made.kv_layout(16), 64)
    return [
        generate(
            runner,
            memory,
            BlockPool(64),
            list(prompt),
            SamplingParams(temperature=0.0),
            max_tokens=tokens,
            stop_ids=(),
            chunk=48,
        )
        for prompt in prompts
    ]


def answer(stack: Stack, prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the greedy answer of a running system."""
    with Client(stack.address, retries=0) as client:
        found = client.generate(list(prompt), max_tokens=tokens, timeout_s=300, **GREEDY)
    return list(found.first.token_ids)


@contextlib.contextmanager
def serving(
    model: str | Path,
    prefill: Degrees,
    decode: Degrees,
    transport: str = "shared_memory",
    *,
    precision: Precision = "fp32",
    backend: str = "auto",
    flags: Sequence[str] = (),
) -> Iterator[Stack]:
    """Run a system of two groups, of which no process is left at the end, with more `flags`."""
    chosen = ("--quantization" if precision == "int8" else "--dtype", precision)
    given = ["--model", str(model), *chosen, "--prefill-chunk", "48", "--kv-blocks", "96", *flags]
    for role, degrees in (("prefill", prefill), ("decode", decode)):
        for flag, value in {**degrees, "backend": backend}.items():
            given += ["--set", f"{role}.{flag}={str(value).lower() if isinstance(value, bool) else value}"]
    env = {"DIPTYCH_WORKER_WAIT_TIMEOUT": "300"}
    with running_stack(*given, "--transport", transport, *NO_LOCAL_PREFILL, env=env) as stack:
        assert len(processes(stack, "prefill")) == size_of(prefill)
        assert len(processes(stack, "decode")) == size_of(decode)
        yield stack
        stack.wait_idle(120)
        pids = [pid for role in ("prefill", "decode") for pid in processes(stack, role)]
    until = time.monotonic() + 10
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


_SIZES = ("tensor-parallel", "pipeline-parallel")


def size_of(degrees: Degrees) -> int:
    """Return the processes of a worker of these degrees."""
    return math.prod(int(value) for flag, value in degrees.items() if flag in _SIZES)


def resumed(stack: Stack, prompt: Sequence[int], count: int, victim: int, **more: Any) -> list[int]:
    """Return the tokens of a stream in the middle of which rank `victim` of the decode worker is killed."""
    tokens: list[int] = []
    with Client(stack.address, retries=0) as client:
        killed = False
        for chunk in client.stream(list(prompt), max_tokens=count, timeout_s=300, **GREEDY, **more):
            tokens += chunk.token_ids
            if not killed and len(tokens) >= 8:
                kill(processes(stack, "decode")[victim])
                killed = True
    return tokens
