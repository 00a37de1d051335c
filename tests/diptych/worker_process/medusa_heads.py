"""Medusa heads for the tiny model of both_workers.py, and their drafts by the definition alone."""

from __future__ import annotations

from functools import cache

import torch

from decode_worker.draft_tree import rank_paths
from diptych.engine.batch import SequenceStep
from diptych.engine.heads.medusa import MedusaHead, MedusaHeads
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams, sample
from tests.diptych.worker_process.both_workers import BLOCK, MODELS, SHAPE

HEADS = 3
PROMPT = (5, 9, 2, 33, 7, 18, 4, 40, 22, 1, 13)
COUNT = 16
"""Tokens of a text, whose hidden rows are no more than a row has numbers: heads can know all of it."""
Text = tuple[int, ...]


@cache
def _runner() -> Runner:
    runner = Runner(MODELS["torch"](), 1)
    assert runner.give_hidden_rows() is None
    return runner


@cache
def model_row(context: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits `[1, vocab]` after `context`, and the hidden row `[hidden]` they come from."""
    runner = _runner()
    layout = runner.model.kv_layout(BLOCK)
    blocks = layout.blocks_for(len(context))
    step = SequenceStep(KVMemory(layout, blocks), range(blocks), 0, context, wants_logits=True)
    output = runner.step_and_sample([step], [None])
    assert output.hidden is not None
    return output.logits, output.hidden[0]


def drawn(logits: torch.Tensor, said: int, temperature: float, seed: int) -> int:
    """Return the token that a request draws from `logits [1, vocab]` as token number `said` of its output."""
    params = SamplingParams(temperature=temperature, seed=seed)
    (sampled,) = sample(logits, [SampleRow(params, PROMPT, (0,) * said)])
    assert isinstance(sampled, Sampled)
    return sampled.token_id


@cache
def plain(temperature: float, seed: int, prompt: Text = PROMPT, count: int = COUNT) -> Text:
    """Return the model's own output."""
    text = prompt
    for said in range(count):
        text += (drawn(model_row(text)[0], said, temperature, seed),)
    return text[len(prompt) :]


def heads_of(kind: str, temperature: float, seed: int) -> MedusaHeads:
    """Return heads that know the model's text after PROMPT ("right"), none of it ("random"), or the first of
    which knows it ("first").
    """
    generator = torch.Generator().manual_seed(3)
    output, hidden, vocab = plain(temperature, seed), SHAPE.hidden_size, SHAPE.vocab_size
    rows = torch.stack([model_row(PROMPT + output[:said])[1] for said in range(1, COUNT)]).double()
    heads = []
    for head in range(HEADS):
        block = torch.randn(hidden, hidden, generator=generator) * 0.1, torch.zeros(hidden)
        matrix = torch.randn(vocab, hidden, generator=generator)
        if kind == "right" or (kind == "first" and head == 0):
            block = torch.zeros(hidden, hidden), torch.zeros(hidden)
            known = COUNT - 2 - head  # rows whose token so many places on is one of the text
            wanted = torch.zeros(known, vocab, dtype=torch.double)
            wanted[range(known), output[2 + head :]] = 1000.0  # far from all others at any temperature
            matrix = (torch.linalg.pinv(rows[:known]) @ wanted).T.float()
        heads.append(MedusaHead([block], matrix))
    return MedusaHeads(heads)


def offline(
    heads: MedusaHeads, branches: tuple[int, ...], temperature: float, seed: int
) -> tuple[Text, int, int]:
    """Return the output, and how many tokens are drafted and accepted."""
    paths = rank_paths(branches or (1,) * HEADS)
    output, drafted, accepted = plain(temperature, seed)[:1], 0, 0
    hidden: torch.Tensor | None = None  # a prompt's row stays with the prefill worker
    while len(output) < COUNT:
        nodes = {} if hidden is None else _nodes(heads, hidden, paths, output, temperature, seed)
        drafted += len(nodes)
        at: Text = ()
        while True:
            logits, hidden = model_row(PROMPT + output)
            output += (drawn(logits, len(output), temperature, seed),)
            right = [path for path, token in nodes.items() if path[:-1] == at and token == output[-1]]
            if not right:
                break
            at, accepted = right[0], accepted + 1
    return output, drafted, accepted


def _nodes(
    heads: MedusaHeads,
    hidden: torch.Tensor,
    paths: list[tuple[int, ...]],
    output: Text,
    temperature: float,
    seed: int,
) -> dict[tuple[int, ...], int]:
    """Return the drafted tokens by their paths of ranks."""
    logits = heads.logits(hidden[None], HEADS)
    tokens = []
    for depth in range(HEADS):
        first = drawn(logits[depth], len(output) + depth, temperature, seed)
        likely = sorted(range(SHAPE.vocab_size), key=lambda token: (-float(logits[depth, 0, token]), token))
        tokens.append([first, *(token for token in likely if token != first)])
    room = COUNT - len(output) - 1
    return {path: tokens[len(path) - 1][path[-1]] for path in paths[:room]}
