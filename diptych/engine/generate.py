"""Generation in one process: prefill and decode of one sequence with the same runner, no handoff anywhere.

The aggregated reference: whatever the disaggregated service answers must equal this, token for token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.own_tables import own_blocks, own_tables
from diptych.engine.prompt_logprobs import prompt_logits
from diptych.engine.runner import Runner
from diptych.engine.sampling import (
    Sampled,
    SampleFailure,
    SampleRow,
    SamplingParams,
    TokenLogprob,
    choice_seed,
    sample,
    token_logprobs,
)


class GenerationFailed(RuntimeError):
    """A token could not be sampled; the message says why."""

    @classmethod
    def by(cls, failure: SampleFailure) -> GenerationFailed:
        return cls(failure.reason)


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
    """Generate the tokens that follow `prompt_ids`: at most `max_tokens`, ending with a stop token if one
    came.

    The prompt is computed in chunks of `chunk` tokens. Blocks are taken from `pool` (which counts the blocks
    of `memory`) for the longest possible answer, and returned. Raises OutOfBlocks or GenerationFailed.
    """
    (choice,) = generate_choices(
        runner,
        memory,
        pool,
        prompt_ids,
        params,
        count=1,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        chunk=chunk,
        min_tokens=min_tokens,
    )
    return [sampled.token_id for sampled in choice]


def generate_choices(
    runner: Runner,
    memory: KVMemory,
    pool: BlockPool,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    count: int,
    max_tokens: int,
    stop_ids: Collection[int] = (),
    chunk: int = 512,
    min_tokens: int = 0,
) -> list[list[Sampled]]:
    """`count` answers to one prompt, each alone from its beginning, with scores if `params` asks for them.

    As `generate` otherwise.
    """
    answers = []
    for choice in range(count):
        own = replace(params, seed=choice_seed(params.seed, choice))
        with _held(memory, pool, len(prompt_ids) + max_tokens) as blocks:
            tokens, computed = list(prompt_ids), 0
            table, windowed = own_tables(memory.layout, blocks)
            output: list[Sampled] = []
            while len(output) < max_tokens:
                end = min(computed + chunk, len(tokens))
                step = SequenceStep(
                    memory,
                    table,
                    computed,
                    tokens[computed:end],
                    end == len(tokens),
                    window_tables=windowed,
                )
                logits = runner.step([step])
                computed = end
                if not step.wants_logits:
                    continue
                suppress = tuple(stop_ids) if len(output) < min_tokens else ()
                row = SampleRow(own, prompt_ids, tokens[len(prompt_ids) :], suppress)
                (result,) = sample(logits, [row])
                if isinstance(result, SampleFailure):
                    raise GenerationFailed.by(result)
                output.append(result)
                tokens.append(result.token_id)
                if result.token_id in stop_ids:
                    break
        answers.append(output)
    return answers


def prompt_token_logprobs(
    runner: Runner, memory: KVMemory, pool: BlockPool, prompt_ids: Sequence[int], count: int
) -> list[TokenLogprob]:
    """Return the log-probabilities of the prompt's tokens from the second on, each with `count` alternatives.

    Raises OutOfBlocks, or ValueError for logits that are not finite.
    """
    with _held(memory, pool, len(prompt_ids)) as blocks:
        return [
            score
            for start, logits in prompt_logits(runner, memory, blocks, prompt_ids)
            for score in token_logprobs(logits, prompt_ids[start + 1 : start + 1 + len(logits)], count)
        ]


@contextmanager
def _held(memory: KVMemory, pool: BlockPool, num_tokens: int) -> Iterator[list[int]]:
    """Blocks for so many tokens, returned at the end."""
    blocks = pool.allocate(own_blocks(memory.layout, num_tokens))
    try:
        yield blocks
    finally:
        pool.release(blocks)
