"""Drafts beside recurrent layers: states are kept behind right tokens alone, and the text is that without.

The oracle computes each token from all before it and reads no state at all.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from decode_worker.sequence import AttemptBlocks, DecodeSequence
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.torch.recurrent import step_states
from diptych.engine.batch import SequenceStep
from diptych.engine.loaded_model import Model
from diptych.engine.models.recurrent import ShortConvShape
from diptych.engine.models.shape import LayerShape, ModelShape
from diptych.engine.weights import Weights
from tests.diptych.worker_process import both_workers
from tests.diptych.worker_process.both_workers import BLOCK, RECURRENT, SHAPE, House, house
from tests.diptych.worker_process.complaints import complaints
from tests.diptych.worker_process.page_checks import (
    BLOCKS,
    PROMPT,
    TRANSPORTS,
    PageWalk,
    answer_of,
    ask,
    cached_tokens,
    expected_hit,
    is_wrong,
)
from tests.diptych.worker_process.test_speculation import Knowing
from tests.forms import sampled
from tests.kernels.cpu.tiny_models import weights_of

ANSWER = 40
BACKENDS = ("torch", "native", "device")


def knowing(wrong: float, resting: float = 0.0) -> Knowing:
    return Knowing(wrong, resting, RECURRENT)


def workers(drafter: Knowing | None, backend: str = "torch", **more: Any) -> Any:
    return house(
        more.pop("transport", "shared_memory"),
        **{"blocks": BLOCKS, "scratch": BLOCKS, "shape": RECURRENT, "backend": backend, **more},
        drafter=drafter,
    )


def counts(made: House) -> tuple[int, int]:
    """Return the drafted tokens of the last request, and the right ones."""
    return made.decodes[0].ended[-1].drafted, made.decodes[0].ended[-1].accepted


@pytest.mark.parametrize(
    ("backend", "wrong", "most"),
    sampled(
        [(one, *share) for one in BACKENDS for share in ((0.0, 12), (0.4, 39), (1.0, 40))],
        [("torch", 0.4, 39), ("native", 0.0, 12), ("native", 0.4, 39), ("device", 0.4, 39)],
    ),
)
async def test_drafts_change_no_token(backend: str, wrong: float, most: int) -> None:
    """Steps give up to four tokens, whose places are of four; where all drafts are wrong they give one."""
    async with workers(knowing(wrong), backend) as made:
        heard = await ask(made, "a", PROMPT, ANSWER)
        assert heard.tokens == answer_of(RECURRENT, PROMPT, ANSWER)
        assert made.decodes[0].loop.steps <= most
        drafted, accepted = counts(made)
        assert drafted > 0
        assert accepted == (0 if wrong == 1.0 else drafted) or 0 < wrong < 1.0
        assert await made.empty() == []


@pytest.mark.parametrize(
    ("backend", "length"),
    sampled(
        [(one, length) for one in BACKENDS for length in range(38, 42)],
        [("torch", 39), ("native", 40), ("device", 41)],
    ),
)
async def test_a_chat_goes_on_from_a_drafted_answer(backend: str, length: int) -> None:
    """The pages that a drafted answer leaves in the prefix cache are read by the next prompt."""
    async with workers(knowing(0.3), backend) as made:
        turn = PROMPT[:length]
        for number in range(3):
            heard = await ask(made, f"r{number}", turn, 17)
            assert heard.tokens == answer_of(RECURRENT, turn, 17)
            turn = (*turn, *heard.tokens, 5)
            assert expected_hit(made, turn) >= (len(turn) - 2) // BLOCK * BLOCK - 2 * BLOCK
        await ask(made, "last", turn, 17)
        assert cached_tokens(made) > len(PROMPT)
        assert await made.empty() == []


@pytest.mark.parametrize("backend", sampled(BACKENDS, ["torch", "native"]))
@pytest.mark.parametrize(
    "asked",
    [
        {"sampling": {"temperature": 1.0, "seed": 3}, "choices": (0, 1, 2)},
        {"sampling": {"logprobs": 2, "frequency_penalty": 0.5}},
    ],
    ids=["drawn", "ruled"],
)
async def test_drawn_choices_and_rules_stay(backend: str, asked: dict[str, Any]) -> None:
    found, drafter = [], knowing(0.2)
    for one in (None, drafter):
        async with workers(one, backend) as made:
            heard = await ask(made, "a", PROMPT[:41], 24, **asked)
            found.append((heard.outputs, heard.reasons))
            assert await made.empty() == []
    assert found[0] == found[1]
    assert drafter.drafted > 0


@pytest.mark.parametrize(
    ("backend", "transport"),
    sampled(
        [(one, way) for one in BACKENDS for way in ("shared_memory", "tcp")],
        [("native", "tcp")],
    ),
)
async def test_requests_in_random_order(
    backend: str, transport: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are cancelled, preempted, tried again elsewhere; pages and blocks are all given back."""
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(PageWalk, "requests", 60)
    drafter = knowing(0.3, resting=0.3)
    async with workers(drafter, backend, transport=transport, decodes=2, prefills=2, blocks=56) as made:
        walk = PageWalk(made, 5, RECURRENT)
        await walk.run()
        assert await made.empty() == []
    assert complaints(caplog) == []
    assert walk.outcomes["decode finished"] > 0, walk.outcomes
    assert walk.outcomes["decode preempted"] > 0, walk.outcomes
    assert drafter.drafted > 0


# ---- draft models ------------------------------------------------------------------------------------------


NEAR = replace(
    SHAPE, layers=(LayerShape(recurrent=ShortConvShape(16, 3)), LayerShape(), LayerShape(attention=True))
)
"""The shape of a model that a draft model comes near to: it is the same without recurrence, which is weak."""


def near_weights(shape: ModelShape, dtype: torch.dtype) -> Weights:
    """Return random weights with weak recurrences."""
    weights = weights_of(shape, dtype)
    layers = [
        layer
        if layer.recurrent is None
        else replace(layer, recurrent={**layer.recurrent, "out_proj": 0.2 * layer.recurrent["out_proj"]})
        for layer in weights.layers
    ]
    return replace(weights, layers=tuple(layers))


def near_draft(kind: str, backend: str) -> Model:
    """Return the model without its recurrences."""
    shape = replace(NEAR, layers=(LayerShape(),) * 3)
    weights = near_weights(NEAR, torch.float32)
    layers = tuple(replace(layer, recurrent=None) for layer in weights.layers)
    return Model(shape, "fp32", torch.float32, TorchBackend(shape, replace(weights, layers=layers)), "torch")


@TRANSPORTS
async def test_a_draft_model_drafts(
    transport: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Keep its keys and values beside full blocks, and none beside pages: hits and answers stay."""
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(both_workers, "weights_of", near_weights)
    monkeypatch.setattr(both_workers, "draft_model", near_draft)
    async with workers(None, transport=transport, shape=NEAR, draft="near") as made:
        turn = PROMPT
        for number in range(2):
            heard = await ask(made, f"r{number}", turn, ANSWER)
            assert heard.tokens == answer_of(NEAR, turn, ANSWER)
            drafted, accepted = counts(made)
            assert drafted / 4 < accepted < drafted
            turn = (*turn, *heard.tokens, 5)
        assert cached_tokens(made) >= len(PROMPT) // BLOCK * BLOCK
        assert made.decodes[0].loop.steps < 2 * ANSWER
        assert await made.empty() == []
    assert complaints(caplog) == []


async def test_a_worker_without_the_draft_model_serves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both_workers, "weights_of", near_weights)
    monkeypatch.setattr(both_workers, "draft_model", near_draft)
    for transport in ("shared_memory", "tcp"):
        for drafts in (["near"], [None]), ([None], ["near"]):
            async with workers(None, transport=transport, shape=NEAR, drafts=drafts) as made:
                heard = await ask(made, "a", PROMPT)
                assert heard.tokens == answer_of(NEAR, PROMPT)
                assert await made.empty() == []


# ---- controls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counted", [True, False])
async def test_states_behind_wrong_drafts_are_seen(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the states behind all tokens of a step: their count finds it, and else the tokens are others."""
    monkeypatch.setattr(SequenceStep, "kept_tokens", property(lambda step: len(step.token_ids)))
    if not counted:
        monkeypatch.setattr(step_states._Run, "stale", lambda run: [False] * len(run.members))
    async with workers(knowing(0.4)) as made:
        heard = await ask(made, "a", PROMPT, ANSWER)
        assert is_wrong(RECURRENT, heard, PROMPT)
        assert (heard.terminal_messages == ["decode finished"]) is not counted
        if not counted:
            assert heard.tokens != answer_of(RECURRENT, PROMPT, ANSWER)


async def test_right_drafts_that_states_lack_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on from the states without the right drafts, as attention may: their count finds it."""
    monkeypatch.setattr(AttemptBlocks, "count_behind", lambda blocks, sequence, drafted: None)
    async with workers(knowing(0.0)) as made:
        heard = await ask(made, "a", PROMPT, ANSWER)
        assert heard.terminal_messages != ["decode finished"]


async def test_blocks_that_are_computed_once_more_are_in_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step writes to no block and no page that others may have found by then."""
    real, found = DecodeSequence.step, list[tuple[int, int]]()

    def noting(sequence: DecodeSequence, *rest: Any) -> SequenceStep:
        step = real(sequence, *rest)
        found.append((step.start, len(sequence.block_keys) * BLOCK))
        return step

    monkeypatch.setattr(DecodeSequence, "step", noting)
    async with workers(knowing(0.2)) as made:
        await ask(made, "a", PROMPT, ANSWER)
    assert all(start >= cached for start, cached in found)
    assert max(cached for _, cached in found) > len(PROMPT)
