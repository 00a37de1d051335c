"""The sum of what the parts of a model add to the residual (diptych/engine/parallel/parts.py).

Parts are added one after the other, in float32, and the sum is rounded once. So its bits depend on the parts,
and not on the number of ranks that computed them.
"""

from __future__ import annotations

import torch


def sum_parts(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum of `parts [P, ...]` in their order, of their dtype: `[...]`."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)
