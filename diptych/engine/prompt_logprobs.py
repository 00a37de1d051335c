"""Log-probabilities of a given text at every position, not only after the last.

A chunk of a prompt gives logits after each of its tokens (`SequenceStep.trailing`); those after token i
judge token i + 1. Nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.own_tables import own_tables
from diptych.engine.runner import Runner

Scores = npt.NDArray[np.float32]

CHUNK = 128
"""Tokens whose logits are held at once: 25 MB of float32 with a vocabulary of 49,152."""


def prompt_logprobs(
    runner: Runner, memory: KVMemory, block_table: Sequence[int], token_ids: Sequence[int], chunk: int = CHUNK
) -> Scores:
    """Return log p(token i + 1 | tokens 0 .. i), natural, for each i: `[len(token_ids) - 1]`.

    The text is computed from position 0 into the blocks of `block_table`. Raises BatchError if they do not
    hold it or a token is outside of the vocabulary. NaN where the logits are not finite.
    """
    parts = [
        target_logprobs(logits, token_ids[start + 1 : start + 1 + len(logits)])
        for start, logits in prompt_logits(runner, memory, block_table, token_ids, chunk)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def prompt_logits(
    runner: Runner, memory: KVMemory, block_table: Sequence[int], token_ids: Sequence[int], chunk: int = CHUNK
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield chunk by chunk the position of its first token, and float32 logits `[tokens, vocab]` after each
    token.

    `block_table` has windowed blocks, too, where layers have such (`own_tables`). Raises as `prompt_logprobs`
    does; ValueError for a chunk below one token.
    """
    if chunk < 1:
        raise ValueError("a chunk has at least one token")
    table, windowed = own_tables(memory.layout, block_table)
    for start in range(0, len(token_ids), chunk):
        tokens = token_ids[start : start + chunk]
        step = SequenceStep(
            memory, table, start, tokens, wants_logits=True, trailing=len(tokens), window_tables=windowed
        )
        yield start, runner.step([step])


def target_logprobs(logits: torch.Tensor, token_ids: Sequence[int]) -> Scores:
    """Return log p of token_ids[i] under logits[i], `[len(token_ids)]`; further rows of `logits` are not
    read.

    `logits` is float32 `[at least len(token_ids), vocab]` on the CPU, and is not changed. The sum is the one
    of a sampled token's log-probability (diptych/engine/sampling). Rows that are not finite give NaN.
    """
    # numpy as in sampling/sample.py: torch would wake threads that spin on the cores of other workers.
    rows: Scores = logits.detach().numpy()[: len(token_ids)]
    chosen = rows[np.arange(len(rows)), np.asarray(token_ids, dtype=np.int64)]
    highest = rows.max(axis=-1)
    with np.errstate(invalid="ignore"):  # inf - inf: the row has no probabilities, and NaN says so
        sums = np.exp(rows - highest[:, None]).sum(axis=-1)
        scores: Scores = chosen - highest - np.log(sums)
    return scores
