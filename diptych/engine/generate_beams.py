"""Beam search in one process: the aggregated reference of the service's beams.

Simple rather than thrifty: every beam has all its blocks to itself, and a fork copies them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from diptych.engine.batch import SequenceStep
from diptych.engine.beam_search import Beam, BeamSearch, beam_candidates
from diptych.engine.generate import GenerationFailed
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.own_tables import own_blocks, own_tables
from diptych.engine.runner import Runner
from diptych.engine.sampling import Candidate, SampleFailure, SampleRow, SamplingParams


def generate_beams(
    runner: Runner,
    memory: KVMemory,
    pool: BlockPool,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    width: int,
    count: int,
    max_tokens: int,
    stop_ids: Collection[int] = (),
    min_tokens: int = 0,
) -> list[Beam]:
    """Return the best `count` answers that `width` beams find, best first.

    Of `params` the logits processors count (biases, penalties, forbidden tokens), and `logprobs`. Raises
    OutOfBlocks, or GenerationFailed where every token is forbidden or logits are not finite.
    """
    search = BeamSearch(width, stop_ids=stop_ids, max_tokens=max_tokens)
    per_beam = own_blocks(memory.layout, len(prompt_ids) + max_tokens)
    # Each beam has a place to be computed in, and one for its fork of the next step.
    held = pool.allocate(2 * width * per_beam)
    try:
        places = [held[n * per_beam : (n + 1) * per_beam] for n in range(2 * width)]
        here, spare = places[:width], places[width:]
        logits = runner.step([_step(memory, here[0], 0, list(prompt_ids))])
        while not search.done:
            length = len(search.live[0].token_ids)
            suppress = tuple(stop_ids) if length < min_tokens else ()
            rows = [SampleRow(params, prompt_ids, beam.token_ids, suppress) for beam in search.live]
            found = beam_candidates(logits, rows, width, frozenset(stop_ids))
            forks = search.advance(_going_on(found))
            for fork, place in zip(forks, spare, strict=False):
                for src, dst in zip(here[fork.parent], place, strict=True):
                    memory.copy_block(src, dst)
            here, spare = spare, here
            start = len(prompt_ids) + length
            logits = runner.step(
                [
                    _step(memory, place, start, [fork.token_id])
                    for fork, place in zip(forks, here, strict=False)
                ]
            )
    finally:
        pool.release(held)
    if not (best := search.result(count)):
        raise GenerationFailed("every token is forbidden")
    return best


def _step(memory: KVMemory, blocks: Sequence[int], start: int, tokens: Sequence[int]) -> SequenceStep:
    table, windowed = own_tables(memory.layout, blocks)
    return SequenceStep(memory, table, start, tokens, True, window_tables=windowed)


def _going_on(found: Sequence[list[Candidate] | SampleFailure]) -> list[list[Candidate]]:
    """Candidates of each beam; none of one that has no token to go on with."""
    going: list[list[Candidate]] = []
    for of_one in found:
        if isinstance(of_one, SampleFailure) and not of_one.by_request:
            raise GenerationFailed.by(of_one)
        going.append([] if isinstance(of_one, SampleFailure) else of_one)
    return going
