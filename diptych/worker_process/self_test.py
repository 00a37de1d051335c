"""The inference that a worker has to pass before it takes any load: known tokens through the engine, twice.

It shows that weights, kernels and memory work together on this machine, and warms allocators and thread pools
up. Memory that fails, a wrong instruction set or damaged weights give numbers that are not finite or not the
same the second time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.kv.own_tables import own_blocks, own_tables
from diptych.engine.runner import Runner
from diptych.runtime.settings import StartupError

PROMPT_TOKENS = 17  # more than one block of the default size, and a partial one
STEPS = 2
CLOSE = 1e-3  # the native CPU step gives the same bits; libraries may order their sums differently


class SelfTestFailed(StartupError, RuntimeError):
    """The engine must not serve."""


def run_self_test(runner: Runner, layout: KVLayout) -> None:
    """Prefill and decode a few tokens in throw-away memory, twice. Raises SelfTestFailed."""
    first, second = _logits(runner, layout), _logits(runner, layout)
    runner.cpu.yield_()
    compare_logits(first, second)


def compare_logits(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    """Compare the logits `[1, vocab]` of each step in two runs.

    Raises SelfTestFailed unless all are finite, and both runs the same.
    """
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        if not bool(torch.isfinite(one).all()) or not bool(torch.isfinite(other).all()):
            raise SelfTestFailed(f"step {step} of the self-test gave logits that are not finite")
        if not torch.allclose(one, other, rtol=CLOSE, atol=CLOSE):
            raise SelfTestFailed(f"step {step} of the self-test gave other logits the second time")


def _logits(runner: Runner, layout: KVLayout) -> list[torch.Tensor]:
    blocks = own_blocks(layout, PROMPT_TOKENS + STEPS)
    memory = runner.model.kv_memory(layout, blocks)
    full, windowed = own_tables(layout, range(blocks))
    vocab = runner.model.shape.vocab_size
    prompt = [(37 * n + 11) % vocab for n in range(PROMPT_TOKENS)]
    chunks = [(0, prompt), *((PROMPT_TOKENS + n, [n % vocab]) for n in range(STEPS))]
    return [
        runner.step([SequenceStep(memory, full, start, tokens, True, window_tables=windowed)]).clone()
        for start, tokens in chunks
    ]
