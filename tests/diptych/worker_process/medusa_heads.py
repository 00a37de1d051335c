"""Medusa heads for the tiny model of both_workers.py, and their drafts by the definition alone."""

from __future__ import annotations

from collections.abc import Callable
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
Children = Callable[[Text], list[tuple[int, float]]]


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


def offline(heads: MedusaHeads, trees: str, temperature: float, seed: int) -> tuple[Text, int, int]:
    """Return the output, and how many tokens are drafted and accepted, in chains or `trees`."""
    output, drafted, accepted = plain(temperature, seed)[:1], 0, 0
    hidden: torch.Tensor | None = None  # a prompt's row stays with the prefill worker
    while len(output) < COUNT:
        nodes: dict[Text, int] = {}
        if hidden is not None:
            room, children = COUNT - len(output) - 1, children_of(heads, hidden, output, temperature, seed)
            nodes = nodes_of(trees or ",".join("1" * HEADS), room, children)
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


def children_of(
    heads: MedusaHeads, hidden: torch.Tensor, output: Text, temperature: float, seed: int
) -> Children:
    """Return what gives the tokens after a node, which depend on its depth alone."""
    logits = heads.logits(hidden[None], HEADS)

    def children(chain: Text) -> list[tuple[int, float]]:
        return ranked(logits[len(chain)], len(output) + len(chain), temperature, seed)

    return children


def ranked(logits: torch.Tensor, said: int, temperature: float, seed: int) -> list[tuple[int, float]]:
    """Return all tokens by their ranks among the drafts, with their log-probabilities.

    The drawn one is the first, and has that of the likeliest.
    """
    first, scores = drawn(logits, said, temperature, seed), logits[0].double().log_softmax(0).tolist()
    likely = sorted(range(SHAPE.vocab_size), key=lambda token: (-float(logits[0, token]), token))
    return [(first, max(scores)), *((token, scores[token]) for token in likely if token != first)]


def nodes_of(trees: str, room: int, children: Children) -> dict[Text, int]:
    """Return the drafted tokens by their paths of ranks, by the definition of the trees alone.

    `children` returns the tokens that may follow a chain of drafted ones, and their log-probabilities.
    """
    if not trees.startswith("dynamic:"):
        paths = rank_paths(tuple(map(int, trees.split(","))))[: max(room, 0)]
        fixed: dict[Text, int] = {}
        for path in paths:
            fixed[path] = children(chain_to(path, fixed))[path[-1]][0]
        return fixed
    most, depths, width = map(int, trees.removeprefix("dynamic:").split(","))
    most = min(most, room)
    tokens, values, best = dict[Text, int](), {(): 0.0}, list[Text]()
    parents = [()] if most > 0 else list[Text]()
    for depth in range(depths):
        for parent in parents:
            for rank, (token, logprob) in enumerate(children(chain_to(parent, tokens))[: min(width, most)]):
                tokens[*parent, rank], values[*parent, rank] = token, values[parent] + logprob
        best = sorted(tokens, key=lambda path: (-values[path], len(path), path))[:most]
        parents = [path for path in best if len(path) == depth + 1][:width]
    return {path: tokens[path] for path in best}


def chain_to(path: Text, tokens: dict[Text, int]) -> Text:
    """Return the tokens on the way to a node, its own included if it is known."""
    ways = (path[:depth] for depth in range(1, len(path) + 1))
    return tuple(tokens[way] for way in ways if way in tokens)
