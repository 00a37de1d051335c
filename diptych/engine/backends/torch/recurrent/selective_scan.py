"""The selective scan of Mamba (Gu and Dao 2023): each channel has a small state with decays of its own.

Names carry shapes: B sequences with T tokens each, C channels, M numbers of a channel's state. A state is
float32 `[C, M]`, zeros before the first token. Of a token with input x, step d, b and c it becomes
`exp(d a) h + d x b`, and the token's output is `h·c` of the new one. All is float32.
"""

from __future__ import annotations

import torch

_ROWS = 32
"""Rows whose decays are held at once: `[B, rows, C, M]`."""


def selective_scan(
    x_BTC: torch.Tensor,
    step_BTC: torch.Tensor,
    a_CM: torch.Tensor,
    b_BTM: torch.Tensor,
    c_BTM: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the sequences' next tokens, `[B, T, C]`, and the states after them.

    Decays differ between the numbers of a channel, so that no product of rows replaces the steps: each is one
    multiplication and one addition of the states. A row has the same bits however a text is cut.
    """
    outs = []
    for begin in range(0, x_BTC.shape[1], _ROWS):
        rows = slice(begin, begin + _ROWS)
        step = step_BTC[:, rows]
        decay = (step.unsqueeze(-1) * a_CM).exp_()
        # Overwritten by the states behind each row.
        held = (step * x_BTC[:, rows]).unsqueeze(-1) * b_BTM[:, rows].unsqueeze(2)
        for row in range(held.shape[1]):
            states = held[:, row].addcmul_(decay[:, row], states)
        outs.append((held * c_BTM[:, rows].unsqueeze(2)).sum(-1))
    return torch.cat(outs, dim=1), states.clone()
