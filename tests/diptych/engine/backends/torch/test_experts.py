"""The experts' layer equals transformers' blocks, for every kind of routing; each switch changes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeMoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from diptych.engine.backends.torch.experts import ExpertFeedForward
from diptych.engine.models.shape import ExpertsShape, UnsupportedModel
from diptych.engine.weights import ExpertWeights
from kernels.swiglu import clamped_swiglu, swiglu

HIDDEN, INNER, COUNT, CHOSEN, ROWS = 52, 38, 12, 3, 40
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN, "num_attention_heads": 4}
DEEPSEEK = {**SIZES, "moe_intermediate_size": INNER, "n_routed_experts": COUNT, "n_shared_experts": 2}
PLAIN = ExpertsShape(COUNT, CHOSEN, INNER)
DEEP = replace(PLAIN, shared_size=2 * INNER, scale=1.7)
GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}


@dataclass(frozen=True)
class Case:
    """A block of transformers and the shape that it has here."""

    block: Callable[[], Any]
    shape: ExpertsShape


CASES: dict[str, Case] = {
    "qwen3_moe": Case(
        lambda: Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(**SIZES, num_experts=COUNT, moe_intermediate_size=INNER, norm_topk_prob=True)
        ),
        replace(PLAIN, normalise=True),
    ),
    "mixtral": Case(
        lambda: MixtralSparseMoeBlock(
            MixtralConfig(**SIZES, num_local_experts=COUNT, intermediate_size=INNER)
        ),
        replace(PLAIN, normalise=True),
    ),
    "olmoe": Case(
        lambda: OlmoeSparseMoeBlock(OlmoeConfig(**SIZES, num_experts=COUNT, intermediate_size=INNER)),
        PLAIN,
    ),
    "granitemoe": Case(
        lambda: GraniteMoeMoE(GraniteMoeConfig(**SIZES, num_local_experts=COUNT, intermediate_size=INNER)),
        replace(PLAIN, routing="topk_then_softmax"),
    ),
    "gpt_oss": Case(
        lambda: GptOssMLP(
            GptOssConfig(**SIZES, num_local_experts=COUNT, intermediate_size=INNER, swiglu_limit=0.9)
        ),
        replace(
            PLAIN,
            routing="topk_then_softmax",
            router_bias=True,
            bias=True,
            clamp=0.9,
        ),
    ),
    "qwen2_moe": Case(
        lambda: Qwen2MoeSparseMoeBlock(
            Qwen2MoeConfig(
                **SIZES,
                num_experts=COUNT,
                moe_intermediate_size=INNER,
                shared_expert_intermediate_size=46,
            )
        ),
        replace(PLAIN, shared_size=46, shared_gate=True),
    ),
    "glm4_moe": Case(
        lambda: Glm4MoeMoE(Glm4MoeConfig(**DEEPSEEK, routed_scaling_factor=1.7)),
        replace(DEEP, routing="sigmoid", normalise=True, correction_bias=True),
    ),
    "deepseek_v3": Case(
        lambda: DeepseekV3MoE(DeepseekV3Config(**DEEPSEEK, **GROUPED)),
        replace(
            DEEP,
            routing="sigmoid",
            normalise=True,
            correction_bias=True,
            groups=4,
            groups_per_token=2,
            group_score="best_two",
        ),
    ),
    "deepseek_v2": Case(
        lambda: DeepseekV2Moe(DeepseekV2Config(**DEEPSEEK, **GROUPED, topk_method="group_limited_greedy")),
        replace(DEEP, groups=4, groups_per_token=2),
    ),
    "deepseek_v2-greedy": Case(
        lambda: DeepseekV2Moe(DeepseekV2Config(**DEEPSEEK, routed_scaling_factor=1.7)), DEEP
    ),
}
# Each switch, changed, and a case that has it.
CONTROLS: dict[str, tuple[str, dict[str, Any]]] = {
    "top-k not normalised": ("mixtral", {"normalise": False}),
    "top-k normalised": ("olmoe", {"normalise": True}),
    "softmax before the choice": ("granitemoe", {"routing": "softmax_then_topk"}),
    "no clamp": ("gpt_oss", {"clamp": 1e9}),
    "the plain gate": ("gpt_oss", {"clamp": None}),
    "no groups": ("deepseek_v3", {"groups": 1, "groups_per_token": 1}),
    "groups by their largest": ("deepseek_v3", {"group_score": "best"}),
    "softmax for sigmoid": ("glm4_moe", {"routing": "softmax_then_topk"}),
    "no scale": ("glm4_moe", {"scale": 1.0}),
    "fewer experts": ("qwen3_moe", {"experts_per_token": CHOSEN - 1}),
}


def random_block(case: Case) -> Any:
    """Return the block with random numbers and routers that differ by more than 1e-3 where it matters."""
    torch.manual_seed(8)
    block = case.block().eval()
    with torch.no_grad():
        for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
            tensor.normal_(0.0, 0.3 if "bias" in name else 0.25)
    return block


def weights_of_block(block: Any, shape: ExpertsShape) -> ExpertWeights:
    """Return the canonical tensors of a block."""
    router = block.router if hasattr(block, "router") else block.gate
    experts = block.experts
    biases: dict[str, Any] = {}
    if shape.bias:
        both = experts.gate_up_proj.transpose(1, 2)
        gate, up = both[:, ::2], both[:, 1::2]
        down = experts.down_proj.transpose(1, 2)
        biases = {
            "gate_biases": tuple(experts.gate_up_proj_bias[:, ::2]),
            "up_biases": tuple(experts.gate_up_proj_bias[:, 1::2]),
            "down_biases": tuple(experts.down_proj_bias),
        }
    else:
        gate, up = experts.gate_up_proj.chunk(2, dim=1)
        down = experts.down_proj
    shared = getattr(block, "shared_experts", getattr(block, "shared_expert", None))
    switch = getattr(block, "shared_expert_gate", None)
    return ExpertWeights(
        router=router.weight,
        gates=tuple(gate),
        ups=tuple(up),
        downs=tuple(down),
        router_bias=router.bias if shape.router_bias else None,
        correction_bias=router.e_score_correction_bias if shape.correction_bias else None,
        shared_gate=None if shared is None else shared.gate_proj.weight,
        shared_up=None if shared is None else shared.up_proj.weight,
        shared_down=None if shared is None else shared.down_proj.weight,
        shared_router=None if switch is None else switch.weight,
        **biases,
    )


def run(shape: ExpertsShape, weights: ExpertWeights, x: torch.Tensor) -> torch.Tensor:
    limit = shape.clamp
    gate = swiglu if limit is None else partial(clamped_swiglu, limit=limit)
    with torch.no_grad():
        return ExpertFeedForward(shape, weights, functional.linear, lambda matrix: matrix, gate)(x)


def as_type(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """Return the experts' matrices in `dtype`; the router stays as it is."""
    changed = {
        name: tuple(torch.as_tensor(matrix).to(dtype) for matrix in getattr(weights, name))
        for name in ("gates", "ups", "downs")
    }
    return replace(weights, **changed)


def rows(count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(9))


def expected(block: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = block(x.unsqueeze(0))
    found: torch.Tensor = (out[0] if isinstance(out, tuple) else out).view(x.shape)
    return found


@pytest.mark.parametrize("name", CASES)
def test_experts_equal_transformers(name: str) -> None:
    case, x = CASES[name], rows()
    block = random_block(case)
    got = run(case.shape, weights_of_block(block, case.shape), x)
    torch.testing.assert_close(got, expected(block, x), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_changed_switch_changes_the_result(control: str) -> None:
    name, change = CONTROLS[control]
    case, x = CASES[name], rows()
    block = random_block(case)
    got = run(replace(case.shape, **change), weights_of_block(block, case.shape), x)
    assert (got - expected(block, x)).abs().max() > 1e-2


def test_swapped_experts_and_absent_parts_change_the_result() -> None:
    case, x = CASES["glm4_moe"], rows()
    block = random_block(case)
    weights, right = weights_of_block(block, case.shape), expected(block, x)
    swapped = (weights.downs[1], weights.downs[0], *weights.downs[2:])
    wrong = [
        replace(weights, downs=swapped),
        replace(weights, shared_gate=None),
        replace(weights, correction_bias=None),
    ]
    for changed in wrong:
        assert (run(case.shape, changed, x) - right).abs().max() > 1e-2
    case = CASES["qwen2_moe"]
    block = random_block(case)
    off = replace(weights_of_block(block, case.shape), shared_router=None)
    assert (run(case.shape, off, x) - expected(block, x)).abs().max() > 1e-2


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    case, x = CASES["deepseek_v3"], rows()
    weights = weights_of_block(random_block(case), case.shape)
    sick = x.clone()
    sick[3] = torch.nan
    got, clean = run(case.shape, weights, sick), run(case.shape, weights, x)
    assert got[3].isnan().all()
    others = torch.arange(ROWS) != 3
    torch.testing.assert_close(got[others], clean[others], atol=1e-5, rtol=0)


def test_contributions_are_rounded_once() -> None:
    case, x = CASES["mixtral"], rows().bfloat16()
    weights = weights_of_block(random_block(case), case.shape)
    short, wide = as_type(weights, torch.bfloat16), as_type(as_type(weights, torch.bfloat16), torch.float32)
    got, exact = run(case.shape, short, x), run(case.shape, wide, x.float())
    assert got.dtype == torch.bfloat16
    assert (got.float() - exact).norm() / exact.norm() < 6e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts_per_token": 0}, "experts_per_token is below 1"),
        ({"experts_per_token": 13}, "13 experts a token of 12"),
        ({"groups": 5, "groups_per_token": 2}, "2 of 5 groups"),
        ({"groups": 4, "groups_per_token": 5}, "5 of 4 groups"),
        ({"groups": 4, "groups_per_token": 1, "experts_per_token": 4}, "4 experts a token of 3"),
        ({"groups": 12, "groups_per_token": 6, "group_score": "best_two"}, "each needs two"),
    ],
)
def test_impossible_experts_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        replace(PLAIN, **change)
