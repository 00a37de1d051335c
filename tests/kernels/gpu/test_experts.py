"""Routing and products of experts on the GPU equal their meaning, whatever was chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from kernels.gpu.expert_linear import expert_linear, expert_swiglu, sum_experts
from kernels.gpu.route_experts import RoutedRows, order_rows, route_experts
from kernels.route_experts import route_experts as meaning
from kernels.swiglu import clamped_swiglu, swiglu
from tests.forms import sampled
from tests.kernels.gpu.paged import DTYPES, TOLERANCE, error

HIDDEN, INNER, COUNT, CHOSEN = 52, 37, 12, 3
ROUTINGS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "normalised": {"normalise": True, "scale": 1.5},
    "of-chosen": {"routing": "topk_then_softmax"},
    "sigmoid": {"routing": "sigmoid", "normalise": True, "scale": 2.5},
    "groups": {"groups": 4, "groups_per_token": 2},
    "sigmoid-groups": {
        "routing": "sigmoid",
        "normalise": True,
        "groups": 3,
        "groups_per_token": 2,
        "group_score": "best_two",
    },
}


def random(*sizes: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("tokens", [1, 21])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_equals_the_reference(name: str, tokens: int, corrected: bool, device: torch.device) -> None:
    x, router, bias = random(tokens, HIDDEN), random(COUNT, HIDDEN, seed=2) * 0.2, random(COUNT, seed=3)
    correction = random(COUNT, seed=4) * 0.3 if corrected else None
    logits = functional.linear(x, router, bias)
    experts, weights = meaning(logits, correction, count=CHOSEN, **ROUTINGS[name])
    got = route_experts(
        x.to(device),
        router.to(device),
        bias.to(device),
        None if correction is None else correction.to(device),
        count=CHOSEN,
        **ROUTINGS[name],
    )
    assert error(got.logits.cpu(), logits) < 1e-6
    assert torch.equal(got.experts.cpu().long(), experts)
    torch.testing.assert_close(got.weights.cpu(), weights, atol=1e-6, rtol=1e-5)
    order = experts.flatten().argsort(stable=True)
    assert torch.equal(got.order.cpu().long(), order)
    counts = experts.flatten().bincount(minlength=COUNT)
    assert torch.equal(got.firsts.cpu().long(), torch.cat([torch.zeros(1).long(), counts.cumsum(0)]))


@pytest.mark.parametrize("tokens", [1, 21])
def test_rows_that_were_routed_elsewhere_are_sorted_by_their_experts(
    tokens: int, device: torch.device
) -> None:
    """Pairs without an expert come before all others, where no expert's pairs begin."""
    generator = torch.Generator().manual_seed(6)
    experts = torch.randint(-1, COUNT, (tokens, CHOSEN), generator=generator)
    got = order_rows(experts.int().to(device), COUNT)
    order, none = experts.flatten().argsort(stable=True), int((experts == -1).sum())
    assert torch.equal(got.order.cpu().long()[none:], order[none:])
    counts = (experts.flatten() + 1).bincount(minlength=COUNT + 1)
    assert torch.equal(got.firsts.cpu().long(), counts.cumsum(0))


def test_of_equal_scores_the_lower_number_is_picked(device: torch.device) -> None:
    x, router = torch.ones(1, 8, device=device), torch.zeros(6, 8, device=device)
    assert route_experts(x, router, count=3).experts.tolist() == [[0, 1, 2]]
    groups = route_experts(x, router, count=2, groups=3, groups_per_token=1)
    assert groups.experts.tolist() == [[0, 1]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, which interprets
@pytest.mark.parametrize("name", ["softmax", "sigmoid-groups", "of-chosen"])
def test_a_row_that_is_not_finite_picks_different_experts_and_spoils_no_other(
    name: str, device: torch.device
) -> None:
    x, router = random(5, HIDDEN).to(device), random(COUNT, HIDDEN, seed=2).to(device)
    clean = route_experts(x, router, count=CHOSEN, **ROUTINGS[name])
    sick = x.clone()
    sick[2] = torch.nan
    got = route_experts(sick, router, count=CHOSEN, **ROUTINGS[name])
    assert len(set(got.experts[2].tolist())) == CHOSEN
    assert got.weights[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(got.experts[others], clean.experts[others])
    assert torch.equal(got.weights[others], clean.weights[others])
    assert sorted(got.order.tolist()) == list(range(5 * CHOSEN))


def layer(
    x: torch.Tensor, routed: RoutedRows, biased: bool, activation: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts' sum by the kernels, and by loops in float32."""
    dtype = x.dtype
    gate_up = (random(COUNT, 2 * INNER, HIDDEN, seed=5) * HIDDEN**-0.5 * 2).to(device, dtype)
    down = (random(COUNT, HIDDEN, INNER, seed=6) * INNER**-0.5).to(device, dtype)
    biases = [random(COUNT, n, seed=n).to(device, dtype) if biased else None for n in (2 * INNER, HIDDEN)]
    limit = 0.8 if activation == "clamped_swiglu" else None
    inner = expert_swiglu(x, gate_up, biases[0], routed, activation=activation, limit=limit)
    parts = expert_linear(inner, down, biases[1], routed)

    def product(numbers: torch.Tensor, matrices: torch.Tensor, which: int, expert: int) -> torch.Tensor:
        bias = biases[which]
        wide = None if bias is None else bias[expert].float()
        return functional.linear(numbers, matrices[expert].float(), wide)

    expected = torch.zeros(x.shape, device=device)
    for row in range(len(x)):
        for expert, weight in zip(routed.experts[row].tolist(), routed.weights[row].tolist(), strict=True):
            both = product(x[row].float(), gate_up, 0, expert)
            act = swiglu(both) if limit is None else clamped_swiglu(both, limit)
            expected[row] += weight * product(act, down, 1, expert)
    return sum_experts(parts, routed), expected


@pytest.mark.parametrize(("biased", "activation"), [(False, "silu"), (True, "clamped_swiglu")])
@pytest.mark.parametrize("tokens", sampled([1, 16, 23], [1, 23]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_equal_a_loop_over_rows(
    dtype: torch.dtype, tokens: int, biased: bool, activation: str, device: torch.device
) -> None:
    x = random(tokens, HIDDEN, seed=9).to(device, dtype)
    routed = route_experts(x, (random(COUNT, HIDDEN, seed=2) * 0.3).to(device), count=CHOSEN)
    got, expected = layer(x, routed, biased, activation, device)
    assert got.dtype == dtype
    assert error(got, expected) < 2 * TOLERANCE[dtype]


def test_a_row_has_the_same_bits_alone_and_among_others(device: torch.device) -> None:
    router = (random(COUNT, HIDDEN, seed=2) * 0.3).to(device)
    x = random(16, HIDDEN, seed=10).to(device, torch.bfloat16)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return layer(rows, route_experts(rows, router, count=CHOSEN), False, "silu", device)[0]

    together = run(x)
    for row in (0, 7, 15):
        assert torch.equal(run(x[row : row + 1].clone())[0], together[row])


def test_the_shared_expert_is_added_and_may_be_switched(device: torch.device) -> None:
    x = random(4, HIDDEN).to(device)
    routed = route_experts(x, random(COUNT, HIDDEN, seed=2).to(device), count=CHOSEN)
    parts, shared, switch = random(4 * CHOSEN, 30, seed=3), random(4, 30, seed=4), random(4, seed=5)
    plain = (parts.view(4, CHOSEN, 30) * routed.weights.cpu().unsqueeze(-1)).sum(1)
    got = sum_experts(parts.to(device), routed, shared.to(device))
    assert error(got.cpu(), plain + shared) < 1e-6
    got = sum_experts(parts.to(device), routed, shared.to(device), switch.to(device))
    assert error(got.cpu(), plain + shared * switch.sigmoid().unsqueeze(1)) < 1e-6


def test_no_rows_are_no_work_and_other_formats_are_refused(device: torch.device) -> None:
    x, router = random(0, HIDDEN).to(device), random(COUNT, HIDDEN).to(device)
    routed = route_experts(x, router, count=CHOSEN)
    weight = random(COUNT, 8, HIDDEN).to(device)
    assert expert_swiglu(x, weight, None, routed).shape == (0, 4)
    assert sum_experts(x, routed).shape == (0, HIDDEN)
    one = random(1, HIDDEN).to(device)
    with pytest.raises(ValueError, match="times experts of"):
        expert_swiglu(one.half(), weight, None, route_experts(one, router, count=CHOSEN))


def test_experts_that_are_dealt_add_up_to_all_and_read_nothing_of_others(device: torch.device) -> None:
    x = random(5, HIDDEN).to(device)
    routed = route_experts(x, random(COUNT, HIDDEN, seed=2).to(device), count=CHOSEN)
    gate_up = random(COUNT, 2 * INNER, HIDDEN, seed=5).to(device)
    down = random(COUNT, HIDDEN, INNER, seed=6).to(device)
    whole = sum_experts(expert_linear(expert_swiglu(x, gate_up, None, routed), down, None, routed), routed)
    total, middle = torch.zeros_like(whole), COUNT // 3
    for held in (range(middle), range(middle, COUNT)):
        share, own = routed.among(held), slice(held.start, held.stop)
        inner = torch.full((5 * CHOSEN, INNER), torch.nan, device=device)
        parts = torch.full((5 * CHOSEN, HIDDEN), torch.nan, device=device)
        expert_swiglu(x, gate_up[own], None, share, out=inner)
        expert_linear(inner, down[own], None, share, out=parts)
        total += sum_experts(parts, share)
    assert error(total, whole) < 1e-5
