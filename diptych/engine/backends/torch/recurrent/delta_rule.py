"""The gated delta rule (Yang et al. 2024): a head's matrix forgets, and is corrected by each token.

Names carry shapes: B sequences with T tokens each, N heads, D lanes of a key, V of a value. A state is
float32 `[N, D, V]`, zeros before the first token. Of a token with key k, value v, decay a = exp(log_decay)
and rate b it becomes `a M + k (b (v - k·(a M)))`, and the token's output is `q·M` of the new one. All is
float32.
"""

from __future__ import annotations

import torch

from diptych.engine.backends.torch.recurrent.pieces import cut_rows, decay_between


def delta_rule(
    q_BTND: torch.Tensor,
    k_BTND: torch.Tensor,
    v_BTNV: torch.Tensor,
    log_decay_BTN: torch.Tensor,
    rate_BTN: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the sequences' next tokens, `[B, T, N, V]`, and the states after them.

    Queries are scaled and keys normalised already. Several tokens are computed in pieces that are solved as
    triangular systems (the WY form of the paper), so that only one step a piece is sequential.
    """
    parts = [x.transpose(1, 2) for x in (q_BTND, k_BTND, v_BTNV, log_decay_BTN, rate_BTN)]
    rows = q_BTND.shape[1]
    if rows == 1:
        out, states = _one_token([part.squeeze(2) for part in parts], states)
        return out.unsqueeze(1), states
    outs = []
    for run in cut_rows(rows):
        out, states = _pieces([run.of(part, 2) for part in parts], states)
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2), states


def _one_token(parts: list[torch.Tensor], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs `[B, N, V]` of one token of each sequence, and the states after it."""
    q, k, v, log_decay, rate = parts
    decayed = states * log_decay.exp()[..., None, None]
    correction = (v.unsqueeze(-2) - k.unsqueeze(-2) @ decayed) * rate[..., None, None]
    states = decayed.addcmul_(k.unsqueeze(-1), correction)
    return (q.unsqueeze(-2) @ states).squeeze(-2), states


def _pieces(parts: list[torch.Tensor], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs `[B, N, tokens, V]` and the states behind pieces of one length l, of parts
    `[B, N, pieces, l, …]`.
    """
    q, k, v, log_decay, rate = parts
    total = log_decay.cumsum(dim=-1)
    between, grown = decay_between(total), total.exp().unsqueeze(-1)
    rated = k * rate.unsqueeze(-1)

    # Each row's correction needs those of the rows before it: (1 + lower triangle) corrections = values.
    system = (rated @ k.transpose(-1, -2)) * between
    right = torch.cat([v * rate.unsqueeze(-1), rated * grown], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = (q @ k.transpose(-1, -2)) * between

    asked = q * grown
    written = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    kept = grown[..., -1:, :]
    outs = []
    for piece in range(q.shape[2]):
        corrected = values[:, :, piece] - read[:, :, piece] @ states
        outs.append(asked[:, :, piece] @ states + within[:, :, piece] @ corrected)
        states = states * kept[:, :, piece] + written[:, :, piece] @ corrected
    return torch.cat(outs, dim=2), states
