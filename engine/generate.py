"""Generation in one process: prefill and decode of one sequence with the same runner, no hand-over anywhere.

The aggregated reference: whatever the disaggregated service answers must equal this, token for token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.batch import SequenceStep
from engine.block_pool import BlockPool
from engine.kv_memory import KVMemory
from engine.runner import Runner
from engine.sampling import Sampled, SampleRow, SamplingParams, sample


class GenerationFailed(RuntimeError):
    """A token could not be sampled; the message says why."""


def generate(
    runner: Runner,
    memory: KVMemory,
    pool: BlockPool,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    max_tokens: int,
    stop_ids: Collection[int] = (),
    chunk: int = 512,
    min_tokens: int = 0,
) -> list[int]:
    """The tokens that follow `prompt_ids`: at most `max_tokens`, ending with a stop token if one came.

    The prompt is computed in chunks of `chunk` tokens. Blocks are taken from `pool` (which keeps the books of
    `memory`) for the longest possible answer, and returned. Raises OutOfBlocks or GenerationFailed.
    """
    blocks = pool.allocate(memory.layout.blocks_for(len(prompt_ids) + max_tokens))
    try:
        tokens = list(prompt_ids)
        computed = 0
        output: list[int] = []
        while len(output) < max_tokens:
            end = min(computed + chunk, len(tokens))
            step = SequenceStep(memory, blocks, computed, tokens[computed:end], end == len(tokens))
            logits = runner.step([step])
            computed = end
            if not step.wants_logits:
                continue
            suppress = tuple(stop_ids) if len(output) < min_tokens else ()
            (result,) = sample(logits, [SampleRow(params, prompt_ids, output, suppress)])
            if not isinstance(result, Sampled):
                raise GenerationFailed(result.reason)
            output.append(result.token_id)
            tokens.append(result.token_id)
            if result.token_id in stop_ids:
                break
        return output
    finally:
        pool.release(blocks)
