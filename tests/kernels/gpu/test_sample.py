"""Sampling on the device against the engine's own: the same tokens for the same logits, seed and position."""

from __future__ import annotations

import pytest
import torch

from diptych.engine.sampling.random import distribution, sample_token, uniform
from diptych.engine.sampling.sample_row import SampleRow, SamplingParams
from kernels.gpu.sample import NOT_FINITE, SampleScratch, make_scratch, sample
from tests.forms import sampled


def signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def run(logits: torch.Tensor, rows: list[SampleRow], scratch: SampleScratch | None = None) -> list[int]:
    """Return the rows' tokens; a row's counter is the number of its output tokens."""
    at, params = logits.device, [row.params for row in rows]
    tokens = sample(
        logits,
        torch.tensor([p.temperature for p in params], device=at),
        torch.tensor([p.top_k for p in params], dtype=torch.int32, device=at),
        torch.tensor([p.top_p for p in params], dtype=torch.float64, device=at),
        torch.tensor([p.min_p for p in params], device=at),
        torch.tensor([signed(p.seed) for p in params], device=at),
        torch.tensor([len(row.output_ids) for row in rows], device=at),
        scratch=scratch,
    )
    return [int(token) for token in tokens]


def row(position: int = 0, **params: float) -> SampleRow:
    return SampleRow(SamplingParams(**params), [], [0] * position)  # type: ignore[arg-type]


def test_uniform_is_the_engines_random_number(device: torch.device) -> None:
    pairs = [(0, 0), (1, 0), (0, 1), (2**64 - 1, 7), (2**63, 2**16), (123456789, 4095)]
    scratch = make_scratch(len(pairs), 1, device)
    rows = [row(counter, seed=seed) for seed, counter in pairs]
    run(torch.zeros(len(pairs), 1, device=device), rows, scratch)
    assert scratch.uniforms.tolist() == [uniform(seed, counter) for seed, counter in pairs]


RULES: list[dict[str, float]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 100, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7},
    {"top_k": 300, "top_p": 0.99, "temperature": 1.5},
]


@pytest.mark.parametrize(
    ("vocab", "spread"),
    sampled([(50, 4.0), (1333, 1.0), (9001, 6.0), (128_256, 3.0)], [(50, 4.0), (1333, 1.0)]),
)
def test_sampled_tokens_are_the_engines(vocab: int, spread: float, device: torch.device) -> None:
    """Longer vocabularies are cut into parts; the longest takes the interpreter too long."""
    if vocab > 10_000 and device.type == "cpu":
        pytest.skip("too long for the interpreter")
    torch.manual_seed(vocab)
    rows = [row(n, seed=n * 7919 + 1, **rule) for n, rule in enumerate(RULES)]
    logits = torch.randn(len(rows), vocab, device=device) * spread
    expected = [sample_token(scores.cpu().numpy(), row) for scores, row in zip(logits, rows, strict=True)]
    assert run(logits, rows) == expected


def test_rows_of_all_kinds_share_a_batch_of_several_parts(device: torch.device) -> None:
    """Lists that are everything, nearly nothing, or of one part alone; each drawn with several numbers."""
    torch.manual_seed(3)
    rules: list[dict[str, float]] = [
        {"top_p": 0.999999},
        {"top_k": 5999, "top_p": 0.5},
        {"min_p": 1e-30},
        {"temperature": 0.0},
        {"temperature": 1e-3},
        {"temperature": 50.0, "top_p": 0.3},
        {"top_k": 24},  # as many as there are groups of scores
        {"top_k": 25},
    ]
    logits = torch.randn(len(rules), 6000, device=device)
    logits[:, 4090:4100] += 8.0  # on both sides of a border
    for position in range(3):
        rows = [row(position, seed=n + 50, **rule) for n, rule in enumerate(rules)]
        expected = [
            int(scores.argmax()) if row.params.greedy else sample_token(scores.cpu().numpy(), row)
            for scores, row in zip(logits, rows, strict=True)
        ]
        assert run(logits, rows) == expected


def test_ties_are_kept_as_the_engine_keeps_them(device: torch.device) -> None:
    torch.manual_seed(1)
    logits = torch.randint(-4, 4, (1, 200), device=device).float() * 0.5
    logits[0, 17] = -0.0
    for rule in ({"top_k": 30}, {"top_p": 0.7}, {"top_k": 90, "top_p": 0.5}):
        rows = [row(n, seed=5, **rule) for n in range(3)]
        scores = logits[0].cpu().numpy()
        got = run(logits.expand(3, -1).contiguous(), rows)
        assert got == [sample_token(scores, row) for row in rows]
        ids, _ = distribution(scores, rows[0].params)
        assert set(got) <= set(ids.tolist())


def test_greedy_takes_the_lowest_of_the_likeliest(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0], [-5.0, -4.0, -3.0]], device=device)
    assert run(logits, [row(temperature=0.0)] * 3) == [1, 0, 2]


def test_a_row_that_is_not_finite_changes_no_other(device: torch.device) -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 70, device=device)
    logits[0, 69], logits[1, 3], logits[2, 0] = torch.nan, torch.inf, -torch.inf
    rows = [row(temperature=0.0), row(seed=1), row(seed=2), row(seed=3)]
    scratch = make_scratch(6, 80, device)
    got = run(logits, rows, scratch)
    assert got[:3] == [NOT_FINITE] * 3
    assert got[3:] == run(logits[3:], rows[3:])
    with pytest.raises(ValueError, match="too small"):
        run(logits, rows, make_scratch(4, 69, device))
