"""The state space of Mamba-2 (Dao and Gu 2024): a matrix for each head that forgets and is added to.

Names carry shapes: B sequences with T tokens each, N heads, P channels of a head, G groups of heads, M
numbers of a channel's state. A state is float32 `[N, P, M]`, zeros before the first token. Of a token with
input x, step d and its group's b and c it becomes `exp(d a) h + d x b`, and the token's output is `h·c` of
the new one. All is float32.
"""

from __future__ import annotations

import torch

from diptych.engine.backends.torch.recurrent.pieces import cut_rows, decay_between


def state_space(
    x_BTNP: torch.Tensor,
    step_BTN: torch.Tensor,
    a_N: torch.Tensor,
    b_BTGM: torch.Tensor,
    c_BTGM: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the sequences' next tokens, `[B, T, N, P]`, and the states after them.

    `a_N` is negative, steps are positive. Rows of a piece read each other as attention does, with decays in
    place of a softmax, so that only one step a piece is sequential.
    """
    added = (x_BTNP * step_BTN.unsqueeze(-1)).transpose(1, 2)
    log_decay = (step_BTN * a_N).transpose(1, 2)
    b, c = b_BTGM.transpose(1, 2), c_BTGM.transpose(1, 2)
    rows = x_BTNP.shape[1]
    if rows == 1:
        out, states = _one_token([part.squeeze(2) for part in (added, log_decay, b, c)], states)
        return out.unsqueeze(1), states
    outs = []
    for run in cut_rows(rows):
        out, states = _pieces([run.of(part, 2) for part in (added, log_decay, b, c)], states)
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2), states


def _one_token(parts: list[torch.Tensor], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs `[B, N, P]` of one token of each sequence, and the states after it."""
    added, log_decay, b, c = parts
    share = added.shape[1] // b.shape[1]
    b, c = (one.repeat_interleave(share, dim=1) for one in (b, c))
    states = (states * log_decay.exp()[..., None, None]).addcmul_(added.unsqueeze(-1), b.unsqueeze(-2))
    return (states @ c.unsqueeze(-1)).squeeze(-1), states


def _pieces(parts: list[torch.Tensor], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs `[B, N, tokens, P]` and the states behind pieces of one length l.

    Parts are `added [B, N, pieces, l, P]`, `log_decay [B, N, pieces, l]`, `b` and `c` `[B, G, pieces, l, M]`.
    What heads of a group share is multiplied once for all of them, as `[B, G, …, heads a group * P]`.
    """
    added, log_decay, b, c = parts
    groups, share, channels = b.shape[1], added.shape[1] // b.shape[1], added.shape[-1]
    total = log_decay.cumsum(dim=-1)
    met = (c @ b.transpose(-1, -2)).unsqueeze(2)
    between = decay_between(total).unflatten(1, (groups, share))
    outs = (between * met).flatten(1, 2) @ added

    faded = added * (total[..., -1:] - total).exp().unsqueeze(-1)
    # [B, N, pieces, l, P] -> [B, G, pieces, heads a group * P, l]
    faded = faded.unflatten(1, (groups, share)).permute(0, 1, 3, 2, 5, 4).flatten(3, 4)
    written = (faded @ b).unflatten(3, (share, channels))
    grown = total.exp().unsqueeze(-1)
    kept = grown[..., -1:, :]
    read = []
    for piece in range(added.shape[2]):
        by_group = states.unflatten(1, (groups, share)).flatten(2, 3)
        read.append(c[:, :, piece] @ by_group.transpose(-1, -2))
        states = states * kept[:, :, piece] + written[:, :, piece].flatten(1, 2)
    # [B, G, pieces, l, heads a group * P] -> [B, N, pieces, l, P]
    stored = torch.stack(read, dim=2).unflatten(-1, (share, channels)).permute(0, 1, 4, 2, 3, 5).flatten(1, 2)
    return (outs + stored * grown).flatten(2, 3), states
