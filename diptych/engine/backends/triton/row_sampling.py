"""Sampling of a step's rows of logits on the device, launched without waiting for the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from diptych.engine.backends.triton.decode_buffers import FIELD_TYPES, sampling_values
from diptych.engine.backends.triton.decode_graphs import SAMPLING_FIELDS, sample_tokens, sampled
from diptych.engine.backends.triton.forward_pass import ForwardPass
from diptych.engine.batch import StepOutput
from diptych.engine.sampling import SampleRow


def launch_sampling(
    layers: ForwardPass, logits: torch.Tensor, draws: Sequence[SampleRow | None]
) -> Callable[[], StepOutput]:
    """Begin to sample those rows of `logits [rows, vocab]` that have a draw.

    Returns what waits for the tokens, and for the logits of the other rows.
    """
    rows = [row for row, draw in enumerate(draws) if draw is not None]
    if not rows:
        return lambda: StepOutput.logits_only(logits.cpu())
    left = [row for row, draw in enumerate(draws) if draw is None]
    values = [sampling_values(draw) for draw in draws if draw is not None]
    by = {
        name: _upload([value[name] for value in values], FIELD_TYPES[name], logits.device)
        for name in SAMPLING_FIELDS
    }
    out = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    chosen = logits[_upload(rows, torch.int64, logits.device)] if left else logits
    found = sample_tokens(layers, chosen, by, None, out)

    def collect() -> StepOutput:
        tokens: list[Any] = [None] * len(draws)
        for row, token in zip(rows, found.tolist(), strict=True):
            tokens[row] = sampled(token)
        return StepOutput(tokens, logits[left].cpu() if left else torch.empty((0, logits.shape[1])))

    return collect


def _upload(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers on the device, whose copy waits for nothing that was queued before."""
    host = torch.tensor(numbers, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
