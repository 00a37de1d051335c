"""Right drafts of a step in chains, fixed and dynamic trees of as many tokens: python -m lab.trees --help.

An EAGLE head of the model is trained for some minutes on answers of the model itself, and drafts after
others. What it says is far from what a published head says, and so are the numbers; but it is sure at some
places and not at others, as such a head is. The count is exact where steps give a row the same bits whatever
else they compute: the model's own text says which drafts were right.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from decode_worker.draft_tree import as_tree, right_tokens
from decode_worker.eagle_tree import EagleTree
from decode_worker.sequence import DecodeSequence
from decode_worker.tree_plans import parse_plan
from diptych.engine.batch import SequenceStep
from diptych.engine.heads.feature_head import HeadStep
from diptych.engine.heads.layer_head import LayerHead
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import load_model
from diptych.engine.runner import Runner
from diptych.engine.sampling import SampleRow, SamplingParams
from diptych.runtime.settings import resolve_model
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from lab.quality.text import python_reference
from lab.trained_head import TrainedText, train

BLOCK, PROMPT = 16, 16
GREEDY = SamplingParams(temperature=0.0)
TREES = ("1,1,1,1", "3,2", "dynamic:9", "4,2,1", "dynamic:20", "4,3,1,1,1", "dynamic:52,6,8")
"""Trees of 4, 9, 20 and 52 tokens."""


def answers(runner: Runner, prompts: Sequence[Sequence[int]], count: int) -> list[TrainedText]:
    """Return the greedy answers of `count` tokens to prompts of one length, with features of all tokens."""
    layout = runner.model.kv_layout(BLOCK)
    blocks = layout.blocks_for(PROMPT + count)
    memory = KVMemory(layout, blocks * len(prompts))
    texts, done = [list(prompt) for prompt in prompts], 0
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for _ in range(count):
        steps = [
            SequenceStep(memory, range(n * blocks, (n + 1) * blocks), done, text[done:], wants_logits=True)
            for n, text in enumerate(texts)
        ]
        output = runner.step_and_sample(steps, [None] * len(steps))
        assert output.features is not None
        for mine, given in zip(rows, output.features.split(len(steps[0].token_ids)), strict=True):
            mine.append(given.float().clone())
        done = len(texts[0])
        for text, token in zip(texts, output.logits.argmax(dim=-1).tolist(), strict=True):
            text.append(token)
    return [TrainedText(text, torch.cat(mine)) for text, mine in zip(texts, rows, strict=True)]


@dataclass
class Counted:
    """Drafts after some texts."""

    right: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def count_right(head: LayerHead, runner: Runner, text: TrainedText, trees: str, counted: Counted) -> None:
    """Draft after a prompt as a decode worker does, to the end of its answer."""
    layout = replace(runner.model.kv_layout(BLOCK), draft=head.kv_layout(BLOCK))
    blocks = layout.blocks_for(len(text.tokens) + 64)
    memory = KVMemory(layout, blocks)
    assert memory.draft is not None
    plan = parse_plan(trees)
    assert plan is not None
    drafter, most = EagleTree(head, memory, plan), len(plan.depths)
    before = torch.cat([torch.zeros_like(text.features[:1]), text.features[: PROMPT - 1]])
    head.step(memory.draft, [HeadStep(range(blocks), 0, text.tokens[:PROMPT], head.fuse(before))])
    output = list(text.tokens[PROMPT : PROMPT + 2])  # the first token's feature stays with its worker
    sequence = DecodeSequence(
        PROMPT, output, SampleRow(GREEDY, text.tokens[:PROMPT], output), block_ids=list(range(blocks))
    )
    sequence.draft_computed, sequence.features = PROMPT, [text.features[PROMPT]]
    while len(output) < len(text.tokens) - PROMPT - 8:
        began = time.perf_counter()
        (draft,) = drafter.draft([sequence], [most])
        counted.seconds.append(time.perf_counter() - began)
        rest = text.tokens[PROMPT + len(output) :]
        right = right_tokens(as_tree(draft), rest)
        counted.right.append(right)
        counted.nodes.append(len(draft))
        at = PROMPT + len(output)
        sequence.features += list(text.features[at - 1 : at + right])
        output += rest[: right + 1]
        sequence.draft_computed = min(sequence.draft_computed or 0, sequence.num_tokens - 1)


def main() -> None:
    """Train and count."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--texts", type=int, default=128, help="Answers that the head is trained on.")
    parser.add_argument("--tokens", type=int, default=96, help="Tokens of an answer.")
    parser.add_argument("--held-out", type=int, default=16, help="Answers that are drafted for.")
    parser.add_argument("--minutes", type=float, default=3.0, help="Time of the training.")
    parser.add_argument("--trees", nargs="+", default=TREES)
    options = parser.parse_args()
    path = resolve_model(options.model)
    runner = Runner(load_model(path, "fp32", backend="native"), torch.get_num_threads())
    assert runner.give_features((runner.model.shape.num_layers,)) is None
    ids = Tokenizer.load(path).encode(python_reference().content)
    wanted = options.texts + options.held_out
    apart = len(ids) // wanted
    prompts = [ids[n * apart : n * apart + PROMPT] for n in range(wanted)]
    texts = [
        one for n in range(0, wanted, 16) for one in answers(runner, prompts[n : n + 16], options.tokens)
    ]
    print(f"{wanted} answers of {options.tokens} tokens", flush=True)
    embed = runner.embedding
    assert embed is not None
    head = train(texts[options.held_out :], runner.model.shape, embed, 60 * options.minutes)
    print("| trees | tokens | right a step | steps without | ms a draft |\n|---|---|---|---|---|")
    for trees in options.trees:
        counted = Counted()
        for text in texts[: options.held_out]:
            count_right(head, runner, text, trees, counted)
        none = sum(one == 0 for one in counted.right) / len(counted.right)
        print(
            f"| {trees} | {statistics.mean(counted.nodes):.1f} | {statistics.mean(counted.right):.3f} | "
            f"{none:.2f} | {1e3 * statistics.median(counted.seconds):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
