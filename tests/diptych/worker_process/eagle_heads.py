"""Heads over features for the tiny model of both_workers.py, and their drafts by the definition alone.

They have three forms: "eagle3", "eagle", and "mtp", whose layer has attention over latents.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal, Protocol

import torch

from diptych.engine.batch import SequenceStep
from diptych.engine.heads.eagle3 import Eagle3Head
from diptych.engine.heads.eagle3_files import Eagle3Weights
from diptych.engine.heads.feature_head import FeatureHead, HeadStep
from diptych.engine.heads.layer_head import HeadInputs, LayerHead
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.models.shape import LatentShape
from diptych.engine.runner import Runner
from tests.diptych.worker_process.both_workers import BLOCK, MODELS, SHAPE
from tests.diptych.worker_process.medusa_heads import (
    COUNT,
    PROMPT,
    Children,
    Text,
    drawn,
    model_row,
    nodes_of,
    plain,
    ranked,
)
from tests.kernels.cpu.tiny_models import shape_of, weights_of

Form = Literal["eagle3", "eagle", "mtp"]
MOST = 3
"""Drafted tokens of a sequence in a step (both_workers.py)."""
LAYERS = (0, 1, 1)
HEAD = shape_of(
    vocab_size=SHAPE.vocab_size,
    hidden_size=48,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=20,
    max_context=256,
    num_layers=1,
)


def weights_for(draft_tokens: torch.Tensor, seed: int = 6) -> Eagle3Weights:
    """Return random weights of a head with the given draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width, kv, inner = HEAD.hidden_size, 16, 8, HEAD.intermediate_size

    def matrix(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * size[-1] ** -0.5

    def norm() -> torch.Tensor:
        return 1.0 + 0.2 * torch.randn(hidden, generator=generator)

    return Eagle3Weights(
        embed=matrix(SHAPE.vocab_size, hidden) * 5,
        fc=matrix(hidden, len(LAYERS) * SHAPE.hidden_size),
        hidden_norm=norm(),
        input_norm=norm(),
        post_norm=norm(),
        norm=norm(),
        qkv=[(matrix(rows, 2 * hidden), None) for rows in (width, kv, kv)],
        output=matrix(hidden, width),
        gate=matrix(inner, hidden),
        up=matrix(inner, hidden),
        down=matrix(hidden, inner),
        lm_head=matrix(len(draft_tokens), hidden),
        draft_tokens=draft_tokens,
        layers=LAYERS,
        norm_before_residual=False,
    )


class Made(Protocol):
    """A head whose output matrix may be another one."""

    def head(self, output: torch.Tensor | None = None) -> FeatureHead:
        """Return the head, with the output matrix `[drafted tokens, hidden]` in place of its random one."""
        ...

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """Return the rows `[rows, hidden]` that the output matrix reads of features that the head gave."""
        ...

    @property
    def tokens(self) -> list[int]:
        """The drafted tokens, one a row of the output matrix."""
        ...


class _Eagle3:
    def __init__(self, draft_tokens: torch.Tensor) -> None:
        self._weights = weights_for(draft_tokens)
        self.tokens: list[int] = draft_tokens.tolist()

    def head(self, output: torch.Tensor | None = None) -> FeatureHead:
        weights = self._weights if output is None else replace(self._weights, lm_head=output)
        return Eagle3Head(HEAD, weights, SHAPE.vocab_size)

    def read(self, features: torch.Tensor) -> torch.Tensor:
        features = features.double()
        scale = (features.square().mean(-1, keepdim=True) + HEAD.rms_eps).rsqrt()
        return features * scale * self._weights.norm.double()


class _Layer:
    """A head of a layer, with a norm of its own and latents where it is one of `mtp`."""

    def __init__(self, *, mtp: bool) -> None:
        latent = LatentShape(rank=20, plain=6, value=5) if mtp else None
        shape = shape_of(
            vocab_size=SHAPE.vocab_size,
            hidden_size=SHAPE.hidden_size,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            intermediate_size=20,
            max_context=256,
            num_layers=1,
            latent=latent,
        )
        weights = weights_of(shape, torch.float32, seed=6)
        if not mtp:
            weights = replace(weights, layers=(replace(weights.layers[0], input_norm=None),))
        generator = torch.Generator().manual_seed(7)
        hidden = SHAPE.hidden_size
        norms = [1.0 + 0.2 * torch.randn(hidden, generator=generator) for _ in range(2)]
        matrix = torch.randn(hidden, 2 * hidden, generator=generator) * hidden**-0.5
        bias = None if mtp else torch.randn(hidden, generator=generator) * 0.1
        self._inputs = HeadInputs(matrix, bias, *(norms if mtp else ()))
        self._shape, self._weights, self._mtp = shape, weights, mtp
        self.tokens = list(range(SHAPE.vocab_size))

    def head(self, output: torch.Tensor | None = None) -> FeatureHead:
        weights = self._weights if output is None else replace(self._weights, head=output)
        return LayerHead(self._shape, weights, self._inputs, (SHAPE.num_layers,), normed=self._mtp)

    def read(self, features: torch.Tensor) -> torch.Tensor:
        return features.double()


def made_for(form: Form, output: Text) -> Made:
    """Return a random head of a form; one of EAGLE-3 drafts the tokens of `output` and half of all others."""
    if form == "eagle3":
        return _Eagle3(torch.tensor(sorted({*output, *range(0, SHAPE.vocab_size, 2)})))
    return _Layer(mtp=form == "mtp")


@cache
def _runner(layers: tuple[int, ...]) -> Runner:
    runner = Runner(MODELS["torch"](), 1)
    assert runner.give_features(layers) is None
    return runner


@cache
def model_features(context: Text, layers: tuple[int, ...]) -> torch.Tensor:
    """Return the features of all tokens of `context`."""
    runner = _runner(layers)
    layout = runner.model.kv_layout(BLOCK)
    blocks = layout.blocks_for(len(context))
    step = SequenceStep(KVMemory(layout, blocks), range(blocks), 0, context, wants_logits=True)
    output = runner.step_and_sample([step], [None])
    assert output.features is not None
    return output.features


class Growing:
    """A draft after `output`, computed anew from the first token of the prompt on."""

    def __init__(self, head: FeatureHead, output: Text) -> None:
        self._head = head
        context = PROMPT + output
        layout = head.kv_layout(BLOCK)
        blocks = layout.blocks_for(len(context) + COUNT)
        self._memory, self._table = KVMemory(layout, blocks), range(blocks)
        of_model = model_features(context, tuple(head.layers))
        features = torch.cat([torch.zeros_like(of_model[:1]), of_model[:-1]])
        features[len(PROMPT)] = 0.0  # the prompt's last feature stays with its worker
        self._lane = len(context)
        step = HeadStep(self._table, 0, context, head.fuse(features))
        self.feature = head.step(self._memory, [step])[-1:]

    def follow(self, token_id: int) -> None:
        """Go on with a drafted token."""
        step = HeadStep(self._table, self._lane, [token_id], self.feature)
        self.feature = self._head.step(self._memory, [step])
        self._lane += 1


def heads_of(kind: str, temperature: float, seed: int, form: Form = "eagle3") -> FeatureHead:
    """Return a head that knows the model's text after PROMPT ("right"), none of it ("random"), or the first
    token of each draft ("first").
    """
    output = plain(temperature, seed)
    made = made_for(form, output)
    head = made.head()
    if kind == "random":
        return head
    rows, tokens = list[torch.Tensor](), list[int]()
    at = 2  # tokens that are there when the first draft is made
    while at < COUNT - 1:
        growing = Growing(head, output[:at])
        count = min(MOST, COUNT - at - 1) if kind == "right" else 1
        for token in output[at : at + count]:
            rows.append(growing.feature)
            tokens.append(token)
            growing.follow(token)
        at += count + 1
        if kind == "first":
            at = at - 1  # any number of tokens may be there
    wanted = torch.zeros(len(rows), len(made.tokens), dtype=torch.double)
    wanted[range(len(rows)), [made.tokens.index(token) for token in tokens]] = 1000.0
    return made.head((torch.linalg.pinv(made.read(torch.cat(rows))) @ wanted).T.float())


def offline(head: FeatureHead, temperature: float, seed: int, trees: str = "") -> tuple[Text, int, int]:
    """Return the output, and how many tokens are drafted and accepted, in chains or `trees`."""
    output, drafted, accepted = plain(temperature, seed)[:1], 0, 0
    while len(output) < COUNT:
        nodes: dict[Text, int] = {}
        if len(output) > 1:
            children = _children_of(head, output, temperature, seed)
            nodes = nodes_of(trees or ",".join("1" * MOST), COUNT - len(output) - 1, children)
        drafted += len(nodes)
        at: Text = ()
        while True:
            output += (drawn(model_row(PROMPT + output)[0], len(output), temperature, seed),)
            right = [path for path, token in nodes.items() if path[:-1] == at and token == output[-1]]
            if not right:
                break
            at, accepted = right[0], accepted + 1
    return output, drafted, accepted


def _children_of(head: FeatureHead, output: Text, temperature: float, seed: int) -> Children:
    """Return what gives the tokens after a node, computed as the end of a chain."""

    def children(chain: Text) -> list[tuple[int, float]]:
        growing = Growing(head, output)
        for token in chain:
            growing.follow(token)
        return ranked(head.logits(growing.feature), len(output) + len(chain), temperature, seed)

    return children
