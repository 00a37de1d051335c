"""Medusa, EAGLE, EAGLE-3 and MTP heads beside groups: no token is another one, and drafts are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu import library
from tests.diptych.engine.heads import mtp_models, test_eagle3
from tests.diptych.worker_process.test_medusa_loader import write_heads
from tests.end_to_end import knowing_head, tiny_model
from tests.end_to_end.rank_hosts import serving_across_hosts
from tests.end_to_end.rank_processes import Degrees, alone, answer, resumed, serving, size_of
from tests.end_to_end.stack import Stack

TOKENS = 40
PROMPT = list(range(40, 70))
OTHERS = [tiny_model.prompt(seed, length) for seed, length in enumerate((5, 100))]
ONE: Degrees = {"tensor-parallel": 1, "sum-parts": 2}
TWO: Degrees = {"tensor-parallel": 2}
STAGES: Degrees = {"pipeline-parallel": 2, "sum-parts": 2}
DEGREES = pytest.mark.parametrize(
    ("prefill", "decode"),
    [(ONE, TWO), (TWO, ONE), (STAGES, TWO), (TWO, STAGES)],
    ids=["1-2", "2-1", "1x2-2", "2-1x2"],
)
BACKENDS = pytest.mark.parametrize("backend", ["native", "torch"])
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not library.library_path().exists(), reason="the native step was not built"),
]


def counted(stack: Stack, what: str) -> float:
    return stack.metric("decode", f"diptych_spec_decode_{what}_tokens_total")


def drafting(degrees: Degrees, head: Path | str, **more: Any) -> Degrees:
    return {**degrees, "speculative-model": str(head), **more}


def check(
    model: Path,
    head: Path | str,
    prefill: Degrees,
    decode: Degrees,
    backend: str,
    *,
    knows: bool = False,
    tree: str = "",
    dies: bool = True,
) -> None:
    """Compare a system's answers with those of one process without drafts; where the head knows the answer
    some drafts are right, which they are not of other rows than those that it was made for.
    """
    prompts = [PROMPT, *OTHERS]
    expected = alone(model, 2, prompts, TOKENS, backend=backend)
    of_decode = drafting(decode, head, **({"speculative-tree": tree} if tree else {}))
    with serving(model, drafting(prefill, head), of_decode, backend=backend) as stack:
        assert answer(stack, PROMPT, TOKENS) == expected[0]
        assert counted(stack, "draft") > 0
        assert (counted(stack, "accepted") > 0) or not knows
        assert [answer(stack, prompt, TOKENS) for prompt in OTHERS] == expected[1:]
        again = [*PROMPT, *expected[0][:20]]  # with a prefix from the cache
        assert answer(stack, again, TOKENS - 20) == expected[0][20:]
        if dies:
            assert resumed(stack, PROMPT, TOKENS, victim=size_of(decode) - 1) == expected[0]


@pytest.mark.full
def test_an_eagle_head_knows_the_text_of_two_ranks(tmp_path: Path) -> None:
    model = tiny_model.write(tmp_path / "tiny")
    head = knowing_head.write(tmp_path / "head", model, [PROMPT], TOKENS)
    check(model, head, TWO, TWO, "native", knows=True, dies=False)


@pytest.mark.full
@BACKENDS
@DEGREES
@pytest.mark.parametrize("tree", ["", "3,2,1", "dynamic:9,4,3"])
def test_an_eagle_head_at_any_degree(
    prefill: Degrees, decode: Degrees, backend: str, tree: str, tmp_path: Path
) -> None:
    model = tiny_model.write(tmp_path / "tiny")
    head = knowing_head.write(tmp_path / "head", model, [PROMPT], TOKENS)
    check(model, head, prefill, decode, backend, knows=True, tree=tree)


@pytest.mark.full
@BACKENDS
@DEGREES
@pytest.mark.parametrize("tree", ["", "3,2,1"])
def test_medusa_heads_at_any_degree(
    prefill: Degrees, decode: Degrees, backend: str, tree: str, tmp_path: Path
) -> None:
    model = tiny_model.write(tmp_path / "tiny")
    heads = write_heads(tmp_path / "heads", model)
    check(model, heads, prefill, decode, backend, tree=tree)


@pytest.mark.full
@BACKENDS
@DEGREES
@pytest.mark.parametrize("tree", ["", "dynamic:9,4,3"])
def test_an_eagle3_head_at_any_degree(
    prefill: Degrees, decode: Degrees, backend: str, tree: str, tmp_path: Path
) -> None:
    """Draft from features of layers of both stages."""
    model = tiny_model.write(tmp_path / "tiny")
    head = write_eagle3(tmp_path / "head", model)
    check(model, head, prefill, decode, backend, tree=tree)


def write_eagle3(folder: Path, model: Path) -> Path:
    """Write a random EAGLE-3 head over the first, the second and the last layer of a model."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, drafts = config["hidden_size"], 48, 80
    generator = torch.Generator().manual_seed(2)
    shapes = test_eagle3.shapes(hidden, inner, drafts)
    tensors = {name: torch.randn(size, generator=generator) * 0.1 for name, size in shapes.items()}
    layers = [0, 1, config["num_hidden_layers"] - 1]
    return test_eagle3.write(
        folder,
        tensors,
        eagle_aux_hidden_state_layer_ids=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        draft_vocab_size=drafts,
        vocab_size=config["vocab_size"],
    )


@pytest.mark.full
@DEGREES
@pytest.mark.parametrize("name", mtp_models.FAMILIES)
def test_a_models_own_layer_at_any_degree(
    name: str, prefill: Degrees, decode: Degrees, tmp_path: Path
) -> None:
    """Torch computes attention over latents, the native step the other family."""
    model = tiny_model.write(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    ends = {key: config[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    mtp_models.write(model, name, **ends)
    check(model, "mtp", prefill, decode, "auto")


@pytest.mark.full
@pytest.mark.parametrize("form", ["eagle", "medusa"])
def test_heads_beside_ranks_of_other_hosts(form: str, tmp_path: Path) -> None:
    """A head's keys and values lie in rank 0's memory alone, and go from there to the other rank 0."""
    model = tiny_model.write(tmp_path / "tiny")
    if form == "eagle":
        head = knowing_head.write(tmp_path / "head", model, [PROMPT], TOKENS)
    else:
        head = write_heads(tmp_path / "head", model)
    expected = alone(model, 2, [PROMPT, *OTHERS], TOKENS, backend="torch")
    degrees = drafting(TWO, head)
    with serving_across_hosts(model, degrees, degrees, tmp_path) as (stack, _):
        assert [answer(stack, prompt, TOKENS) for prompt in (PROMPT, *OTHERS)] == expected
        assert counted(stack, "draft") > 0
        assert (counted(stack, "accepted") > 0) or form == "medusa"
