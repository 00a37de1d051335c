"""Matrices of random codes as AWQ stores them (its `gemm` version): 4 bits, groups of inputs, zeros of eight.

`qweight` int32 `[in, out / 8]`, `qzeros` int32 `[in / group, out / 8]`, `scales` float16 `[in / group, out]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

_MIDDLE = -0x77777778
"""Eight codes of 8, as an int32."""
_SPREAD = 4.6
"""Standard deviation of sixteen codes that are equally likely."""


def config(group: int) -> dict[str, object]:
    """Return the `quantization_config` of a folder."""
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


def tensors(
    name: str,
    size: tuple[int, ...],
    *,
    plain: Callable[[str, tuple[int, ...]], Mapping[str, torch.Tensor]],
    group: int,
    device: torch.device,
) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a layer's matrix `[out, in]`; of all else what `plain` returns."""
    if len(size) != 2 or ".layers." not in name:
        return plain(name, size)
    outputs, inputs = size
    codes = torch.randint(-(1 << 31), 1 << 31, (inputs, outputs // 8), device=device, dtype=torch.int64)
    owner = name.removesuffix(".weight")
    return {
        f"{owner}.qweight": codes.to(torch.int32).cpu(),
        f"{owner}.qzeros": torch.full((inputs // group, outputs // 8), _MIDDLE, dtype=torch.int32),
        f"{owner}.scales": torch.full((inputs // group, outputs), inputs**-0.5 / _SPREAD).half(),
    }
