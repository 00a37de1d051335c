"""Systems of groups with a disk tier, and what the tier gave to their requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diptych.client import Client, Completion
from tests.end_to_end.rank_processes import GREEDY, Degrees, kill, processes, serving
from tests.end_to_end.stack import Stack
from tests.faults.system import eventually, settle

LOADED = "diptych_kv_tier_blocks_loaded_total"


@contextlib.contextmanager
def tiered(
    model: Path, folder: Path, prefill: Degrees, decode: Degrees, transport: str, **more: Any
) -> Iterator[Stack]:
    """Run a system of two groups with a disk tier in `folder`."""
    flags = ("--kv-tier", f"disk:{folder}:64m")
    with serving(model, prefill, decode, transport, flags=flags, **more) as stack:
        yield stack


def completions(stack: Stack, prompts: Sequence[Sequence[int]], tokens: int) -> list[Completion]:
    """Return the greedy answers, asked one after the other."""
    with Client(stack.address, retries=0) as client:
        return [client.generate(list(one), max_tokens=tokens, timeout_s=300, **GREEDY) for one in prompts]


def tokens_of(answers: Sequence[Completion]) -> list[list[int]]:
    return [list(one.first.token_ids) for one in answers]


def tier_blocks(answers: Sequence[Completion]) -> list[int]:
    """Return the blocks that each got from tiers."""
    return [one.timings.tier_blocks for one in answers if one.timings is not None]


def wait_stored(folder: Path, blocks: int) -> None:
    """Wait until the tier has so many blocks, of any kind."""
    eventually(lambda: len(list(folder.rglob("*.kv"))) >= blocks, 120, f"{blocks} blocks are stored")


def end_rank(stack: Stack, role: str, number: int = 1) -> None:
    """Kill one rank of a worker, and wait until the worker's group is another one."""
    before = processes(stack, role)
    kill(before[number])
    until = time.monotonic() + 120
    while not (now := processes(stack, role)) or {*now} & {*before}:
        assert time.monotonic() < until, f"the group of the {role} worker does not come back"
        time.sleep(0.05)
    settle(stack)
