"""Tokens a second of one stream with Medusa heads and without, by turns: python -m lab.medusa --help.

The model has random weights, and so nothing that heads could learn but its own answer: they are fitted to
that, or to a part of it. What is measured is the most that so many right drafts bring, and what heads that
are always wrong cost; not how good trained heads are. The answer is drawn at temperature 1: a greedy one
repeats itself soon, and prompt lookup would draft in place of heads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from diptych.client import AsyncClient
from diptych.engine.batch import SequenceStep
from diptych.engine.heads.medusa import HEADS_FIELD, WEIGHTS
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import load_model
from diptych.engine.runner import Runner
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams, sample
from lab.speculation import write_pair
from tests.end_to_end.stack import Stack, running_stack

HEADS, BLOCK = 4, 16
PROMPT = tuple(range(40, 104))
SEED = 7
SURE = 1000.0
"""Logit of what heads know: far above all others at that temperature."""


def answer_of(model: Path, count: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """Return the drawn answer of `count` tokens, and the hidden rows `[count, hidden]` that gave them."""
    runner = Runner(load_model(model, "fp32"))
    assert runner.give_hidden_rows() is None
    layout = runner.model.kv_layout(BLOCK)
    blocks = layout.blocks_for(len(PROMPT) + count)
    memory, new, start = KVMemory(layout, blocks), list(PROMPT), 0
    answer, rows = list[int](), []
    for _ in range(count):
        step = SequenceStep(memory, range(blocks), start, new, wants_logits=True)
        output = runner.step_and_sample([step], [None])
        assert output.hidden is not None
        start += len(new)
        (drawn,) = sample(output.logits, [SampleRow(SamplingParams(seed=SEED), PROMPT, answer)])
        assert isinstance(drawn, Sampled)
        new = [drawn.token_id]
        answer = [*answer, *new]
        rows.append(output.hidden[0])
    return tuple(answer), torch.stack(rows)


def write_heads(folder: Path, answer: Sequence[int], rows: torch.Tensor, vocab: int, right: float) -> Path:
    """Write heads that know a share `right` of the answer's tokens, and say anything of the others."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(2)
    tensors, (count, hidden) = {}, rows.shape
    for head in range(HEADS):
        known = count - 1 - head
        wanted = torch.zeros(known, vocab, dtype=torch.double)
        said = torch.tensor(answer[1 + head :])
        wrong = torch.rand(known, generator=generator) >= right
        said[wrong] = torch.randint(vocab, (int(wrong.sum()),), generator=generator)
        wanted[range(known), said] = SURE
        tensors[f"{head}.0.linear.weight"] = torch.zeros(hidden, hidden)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(hidden)
        tensors[f"{head}.1.weight"] = (
            (torch.linalg.pinv(rows[:known].double()) @ wanted).T.float().contiguous()
        )
    save_file(tensors, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps({HEADS_FIELD: HEADS, "medusa_num_layers": 1}))
    return folder


async def timed(stack: Stack, count: int) -> tuple[float, tuple[int, ...], float]:
    """Return tokens a second after the first one, the tokens, and the share of drafts that were right."""
    async with AsyncClient(stack.address) as client:
        tokens: list[int] = []
        first, usage = 0.0, None
        async for chunk in client.stream(PROMPT, max_tokens=count, temperature=1.0, seed=SEED, timeout_s=300):
            first = first or time.perf_counter()
            tokens += chunk.token_ids
            usage = chunk.usage or usage
        rate = (len(tokens) - 1) / (time.perf_counter() - first)
        drafted = 0 if usage is None else usage.drafted_tokens
        return rate, tuple(tokens), usage.accepted_draft_tokens / drafted if usage and drafted else 0.0


async def turns(plain: Stack, drafting: Stack, rounds: int, count: int) -> str:
    """Return the ratios of all rounds, in words."""
    ratios, share = [], 0.0
    for _ in range(rounds):
        slow, text, _ = await timed(plain, count)
        fast, same, share = await timed(drafting, count)
        if text != same:
            return "the texts differ"
        ratios.append(fast / slow)
    return (
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of {slow:.1f} tokens/s; "
        f"drafts right {share:.2f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--right", nargs="+", type=float, default=[1.0, 0.6, 0.0])
    parser.add_argument("--trees", nargs="+", default=["", "3,2,1,1", "dynamic:21,4,5"])
    parser.add_argument("flags", nargs="*", help="Flags of both systems, after --.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, _ = write_pair(Path(folder))
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        answer, rows = answer_of(model, options.max_tokens)
        flags = ("--model", str(model), "--dtype", "fp32", *options.flags)
        with running_stack(*flags) as plain:
            for right in options.right:
                heads = write_heads(Path(folder) / f"heads-{right}", answer, rows, vocab, right)
                for tree in options.trees:
                    drafts = ["--speculative-model", str(heads)]
                    drafts += ["--speculative-tree", tree] if tree else []
                    with running_stack(*flags, *drafts) as drafting:
                        said = asyncio.run(turns(plain, drafting, options.rounds, options.max_tokens))
                    print(f"right {right}, {tree or 'chain'}: {said}", flush=True)


if __name__ == "__main__":
    main()
