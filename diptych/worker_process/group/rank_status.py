"""The processes of a worker as its heartbeats report them: pid, state, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from diptych.worker.v1 import work_pb2
from diptych.worker_process.group.rank_group import RankGroup
from diptych.worker_process.group.rank_memory import RankMemory

_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped", "t": "stopped"}
"""States of proc_pid_stat(5). A rank sleeps between steps, and where it waits for another one."""
_GONE = "gone"


def rank_statuses(group: RankGroup | None) -> Iterator[work_pb2.Rank]:
    """Yield the processes of a group, this one first; none of a worker that is one process."""
    if group is None:
        return
    here = [(pid, process_state(pid)) for pid in (os.getpid(), *group.pids)]
    elsewhere = [(rank.pid, f"on {rank.host}") for rank in group.remote]
    every = [*here, *elsewhere]
    memory = group.rank_memory or [RankMemory(size, 0) for size in group.weight_bytes]
    for (pid, state), uses in zip(every, memory, strict=True):
        yield work_pb2.Rank(
            pid=pid,
            state=state,
            weight_bytes=uses.weights,
            kv_bytes=uses.blocks,
            other_bytes=uses.other,
            left_bytes=None if uses.left is None else max(0, uses.left),
        )


def process_state(pid: int) -> str:
    """Return what a process does, as the kernel knows it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _GONE
    letter = stat.rpartition(")")[2].split()[0]  # the name before it may hold anything
    return _STATES.get(letter, _GONE)
