"""Compute text as a rank of a group, with the kernels in Triton's interpreter: RANK RANKS PARTS PORT FOLDER.

Rows are sent to their experts over Gloo. Rank 0 prints its tokens, and a digest of all logits.
"""

from __future__ import annotations

import hashlib
import sys
from datetime import timedelta
from pathlib import Path

import torch

from diptych.engine.backends.triton.parts_backend import TritonPartsBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.gloo_communicator import GlooCommunicator
from diptych.engine.parallel.kv_shares import kv_shares
from diptych.engine.parallel.parts import deal_parts, parts_of_rank
from diptych.engine.parallel.pipeline import Links
from diptych.engine.parallel.stages import Grid, deal_stages
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.part_weights import read_parts
from tests.diptych.engine.parallel.thread_ranks import memory_of

PROMPT, TOKENS = [41, 7, 120, 3, 99, 30], 3


def answer_of(group: Communicator, count: int, folder: Path) -> list[str]:
    """Compute the prompt, then tokens that rank 0 tells the others; return them, and the digest."""
    from tests.kernels.gpu.interpreter import sum_all_rows_alike  # here: it needs Triton

    sum_all_rows_alike()  # as the kernels' own tests have it, which share a process with some callers
    rank, ranks = group.rank, group.ranks
    opened = open_checkpoint(folder, "fp32")
    parts = deal_parts(opened.shape, count, whole_experts=True, all_to_all=True)
    stages = deal_stages(opened.shape, 1)
    own = [parts[number] for number in parts_of_rank(count, rank, ranks)]
    held = kv_shares(parts, stages, Grid(ranks))[rank]
    backend = TritonPartsBackend(
        opened.shape,
        parts,
        read_parts(opened, own, stages[0]),
        Links(group),
        stages[0],
        stop_word=StopWord(),
        device="cpu",
        held=held,
    )
    memory = KVMemory(held.narrow(memory_of(opened.shape).layout), 4)
    known, start, digest = list(PROMPT), 0, hashlib.sha256()
    for _ in range(TOKENS):
        logits = backend.forward([SequenceStep(memory, range(4), start, known[start:], True)], None)
        digest.update(logits.numpy().tobytes())
        token = logits[0].argmax().view(1) if rank == 0 else torch.zeros(1, dtype=torch.int64)
        start = len(known)
        known.append(int(group.all_gather(token)[0]))
    return [*map(str, known[len(PROMPT) :]), digest.hexdigest()]


def main(rank: int, ranks: int, count: int, port: int, folder: Path) -> None:
    """Answer as one rank."""
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=100)
    )
    found = answer_of(GlooCommunicator(store, rank, ranks), count, folder)
    if rank == 0:
        print(*found)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), Path(sys.argv[5]))
