"""The processes of workers that are groups, seen from outside."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diptych.client import Client
from diptych.engine.generate import generate
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import Model
from diptych.engine.parallel.pipeline import ALONE
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.parallel_model import Dealing, load_parts, open_parts
from diptych.engine.runner import Runner
from diptych.engine.sampling import SamplingParams
from tests.end_to_end.stack import Stack

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def processes(stack: Stack, role: str, index: int = 0) -> list[int]:
    """Return the pids of a worker's ranks, rank 0 first; empty while it is down."""
    pid = stack.account[role][index].get("pid")
    if not pid:
        return []
    started: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
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
) -> list[list[int]]:
    """Return the greedy answers of one process that computes all parts itself."""
    opened = open_parts(model, "fp32", Dealing(parts, whole_experts=whole_experts))
    loaded = load_parts(opened, ALONE, StopWord(), 1)
    made = Model(opened.shape, "fp32", torch.float32, loaded.backend, "torch")
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
